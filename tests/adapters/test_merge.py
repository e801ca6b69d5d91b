"""Merging and resizing adapter folders, by function and by command. Kinds of evidence: oracle (dense float64; peft's
layers), refusals.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from fedlora import read_adapter
from fedlora.adapters import AdapterFile, merge, resize
from fedlora.adapters.base_names import Base, check_same_base, public_name
from fedlora.errors import AdapterFormatError, ConfigError, FedLoRAError, HyperparameterError
from support.adapter_folders import HEADS, SHAPES, bare, saved, updates
from support.bases import rewrite
from support.command_line import Said
from support.peft_models import peft_updates
from support.tiny_models import bert_of_two_layers
from support.worked_examples import python_blocks, run_page

Main = Callable[..., Said]
Q, V = "layer.0.q", "layer.1.v"
FILES = ("adapter_config.json", "adapter_model.safetensors", "README.md")


def mean(*folders: Path, weights: tuple[float, ...] | None = None) -> dict[str, Tensor]:
    """By dense products in float64; a module that one lacks counts zero."""
    weights = weights or (1 / len(folders),) * len(folders)
    found: dict[str, Tensor] = {}
    for folder, w in zip(folders, weights, strict=True):
        for module, update in updates(folder).items():
            found[module] = found.get(module, 0) + w * update
    return found


def distance(folder: Path, want: Mapping[str, Tensor]) -> float:
    got = updates(folder)
    assert got.keys() == want.keys()
    gap = sum(float((got[m] - want[m]).square().sum()) for m in want)
    return math.sqrt(gap / sum(float(t.square().sum()) for t in want.values()))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return found


def assert_one_rank(folder: Path, rank: int) -> None:
    """docs/decisions.md, 0018: one rank, alpha = r and no patterns, so that every program gets the scale right."""
    config = config_of(folder)
    assert (config["r"], config["lora_alpha"], set(AdapterFile(folder).ranks.values())) == (rank, rank, {rank})
    assert not {"rank_pattern", "alpha_pattern", "use_rslora"} & {name for name, value in config.items() if value}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})


# ---- the mean, the sum, the cut --------------------------------------------------------------------------------------


def test_means_and_sums(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Weighted means; task arithmetic with weights as they are; in float64 to its last digits."""
    for weights in (None, (0.7, 0.3)):
        report = merge(two, tmp_path / "m", weights=weights, force=True)
        assert distance(tmp_path / "m", mean(*two, weights=weights)) < 1e-6
        assert (report.weights, report.rank, report.error) == (weights or (0.5, 0.5), 6, 0)
        assert_one_rank(tmp_path / "m", 6)
    for weights in ((1.0, 2.0), (1.0, -1.0), None):
        merge(two, tmp_path / "n", sum=True, weights=weights, force=True)
        assert distance(tmp_path / "n", mean(*two, weights=weights or (1, 1))) < 1e-6
    merge(two, tmp_path / "o", dtype="float64")
    assert distance(tmp_path / "o", mean(*two)) < 1e-13
    assert merge([bare(tmp_path / "one", {"q": 1})], tmp_path / "p").rank == 1


def test_peft_loads_the_mean(tmp_path: Path, main: Main) -> None:
    """Updates of base + the dense mean, and heads their mean; different ranks; scale 1 in the config."""
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 5)
    done = main("merge", a, b, "-o", tmp_path / "m", "--weights", "1,3")
    assert done.code == 0, done.err
    got, want = (
        peft_updates(PeftModel.from_pretrained(bert_of_two_layers(), tmp_path / "m")),
        mean(a, b, weights=(0.25, 0.75)),
    )
    for module in SHAPES:
        torch.testing.assert_close(got[module].double(), want[module], rtol=0, atol=2e-5)
    heads = [read_adapter(folder)[0].heads for folder in (a, b, tmp_path / "m")]
    for path in HEADS:
        torch.testing.assert_close(heads[2][path], 0.25 * heads[0][path] + 0.75 * heads[1][path])
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| a | 0.25 |" in card and "base_model: tiny" in card


def test_the_command_is_the_function(two: tuple[Path, Path], tmp_path: Path, main: Main) -> None:
    """The same bytes; --json is the report; a dry run says all of it and writes nothing."""
    report = merge(two, tmp_path / "m", rank="energy=0.9", weights=[0.7, 0.3])
    asked = ["merge", *two, "--rank", "energy=0.9", "--weights", "0.7,0.3"]
    done = main(*asked, "-o", tmp_path / "n", "--json")
    assert json.loads(done.out) == json.loads(json.dumps(dataclasses.asdict(report) | {"out": str(tmp_path / "n")}))
    resize(two[0], tmp_path / "r", rank=2), main("resize", two[0], "--rank", 2, "-o", tmp_path / "s")
    for one, other in (("m", "n"), ("r", "s")):
        assert all((tmp_path / one / f).read_bytes() == (tmp_path / other / f).read_bytes() for f in FILES)
    before = sorted(tmp_path.rglob("*"))
    dry = merge(two, tmp_path / "not" / "there", rank="energy=0.9", weights=[0.7, 0.3], dry_run=True)
    assert dataclasses.replace(dry, out=report.out, written=True) == report
    for words in (asked, [*asked[:3], "--method", "glora"], ["resize", two[0], "--rank", 2]):
        assert "nothing was written: rank" in main(*words, "--dry-run").out
        assert "give -o DIRECTORY" in main(*words).complaint()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_smaller_rank_is_the_best_of_its_rank(tmp_path: Path, main: Main) -> None:
    """Eckart-Young, module by module, also from several ranks; the error is told; beyond --max-error nothing is
    written, and the refusal names the parts of the loss."""
    a, b = bare(tmp_path / "a", {Q: 4, V: 6}), bare(tmp_path / "b", {Q: 4, V: 6})
    report = resize(a, tmp_path / "m", rank=4)
    for module, update in updates(a).items():
        U, s, Vh = torch.linalg.svd(update, full_matrices=False)
        torch.testing.assert_close(updates(tmp_path / "m")[module], U[:, :4] * s[:4] @ Vh[:4], rtol=0, atol=1e-4)
    assert report.rank == 4 and 0 < report.error < 1
    assert_one_rank(tmp_path / "m", 4)
    cut = merge([a, b], tmp_path / "n", rank=2).error
    for call, given, options, said in (
        (merge, [a, b], {"rank": 2}, re.escape(f"({cut:.2g} by the cut")),
        (merge, [a, b], {"dtype": "bfloat16"}, r"\(0 by the cut.* by writing bfloat16\).*--dtype float32"),
        (merge, [a, b], {"sum": True, "rank": 2}, "off the weighted sum.*--rank exact nothing"),
        (resize, a, {"rank": 1}, "off the adapter's update.*nothing was written"),
    ):
        with pytest.raises(ConfigError, match=said):
            call(given, tmp_path / "o", max_error=1e-9, **options)  # type: ignore[operator]
    assert not (tmp_path / "o").exists()


def test_a_larger_rank_is_padded_by_resize_and_told_by_both(tmp_path: Path, main: Main) -> None:
    """The same update for peft, at rank 8: slots beyond the update's rank are zero in both factors."""
    a = saved(tmp_path, "a", 3)
    done = main("resize", a, "--rank", "8", "-o", tmp_path / "m", "--json")
    said = json.loads(done.out)
    assert (said["rank"], said["error"]) == (8, 0) and "cannot train" in said["warnings"][0]
    found = peft_updates(PeftModel.from_pretrained(bert_of_two_layers(), tmp_path / "m"))
    for module, update in updates(a).items():
        torch.testing.assert_close(found[module].double(), update, rtol=0, atol=1e-4)
    assert_one_rank(tmp_path / "m", 8)
    b, c = bare(tmp_path / "b", {Q: 2}), bare(tmp_path / "c", {Q: 3})
    report = merge([b, c], tmp_path / "n", rank=1000)
    assert report.rank == 5 and "rank 1000" in str(report.warnings)
    assert all(merge([b, c], tmp_path / "o", rank=r, force=True).warnings == () for r in (1, 5, "exact"))


def test_updates_that_are_zero_are_told(tmp_path: Path, main: Main) -> None:
    """B = 0, as LoRA begins, A = 0 and both: it only shrinks a mean, and validate and merge say so."""

    def zeroed(side: str) -> Path:
        folder = bare(tmp_path / side, {Q: 2, V: 2})
        rewrite(folder, lambda t: t.update({k: torch.zeros_like(x) for k, x in t.items() if k[-8] in side}))
        return folder

    a = bare(tmp_path / "a", {Q: 2, V: 2})
    for side in ("B", "A", "BA"):
        zero = zeroed(side)
        assert "update is zero" in main("validate", zero).err
        assert f"{side}' is zero" in str(merge([a, zero], tmp_path / "m", force=True).warnings)
    assert "the result is zero" in resize(zero, tmp_path / "o", rank=2).warnings[-1]
    assert "the result is zero" in str(merge([a, a], tmp_path / "p", sum=True, weights=[1, -1]).warnings)
    assert "zero" not in main("validate", a).err and merge([a], tmp_path / "n").warnings == ()


def test_types(tmp_path: Path) -> None:
    """Types that differ become the one that holds both; what float16 cannot hold is refused with the way out."""
    a, b = bare(tmp_path / "a", {Q: 2}, dtype=torch.bfloat16), bare(tmp_path / "b", {Q: 2}, dtype=torch.float16)
    assert merge([a, b], tmp_path / "m").dtype == "float32"
    with pytest.raises(AdapterFormatError, match=r"float16 holds up to 6\.55e\+04.*--dtype"):
        merge([bare(tmp_path / "c", {Q: 2}, scale=1e5)], tmp_path / "o", dtype="float16")
    assert not (tmp_path / "o").exists()


# ---- what belongs together -------------------------------------------------------------------------------------------


def test_modules_that_one_lacks(tmp_path: Path) -> None:
    """Refused, or by hand half of the other's update."""
    a, b, c = bare(tmp_path / "a", {Q: 2}), bare(tmp_path / "b", {V: 2}), bare(tmp_path / "c", {Q: 2, V: 2})
    for inputs, count in (([a, c], "1 such module"), ([c, c, a], "1 such module"), ([a, b], "2 such modules")):
        with pytest.raises(AdapterFormatError, match=rf"only in one of.*{count}.*--missing zero"):
            merge(inputs, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert merge([a, b], tmp_path / "m", missing="zero").lacking == (Q, V)
    report = merge([a, c], tmp_path / "n", missing="zero")
    torch.testing.assert_close(updates(tmp_path / "n")[V], updates(c)[V] / 2, rtol=0, atol=1e-5)
    assert report.lacking == (V,)


def test_one_module_of_two_shapes_is_two_models(tmp_path: Path) -> None:
    one, other = bare(tmp_path / "a", {"q": 2}), bare(tmp_path / "b", {"q": 2})
    name = "base_model.model.q.lora_A.weight"
    rewrite(other, lambda t: t.update({name: torch.cat([t[name]] * 2, dim=1)}))
    with pytest.raises(AdapterFormatError, match=rf"'q'.*12.*{re.escape(str(one))}.*24.*{re.escape(str(other))}"):
        merge([one, other], tmp_path / "m")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("org/Name", "org/Name/", True), ("org/Name", "ORG/name-bnb-4bit", True), ("tiny", "tiny", True),
     ("org/Name-7B", "org/Name-7B-Instruct", False), (None, "org/Name", False),
     ("/data/Llama-3.1-8B", "/data/llama-3.1-8b", False), ("meta-llama/Llama-3.1-8B", "/data/Llama-3.1-8B", False)],
)  # fmt: skip
def test_one_base_under_two_names(one: str | None, other: str, same: bool) -> None:
    """What is taken for granted is said; what may be another model is refused, and can be declared."""
    for a, b in ((one, other), (other, one)):
        if same:
            assert len(check_same_base([Base(a), Base(b), Base(a)])) == (one != other)
            continue
        with pytest.raises(AdapterFormatError, match=r"different base models.*--same-base"):
            check_same_base([Base(a), Base(b)])
        assert "(--same-base)" in check_same_base([Base(a), Base(b)], declared=True)[0]


def test_revisions_and_the_name_that_is_handed_on(tmp_path: Path, main: Main) -> None:
    """main is the default; two revisions are two models, whatever a user declares. A path is not handed on."""
    assert not check_same_base([Base("a/b"), Base("a/b", "main"), Base("a/b", "")])
    with pytest.raises(AdapterFormatError, match="two revisions"):
        check_same_base([Base("a/b", "abc"), Base("a/b", "abd")], declared=True)
    with pytest.raises(AdapterFormatError, match="different base models"):
        check_same_base([Base("a/b", "abc"), Base("a/b")])
    assert public_name([Base("/data/X-7B"), Base("one/X-7B")]) == "one/X-7B"
    assert public_name([Base(None), Base("/data/X-7B")]) == "/data/X-7B" and public_name([Base(None)]) is None
    a = bare(tmp_path / "a", {Q: 2}, base_model_name_or_path="/models/x")
    b = bare(tmp_path / "b", {Q: 2}, base_model_name_or_path="org/x")
    assert "--same-base" in main("merge", a, b, "-o", tmp_path / "n").complaint()
    assert main("merge", a, b, "--same-base", "-o", tmp_path / "n").code == 0
    assert config_of(tmp_path / "n")["base_model_name_or_path"] == "org/x"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_error": math.nan}, "--max-error must be a number from 0"),
        ({"missing": "skip"}, "--missing must be one of"),
        ({"heads": "mean"}, "--heads must be one of"),
        ({"dtype": "int8"}, "float16, bfloat16"),
        *(({"weights": bad}, "up to 1e") for bad in ([1, math.nan], [10**400, 1], ["1", 2], [True, 2])),
        ({"weights": [1, 2, 3]}, "3 weights for 2"), ({"weights": [-1, 2]}, "--sum"), ({"weights": [0, 0]}, "zero"),
        ({"weights": "examples"}, "--weights must be one of"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused_and_nothing_is_written(
    options: dict[str, Any], said: str, two: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(FedLoRAError, match=said):
        merge(two, tmp_path / "deep" / "m", **options)
    with pytest.raises(HyperparameterError):
        merge([tmp_path / "nowhere"], tmp_path / "m", rank=0)  # before anything is read
    with pytest.raises(AdapterFormatError, match="at least 1 adapter"):
        merge([], tmp_path / "deep" / "m")
    assert not (tmp_path / "deep").exists()


# ---- cards, pages ----------------------------------------------------------------------------------------------------

HOSTILE = ["x|y", "a`b", "<img src=x>", "[click](http://evil)", "a\nb: c", "\u202eabc"]


@pytest.mark.parametrize("word", HOSTILE, ids=repr)
def test_no_strangers_word_acts_in_the_card(word: str, tmp_path: Path) -> None:
    """Folders and base models; the front matter has the lines that it should have, the table its columns."""
    base = {"base_model_name_or_path": word} if word.isprintable() else {}  # else it is not even read
    merge([bare(tmp_path / "in" / word, {Q: 2}, **base)], tmp_path / "m")
    text = (tmp_path / "m" / "README.md").read_text()
    front = text.split("---\n")[1].splitlines()
    assert [line.partition(":")[0] for line in front if not line.startswith("- ")] in (
        ["library_name", "tags"], ["library_name", "base_model", "tags"],
    )  # fmt: skip
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3 and {line.count("|") for line in rows} == {3}
    body = re.sub(r"`[^`\n]*`", "", text.split("---\n", 2)[2])  # code, where no markup acts
    assert not [bad for bad in ("<img", "](http", "\x1b", "\u202e") if bad in body]
    assert "\x1b" not in text and "\u202e" not in text and str(tmp_path) not in text


def test_a_base_that_is_a_path_is_not_in_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    paths = dict.fromkeys(("/models/x", "~/x", "../x", "a/b/c", "models/mine", "C:\\x"))
    for k, (base, line) in enumerate((paths | {"org/name": "org/name", "no": '"no"', "a: b": '"a: b"'}).items()):
        merge([bare(tmp_path / f"n{k}", {Q: 2}, base_model_name_or_path=base)], tmp_path / f"o{k}")
        text = (tmp_path / f"o{k}" / "README.md").read_text()
        assert f"\nbase_model: {line}\n" in text if line else "base_model" not in text


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how-to/adapters.md, "From Python": three lines, and what is around them."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "adapters.md"
    saved(tmp_path, "A", 10), saved(tmp_path, "B", 10)
    monkeypatch.chdir(tmp_path)
    found = run_page(page, tmp_path)
    assert len([line for line in python_blocks(page)[0].splitlines() if line.strip()]) <= 3
    assert found["small"].rank == 4 and not Path("NOWHERE").exists() and "% lost" in capsys.readouterr().out
    assert len(found["tried"].modules) == len(SHAPES)
