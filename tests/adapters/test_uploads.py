"""What the upload.json of merged adapters say against each other. Kind of evidence: refusals, by their words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlora.adapters import merge
from fedlora.errors import AdapterFormatError
from support.adapter_folders import saved
from support.command_line import Said

METHODS = (["--weights-from", "num_examples"], ["--method", "glora"], [])


def upload(folder: Path, name: str, base: str = "tiny", **facts: Any) -> Path:
    where = saved(folder, name, 2, base=base)
    (where / "upload.json").write_text(json.dumps({"client": name, "num_examples": 10, "round": 1} | facts))
    return where


@pytest.mark.parametrize("how", METHODS, ids=str)
@pytest.mark.parametrize("labels", [["yes", "no"], ["no", "yes", "maybe"], []], ids=str)
def test_contrary_classes_are_refused(
    labels: list[str], how: list[str], tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order too: row k of a head is class k. Heads that are left out do not matter, and it is said."""
    monkeypatch.chdir(tmp_path)
    a = upload(tmp_path, "a", label_names=["no", "yes"])
    b = upload(tmp_path, "b", label_names=labels)
    said = main("merge", a, b, *how, "-o", "m").complaint()
    assert str(["no", "yes"]) in said and str(labels) in said and "--heads drop" in said
    assert str(a) in said and str(b) in said
    assert not Path("m").exists()
    done = main("merge", a, b, *how, "--heads", "drop", "-o", "m")
    assert done.code == 0 and "classes differ" in done.err
    c = saved(tmp_path, "c", 2)  # says nothing
    assert "classes" not in main("merge", a, c, "-o", "n").err


CLASSES = ["no", "yes", "may be"]


@pytest.mark.parametrize("how", METHODS, ids=str)
def test_classes_that_all_agree_on_go_with_the_result(
    how: list[str], tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """labels.json as a run's adapter has it; not without the head. The next resize reads it."""
    monkeypatch.chdir(tmp_path)
    a, b = (upload(tmp_path, name, label_names=CLASSES) for name in "ab")
    for force in ([], ["--force"]):
        done = main("merge", a, b, *how, "-o", "m", *force)
        assert done.code == 0, done.err
    want = {"num_labels": 3, "id2label": {"0": "no", "1": "yes", "2": "may be"}}
    assert json.loads(Path("m/labels.json").read_text()) == want
    for force in ([], ["--force"]):
        assert main("resize", "m", "--rank", 1, "-o", "small", *force).code == 0
        assert json.loads(Path("small/labels.json").read_text()) == want
    assert main("merge", a, b, "--heads", "drop", "-o", "n").code == 0 and not Path("n/labels.json").exists()


def test_classes_that_do_not_fit_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    two = [upload(tmp_path / "two", name, label_names=["no", "yes"]) for name in "ab"]
    assert "2 label names" in str(merge(two, tmp_path / "m").warnings)
    a, b = (saved(tmp_path, name, 2) for name in "ab")
    for where, names in ((a, CLASSES), (b, CLASSES[::-1])):
        (where / "labels.json").write_text(json.dumps({"num_labels": 3, "id2label": dict(enumerate(names))}))
    with pytest.raises(AdapterFormatError, match=r"number their classes.*labels\.json.*--heads first"):
        merge([a, b], tmp_path / "n")
    assert merge([a, b], tmp_path / "n", heads="drop").written
    assert not (tmp_path / "m" / "labels.json").exists() and not (tmp_path / "n" / "labels.json").exists()
    (b / "labels.json").write_text('{"id2label": {"1": "x"}}')
    with pytest.raises(AdapterFormatError, match=r"labels\.json .*0, 1, 2"):
        merge([a, b], tmp_path / "o")


@pytest.mark.parametrize("content", [b"junk", b"{}", b"[]", b"\xff", None], ids=repr)
@pytest.mark.parametrize("name", ["upload.json", "labels.json"])
def test_what_lies_beside_an_adapter_is_validated_too(
    name: str, content: bytes | None, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """What a command that uses the folder refuses, validate refuses. None: a pipe, which nobody waits for."""
    folder = saved(tmp_path, "a", 2)
    if content is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(content)
    for command in (["validate", folder], ["resize", folder, "--rank", 1, "-o", tmp_path / "out"]):
        assert name in main(*command).complaint(), command


def test_nobody_counts_twice_or_goes_without_a_word(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = upload(tmp_path, "a"), upload(tmp_path, "b", round=7, num_examples=0)
    again = upload(tmp_path / "again", "a")
    for same in (a, again):
        with pytest.raises(AdapterFormatError, match=r"both belong to client 'a'.*twice"):
            merge([a, same, b], tmp_path / "m", weights_from="num_examples")
    assert re.search("both belong to client 'a'.*2 times", str(merge([a, again], tmp_path / "m").warnings))
    for k, how in enumerate((["--method", "glora"], [])):
        done = main("merge", a, b, *how, "--weights-from", "num_examples", "-o", tmp_path / f"out{k}")
        assert done.code == 0 and "to different rounds: 'a' 1, 'b' 7" in done.err
        assert repr(str(b)) in done.err


@pytest.mark.parametrize(
    "facts",
    [{"label_names": "no"}, {"label_names": [1]}],
    ids=str,
)  # fmt: skip
def test_facts_of_another_shape_are_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match=f"{next(iter(facts))} is "):
        merge([upload(tmp_path, "a", **facts), upload(tmp_path, "b")], tmp_path / "m")
