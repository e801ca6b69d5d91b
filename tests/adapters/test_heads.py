"""What lies beside the pairs: saved modules, class names, uploads. Kinds of evidence: by hand, refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora import read_adapter
from fedlora.adapters import AdapterFile, merge, resize
from fedlora.errors import AdapterFormatError
from support.adapter_folders import bare, saved
from support.command_line import Said

Q = "layer.0.q"
CLASSES = ["no", "yes", "may be"]


def headed(folder: Path, value: float | None, **config: Any) -> Path:
    """With a saved tensor of one value; None: without."""
    beside = {} if value is None else {"score.weight": torch.full((3, 12), value)}
    return bare(folder, {Q: 2}, beside=beside, modules_to_save=["score"] if beside else None, **config)


def upload(folder: Path, name: str, **facts: Any) -> Path:
    where = saved(folder, name, 2)
    (where / "upload.json").write_text(json.dumps({"client": name, "num_examples": 10, "round": 1} | facts))
    return where


def classed(folder: Path, names: Any) -> Path:
    (folder / "labels.json").write_text(json.dumps({"num_labels": len(names), "id2label": dict(enumerate(names))}))
    return folder


def test_heads_by_each_rule(tmp_path: Path, main: Callable[..., Said]) -> None:
    """By hand: 2, 3 and none. What a rule leaves out is named in the report, the command and the card."""
    a, b, c = headed(tmp_path / "a", 2.0), headed(tmp_path / "b", 3.0), headed(tmp_path / "c", None)

    def head(folder: Path) -> Any:
        return read_adapter(folder)[0].heads.get("score.weight")

    merge([a, b, b], tmp_path / "m", weights=[0.7, 0.2, 0.1])
    torch.testing.assert_close(head(tmp_path / "m"), torch.full((3, 12), 2.3))
    report = merge([b, a, c], tmp_path / "n", heads="first")
    assert torch.equal(head(tmp_path / "n"), torch.full((3, 12), 3.0)) and report.beside == ("score.weight",)
    for rule, adapters in (("drop", (a, b)), ("first", (c, a)), ("drop", (b,))):
        report = merge(adapters, tmp_path / "o", heads=rule, force=True)
        assert (report.dropped, report.beside) == (("score.weight",), ())
        assert "Left out: score.weight." in (tmp_path / "o" / "README.md").read_text()
        assert not AdapterFile(tmp_path / "o").heads and not AdapterFile(tmp_path / "o").config["modules_to_save"]
    assert "such as score.weight" in main("merge", c, a, "-o", tmp_path / "p", "--heads", "first").out


def test_heads_that_have_no_mean(tmp_path: Path) -> None:
    """One lacks them; they differ in shape; the weights of a sum do not add up to 1, also of one alone."""
    a, b, c = headed(tmp_path / "a", 2.0), headed(tmp_path / "b", 3.0), headed(tmp_path / "c", None)
    other = bare(tmp_path / "d", {Q: 2}, beside={"score.weight": torch.ones(4, 12)}, modules_to_save=["score"])
    with pytest.raises(AdapterFormatError, match=rf"{c} has no 'score.weight'.*--heads first"):
        merge([a, c], tmp_path / "m")
    with pytest.raises(AdapterFormatError, match=r"'score.weight' has different shapes.*--heads drop"):
        merge([a, other], tmp_path / "m")
    for given, weights in (([a, b], None), ([a], [0.4]), ([a, a], [-0.5, 0.5])):
        with pytest.raises(AdapterFormatError, match=r"'score.weight' .*add up to"):
            merge(given, tmp_path / "m", sum=True, weights=weights)
    assert not (tmp_path / "m").exists()
    merge([a, b], tmp_path / "m", sum=True, weights=[2, -1])
    assert torch.equal(AdapterFile(tmp_path / "m").head("score.weight"), torch.ones(3, 12))


def test_rounding_of_heads_is_reported_and_their_sum_is_in_float64(tmp_path: Path) -> None:
    """1.001 is 1 in bfloat16: moved by 0.001 / 1.001. A third of one and two thirds of the other, to float64."""
    a, b = headed(tmp_path / "a", 1.001), headed(tmp_path / "b", 1 / 3)
    assert merge([a], tmp_path / "m", dtype="bfloat16").beside_rounding == pytest.approx(0.001 / 1.001, rel=1e-4)
    merge([a, b], tmp_path / "o", weights=[1, 2], dtype="float64")
    want = torch.tensor(1.001).double() / 3 + torch.tensor(1 / 3).double() * 2 / 3
    assert abs(float(AdapterFile(tmp_path / "o").head("score.weight")[0, 0] - want)) < 1e-15
    assert resize(a, tmp_path / "p", rank=2).beside_rounding == 0
    half = bare(tmp_path / "h", {Q: 2}, beside={"score.weight": torch.ones(3, 12).half()}, modules_to_save=["score"])
    merge([half, a], tmp_path / "q")  # the wider of the two types, whichever comes first
    assert AdapterFile(tmp_path / "q").head("score.weight").dtype == torch.float32


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_classes_that_all_agree_on_go_with_the_result(tmp_path: Path, main: Callable[..., Said]) -> None:
    """labels.json as a run's adapter has it; not without the head. The next resize reads it."""
    a, b = classed(upload(tmp_path, "a"), CLASSES), saved(tmp_path, "b", 2)  # which says nothing
    assert main("merge", a, b, "--method", "glora", "-o", tmp_path / "m").code == 0
    resize(tmp_path / "m", tmp_path / "small", rank=1)
    want = {"num_labels": 3, "id2label": {"0": "no", "1": "yes", "2": "may be"}}
    assert all(json.loads((tmp_path / out / "labels.json").read_text()) == want for out in ("m", "small"))
    merge([a, b], tmp_path / "n", heads="drop")
    assert not (tmp_path / "n" / "labels.json").exists()


def test_classes_that_differ_are_refused_unless_heads_are_not_averaged(tmp_path: Path) -> None:
    """Row k of a head is class k."""
    a, b = classed(saved(tmp_path, "a", 2), CLASSES), classed(saved(tmp_path, "b", 2), CLASSES[::-1])
    with pytest.raises(AdapterFormatError, match=r"a and .*b number their classes differently.*--heads first"):
        merge([a, b], tmp_path / "m")
    assert not (tmp_path / "m").exists()
    merge([a, b], tmp_path / "first", heads="first"), merge([a, b], tmp_path / "drop", heads="drop")
    assert (tmp_path / "first" / "labels.json").exists() and not (tmp_path / "drop" / "labels.json").exists()
    c, d = (classed(headed(tmp_path / name, None), names) for name, names in (("c", CLASSES), ("d", CLASSES[::-1])))
    assert merge([c, d], tmp_path / "no heads").warnings == ()


# ---- uploads ---------------------------------------------------------------------------------------------------------


def test_weights_from_examples(tmp_path: Path, main: Callable[..., Said]) -> None:
    """30 and 10 examples; all must say theirs, once each; weight 0 is told."""
    a, b, c = upload(tmp_path, "a", num_examples=30), upload(tmp_path, "b"), saved(tmp_path, "c", 2)
    report = merge([a, b], tmp_path / "m", weights="num_examples")
    assert report.weights == (0.75, 0.25)
    with pytest.raises(AdapterFormatError, match=rf"{c} has no upload\.json.*1 of 3"):
        merge([a, b, c], tmp_path / "n", weights="num_examples")
    for same in (a, upload(tmp_path / "again", "a")):
        with pytest.raises(AdapterFormatError, match=r"client 'a'.*twice"):
            merge([a, same, b], tmp_path / "n", weights="num_examples")
    none = upload(tmp_path, "d", num_examples=0)
    done = main("merge", a, none, "--method", "glora", "--weights", "num_examples", "-o", tmp_path / "out")
    assert done.code == 0 and "weight 0, so not" in done.err and str(none) in done.err


@pytest.mark.parametrize(
    "content", [b"{}", b'{"id2label": {"1": "x"}}', None], ids=lambda c: str(c)[:20],
)  # fmt: skip
@pytest.mark.parametrize("name", ["upload.json", "labels.json"])
def test_what_lies_beside_an_adapter_is_validated_too(
    name: str, content: bytes | None, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """What a command that uses the folder refuses, validate refuses. None: a pipe, which nobody waits for."""
    folder = saved(tmp_path, "a", 2)
    os.mkfifo(folder / name) if content is None else (folder / name).write_bytes(content)
    for command in (["validate", folder], ["resize", folder, "--rank", 1, "-o", tmp_path / "out"]):
        assert name in main(*command).complaint(), command


def test_facts_of_another_shape_are_refused(tmp_path: Path) -> None:
    names: list[dict[str, Any]] = [{"client": text} for text in ("", "a\nb", "a" * 201)]
    counts: list[dict[str, Any]] = [{"num_examples": count} for count in (-1, 1e16, True, "2")]
    for k, facts in enumerate(names + counts):
        with pytest.raises(AdapterFormatError, match=r"upload\.json"):
            merge([upload(tmp_path, f"a{k}", **facts)], tmp_path / "m")
