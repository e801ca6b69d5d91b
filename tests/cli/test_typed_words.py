"""What people type and name themselves: methods with quoted values, labels with rich's markup. Kind: by hand."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import typer
from rich.console import Console

import support.command_line  # noqa: F401 - first, for it expects what typer's import warns of

# isort: split

import fedlora.cli.formats
from fedlora.cli.flower import doctor, typed
from fedlora.cli.formats import Format, show
from fedlora.cli.screen import Screen, console
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("glora rho=0.5, tie='error'", r"\"tie='error'\" names no method.*as \"glora rho=0.5 tie='error'\""),
        ("rho=0.5", "'rho=0.5' names no method"),
        ("glora name='fedit'", "NAME .KEY=VALUE"),
        ("glora tie='error", "a closing '.*\"glora tie='error\""),
        ("own:Mean weights=[1, 2", "a closing ] is missing"),
    ],
)
def test_a_comma_between_settings_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_methods(text)


as_ours: dict[str, Any] = {"emoji": console._emoji, "markup": console._markup}


def test_names_are_text_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """In titles, headers and cells; nothing is coloured, drawn or lost."""
    file = io.StringIO()
    monkeypatch.setattr(fedlora.cli.formats, "console", Console(file=file, width=300, **as_ours))
    sheet = Table(pd.DataFrame([{"method": f"cell {ODD}", f"to {ODD}": 1}]), 1, [f"title {ODD}"])
    show([sheet], [f"remark {ODD}"], Format.table)
    assert [file.getvalue().count(f"{where} {ODD}") for where in ("title", "to", "cell", "remark")] == [1, 1, 1, 1]


def test_cells_in_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """What ends a cell is escaped; p has two digits, what is never reached is a word, pandas' NA nothing."""
    sheet = Table(pd.DataFrame([{"method": "a|b_c", "median": float("inf"), "p": 0.01234, "seeds": pd.NA}]), 1, ["T."])
    show([sheet], [], Format.markdown)
    assert r"| a\|b_c | never | 0.012 |  |" in capsys.readouterr().out
    show([sheet], [], Format.latex)
    printed = capsys.readouterr().out
    assert r"a|b\_c & never & 0.012 &  \\" in printed and r"\caption{T.}" in printed


def test_a_runs_names_are_text(
    monkeypatch: pytest.MonkeyPatch, finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The method of a run, in a progress bar and in the tables at the end. Braces are no field of the bar."""
    import fedlora.cli.run_words
    import fedlora.cli.runs

    class Odd:
        path = finished.folder.path

        def read_json(self, name: str) -> Any:
            found = finished.folder.read_json(name)
            if name != "summary.json":
                return found
            drift = {ODD: 0.5} | found["gauge_drift"]
            return found | {"method": ODD, "gauge_drift": drift, "stopped_early": {"of": 9, "why": ODD}}

        def metrics(self) -> Any:
            return finished.folder.metrics()

    file = io.StringIO()
    monkeypatch.setattr(fedlora.cli.run_words, "console", Console(file=file, width=300, **as_ours))
    fedlora.cli.run_words.show_run(Odd())  # type: ignore[arg-type]
    said = file.getvalue()
    assert f"{ODD}, 3 rounds" in said and f"gauge check: {ODD} moves by" in said and said.count(ODD) == 3
    bar = screened(monkeypatch)
    watch = fedlora.cli.runs._Watch(f"{ODD} {{x}}", 2, 2, "accuracy", 0)
    state = SimpleNamespace(server=SimpleNamespace(tally=None))
    with watch.bar:
        watch.round_done(
            SimpleNamespace(round=1, loss=0.5, metrics={"accuracy": 0.5}, refused={"a": ODD}, state=state)  # type: ignore[arg-type]
        )
    assert f"{ODD} {{x}}" in bar.file.getvalue() and f"left out: {ODD}" in bar.file.getvalue()  # type: ignore[attr-defined]


def screened(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal for the bar and the lines above it."""
    screen = Screen(file=io.StringIO(), width=300, force_terminal=True, color_system=None)
    for module in (fedlora.cli.runs, fedlora.cli.screen):
        monkeypatch.setattr(module, "notes", screen)
    return screen


@pytest.mark.parametrize(("done", "says"), [(0, "round 1"), (3, "round 4"), (4, "round 4")])
def test_a_bar_begins_where_the_run_does(monkeypatch: pytest.MonkeyPatch, done: int, says: str) -> None:
    """It began at the first round of a resumed run, as if all were trained again."""
    bar = screened(monkeypatch)
    with fedlora.cli.runs._Watch("glora", 4, 3, "accuracy", done).bar:
        pass
    first = bar.file.getvalue()  # type: ignore[attr-defined]
    assert says in first and f"{3 * done}/12" in first


def test_a_path_with_spaces_can_be_typed() -> None:
    """A shell takes each printed command apart into the words that were meant."""
    place = Path("/srv/a fed's")
    assert shlex.split(f"fedlora doctor {typed(place)}") == ["fedlora", "doctor", str(place)]


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "flwr" else "999.0")
    with pytest.raises(typer.Exit):
        doctor.doctor()
    assert "pip install 'fedlora[flower]'" in " ".join(capsys.readouterr().err.split())
