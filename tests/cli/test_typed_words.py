"""What people type and name themselves: methods with quoted values, labels with rich's markup. Kind: by hand."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pandas as pd
import pytest
import typer

import support.command_line  # noqa: F401 - first, for it expects what typer's import warns of

# isort: split

import fedlora.cli.formats
from fedlora.cli.flower import doctor, typed
from fedlora.cli.formats import Format, show
from fedlora.cli.screen import Screen
from fedlora.cli.typed import parse_methods, plain_label
from fedlora.errors import ConfigError
from fedlora.experiments.tables import Table

ODD = "[red]m[/red] :fire: [/nothing]"  # markup, the name of a picture, and a closing tag that closes nothing


def test_commas_and_spaces_in_quotes_and_brackets_are_of_the_value() -> None:
    """Values as TOML has them; the label keeps the quotes, and one space stands between its words."""
    found = parse_methods("""glora  tie='error' , own:Mean name2="a, [b  c" weights=[1, 2.5],svd energy=0.9""")
    assert {label: (s.name, s.model_extra) for label, s in found.items()} == {
        "glora tie='error'": ("glora", {"tie": "error"}),
        """own:Mean name2="a, [b  c" weights=[1, 2.5]""": ("own:Mean", {"name2": "a, [b  c", "weights": [1, 2.5]}),
        "svd energy=0.9": ("svd", {"energy": 0.9}),
    }
    assert plain_label("glora   tie='a  b'  ") == "glora tie='a  b'"


def test_a_comma_between_settings_is_named() -> None:
    for text, says in (
        ("glora rho=0.5, tie='error'", r"\"tie='error'\" names no method.*as \"glora rho=0.5 tie='error'\""),
        ("glora name='fedit'", "NAME .KEY=VALUE"),
        ("own:Mean weights=[1, 2", "a closing ] is missing"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_methods(text)


def test_names_are_text_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """In titles, headers and cells; nothing is coloured, drawn or lost."""
    file = io.StringIO()
    monkeypatch.setattr(fedlora.cli.formats, "console", Screen(file=file))
    sheet = Table(pd.DataFrame([{"method": f"cell {ODD}", f"to {ODD}": 1}]), 1, [f"title {ODD}"])
    show([sheet], [f"remark {ODD}"], Format.table)
    assert [file.getvalue().count(f"{where} {ODD}") for where in ("title", "to", "cell", "remark")] == [1, 1, 1, 1]


def test_cells_in_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """What ends a cell is escaped; p has two digits, what is never reached is a word, pandas' NA nothing."""
    sheet = Table(pd.DataFrame([{"method": "a|b_c", "median": float("inf"), "p": 0.01234, "seeds": pd.NA}]), 1, ["T."])
    show([sheet], [], Format.markdown)
    assert "| --- | --: | --: | --: |\n| a\\|b_c | never | 0.012 |  |" in capsys.readouterr().out
    show([sheet], [], Format.latex)
    printed = capsys.readouterr().out
    assert r"a|b\_c & never & 0.012 &  \\" in printed
    assert [word in printed for word in (r"\centering", r"\caption{T.}", r"\label{tab:1}")] == [True] * 3


def test_a_bar_begins_where_the_run_does_and_a_name_in_it_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a resumed run at its next round, at most the last. Braces are no field of the bar."""
    for done, says in ((0, "round 1"), (3, "round 4"), (4, "round 4")):
        screen = Screen(file=io.StringIO(), width=300, force_terminal=True, color_system=None)
        monkeypatch.setattr(fedlora.cli.screen, "notes", screen)
        with fedlora.cli.runs._Watch(f"{ODD} {{x}}", 4, 3, "accuracy", done).bar:
            pass
        first = screen.file.getvalue()  # type: ignore[attr-defined]
        assert says in first and f"{3 * done}/12" in first and f"{ODD} {{x}}" in first


def test_a_path_with_spaces_can_be_typed() -> None:
    """A shell takes each printed command apart into the words that were meant."""
    place = Path("/srv/a fed's")
    assert shlex.split(f"fedlora doctor {typed(place)}") == ["fedlora", "doctor", str(place)]


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "flwr" else "999.0")
    with pytest.raises(typer.Exit):
        doctor.doctor()
    assert "pip install 'fedlora[flower]'" in " ".join(capsys.readouterr().err.split())
