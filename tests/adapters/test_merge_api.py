"""`fedlora.adapters.merge` and the options of `fedlora merge`. Kinds of evidence: oracle (dense float64), readers of
other programs written down from their source, refusals.
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlora import read_adapter
from fedlora.adapters import AdapterFile, MergeReport, merge, resize
from fedlora.adapters.truncation import combine
from fedlora.errors import AdapterFormatError, ConfigError, FedLoRAError
from support.adapter_folders import HEADS, SHAPES, bare, lora, saved, updates
from support.command_line import Said
from support.worked_examples import python_blocks, run_page

Q, V = "layer.0.q", "layer.1.v"


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


# ---- three lines -----------------------------------------------------------------------------------------------------


def test_three_lines(tmp_path: Path) -> None:
    """The command and the function write the same bytes; the report has what --json shows."""
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})
    report = merge([a, b], tmp_path / "m", rank=16, weights=[0.7, 0.3])
    assert distance(tmp_path / "m", mean(a, b, weights=(0.7, 0.3))) < 1e-6
    assert (report.weights, report.rank, report.error, report.written) == ((0.7, 0.3), 6, 0, True)
    assert report.bytes == sum(t.numel() * 4 for t in load_file(tmp_path / "m" / "adapter_model.safetensors").values())


def test_the_command_is_the_function(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})
    report = merge([a, b], tmp_path / "m", rank="energy=0.9", weights=[0.7, 0.3])
    done = main("merge", a, b, "-o", tmp_path / "n", "--rank", "energy=0.9", "--weights", "0.7,0.3", "--json")
    said = json.loads(done.out)
    assert said == json.loads(json.dumps(dataclasses.asdict(report) | {"out": str(tmp_path / "n")}))
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "n" / name).read_bytes(), name


def test_a_zero_result_says_why(tmp_path: Path) -> None:
    """One zero adapter cancels nothing; an adapter less itself does; weight 0 takes no part."""
    zero = bare(tmp_path / "zero", {Q: 2}, scale=0.0)
    a = bare(tmp_path / "a", {Q: 2})
    assert "the update is zero" in resize(zero, tmp_path / "o", rank=2).warnings[-1]
    assert "the updates cancel" in str(merge([a, a], tmp_path / "m", sum=True, weights=[1, -1]).warnings)


# ---- what is said of ranks and losses --------------------------------------------------------------------------------


def test_a_rank_that_is_not_given_is_said(tmp_path: Path) -> None:
    """a and b have rank 2 and 3 in one module, so their mean has 5."""
    a, b = bare(tmp_path / "a", {Q: 2}), bare(tmp_path / "b", {Q: 3})

    def said(report: MergeReport) -> tuple[int, str]:
        return report.rank, " | ".join(report.warnings)

    found = said(merge([a, b], tmp_path / "m", rank=1000))
    assert found[0] == 5 and "rank 1000" in found[1]
    for rank in (1, 5, "exact"):
        assert merge([a, b], tmp_path / "n", rank=rank, force=True).warnings == ()


def test_a_refused_loss_names_its_parts_and_what_makes_them_less(tmp_path: Path) -> None:
    """In one unit, that of --max-error."""
    a, b = bare(tmp_path / "a", {Q: 4}), bare(tmp_path / "b", {Q: 4})

    def refused(call: Callable[..., MergeReport], *inputs: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            call(*inputs, tmp_path / "m", max_error=1e-9, **options)
        return str(error.value)

    cut = merge([a, b], tmp_path / "n", rank=2).error
    assert f"({cut:.2g} by the cut" in refused(merge, [a, b], rank=2)
    assert "by writing bfloat16)" in refused(merge, [a, b], dtype="bfloat16")
    said = refused(merge, [a, b], sum=True, rank=2, dtype="bfloat16")
    assert "off the weighted sum" in said and "--rank exact nothing; --dtype float32" in said
    assert "off the adapter's update" in refused(resize, a, rank=1)
    assert not (tmp_path / "m").exists()


def test_an_adapter_without_an_update_is_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    """It only shrinks a mean: validate and merge say so. B = 0, as LoRA begins; A = 0; and both."""
    a = bare(tmp_path / "a", {Q: 2, V: 2})
    for side in ("B", "A", "BA"):
        zero = bare(tmp_path / side, {Q: 2, V: 2})
        tensors = load_file(zero / "adapter_model.safetensors")
        idle = {k: torch.zeros_like(t) if k[-8] in side else t for k, t in tensors.items()}
        save_file(idle, zero / "adapter_model.safetensors")
        assert "update is zero" in main("validate", zero).err
        assert f"{side}' is zero" in str(merge([a, zero], tmp_path / "m", force=True).warnings)
    assert "zero" not in main("validate", a).err and merge([a, a], tmp_path / "n").warnings == ()


def test_rounding_of_what_lies_beside_the_pairs_is_reported(tmp_path: Path, main: Callable[..., Said]) -> None:
    """1.001 is 1 in bfloat16: moved by 0.001 / 1.001. It is a whole weight, so --max-error cannot be kept."""
    head = {"score.weight": torch.full((3, 12), 1.001)}
    a = bare(tmp_path / "a", {Q: 2}, beside=head, modules_to_save=["score"])
    report = merge([a], tmp_path / "m", dtype="bfloat16")
    assert math.isclose(report.beside_rounding, 0.001 / 1.001, rel_tol=1e-4)
    with pytest.raises(ConfigError, match=r"'score.weight' by 0.001.*the base.*--dtype float32"):
        merge([a], tmp_path / "n", dtype="bfloat16", max_error=0.5)
    assert merge([a], tmp_path / "o", max_error=0.5).beside_rounding == 0
    assert "up to 9.99e-04" in main("merge", a, "-o", tmp_path / "p", "--dtype", "bfloat16").out


def test_float64_is_computed_in_float64(tmp_path: Path) -> None:
    """Oracle: dense float64. float32 numbers have an exact product there, and 2^-24 is 6e-8."""
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})
    merge([a, b], tmp_path / "m", dtype="float64")
    assert distance(tmp_path / "m", mean(a, b)) < 1e-13
    resize(a, tmp_path / "n", rank=3, dtype="float64")
    assert distance(tmp_path / "n", mean(a)) < 1e-13


# ---- what lies beside the pairs --------------------------------------------------------------------------------------


def headed(folder: Path, *heads: str, **config: Any) -> Path:
    """With a fully trained tensor of ones times the number of the folder's letter, for each name."""
    number = ord(folder.name) - ord("a") + 1.0
    beside = {head: torch.full((3, 12), number) for head in heads}
    return bare(folder, {Q: 2}, beside=beside, modules_to_save=[h.rpartition(".")[0] for h in heads] or None, **config)


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_heads_that_a_rule_leaves_out_are_named(tmp_path: Path, main: Callable[..., Said]) -> None:
    """In the report, in the command's text and in the card: nothing that was trained goes without a word."""
    a, b = headed(tmp_path / "a"), headed(tmp_path / "b", "score.weight")
    for rule, adapters in (("drop", (a, b)), ("first", (a, b)), ("drop", (b,))):
        report = merge(adapters, tmp_path / "m", heads=rule, force=True)
        assert (report.dropped, report.beside) == (("score.weight",), ())
        assert "Left out: score.weight." in card(tmp_path / "m")
        assert not AdapterFile(tmp_path / "m").heads and config_of(tmp_path / "m")["modules_to_save"] is None
    assert "such as score.weight" in main("merge", a, b, "-o", tmp_path / "n", "--heads", "first").out
    report = merge([b, a], tmp_path / "o", heads="first")
    assert (report.dropped, report.beside) == ((), ("score.weight",))
    with pytest.raises(AdapterFormatError, match=rf"{a} has no 'score.weight'.*--heads first"):
        merge([b, a], tmp_path / "r")
    for weights in ([0.4], [-0.5], [2.0]):  # one alone, or two that hold the same: no more a sum of updates than others
        for given in ([b], [b, b]):
            with pytest.raises(AdapterFormatError, match=r"score\.weight"):
                merge(given, tmp_path / "r", sum=True, weights=weights * len(given))


def test_the_weights_of_tensors_beside_the_pairs_are_reported(tmp_path: Path, main: Callable[..., Said]) -> None:
    """As they are used: the tensors are constant, b = 2 and c = 3."""
    b, c = headed(tmp_path / "b", "score.weight"), headed(tmp_path / "c", "score.weight")
    report = merge([b, c], tmp_path / "m", heads="first")
    assert report.module_weights == {"score.weight": (1.0, 0.0)}
    assert torch.equal(AdapterFile(tmp_path / "m").head("score.weight"), torch.full((3, 12), 2.0))
    assert "| score.weight | 1, 0 |" in card(tmp_path / "m")
    said = main("merge", b, c, "-o", tmp_path / "n", "--heads", "first").out
    assert "in 1 modules" in said and "score.weight: 1, 0" in said
    assert merge([b, c], tmp_path / "o").module_weights == {}
    assert merge([b, c, c], tmp_path / "p", weights=[0.7, 0.2, 0.1]).module_weights == {}


# ---- what belongs together -------------------------------------------------------------------------------------------


def test_adapters_with_no_common_module_are_refused_until_one_says_what_lacking_means(tmp_path: Path) -> None:
    a, b, c = bare(tmp_path / "a", {Q: 2}), bare(tmp_path / "b", {V: 2}), bare(tmp_path / "c", {Q: 2, V: 2})
    with pytest.raises(AdapterFormatError, match=rf"no module in common.*'{Q}'.*'{V}'.*--missing zero"):
        merge([a, b], tmp_path / "m")
    with pytest.raises(AdapterFormatError, match="no module in common"):
        merge([a, a, b], tmp_path / "m")
    assert not (tmp_path / "m").exists()
    report = merge([a, b], tmp_path / "m", missing="zero")
    assert report.lacking == (Q, V) and report.module_weights == {Q: (0.5, 0.0), V: (0.0, 0.5)}
    assert merge([a, b, c], tmp_path / "n").lacking == (Q, V)  # c joins them


@pytest.mark.parametrize(
    ("longer", "common"),
    [("model.language_model.{}", True), ("model.{}", False), ("encoder.layer.{}", True), ("{}.linear", True)],
)
def test_the_same_modules_under_longer_names_are_no_other_modules(longer: str, common: bool, tmp_path: Path) -> None:
    """A wrapper or another class of model adds a segment: the mean would be of disjoint halves. Who says --missing may
    do so."""
    names = [f"layers.{k}.{q}" for k in range(3) for q in ("q", "v")]
    shared = {"lm_head": 2} if common else {"layers.0.q": 2}
    a = bare(tmp_path / "a", dict.fromkeys(names, 2) | shared)
    b = bare(tmp_path / "b", {longer.format(name): 2 for name in names} | shared)
    with pytest.raises(AdapterFormatError, match=r"differently.*pairs.*--missing"):
        merge([a, b], tmp_path / "m")
    assert len(merge([a, b], tmp_path / "m", missing="zero").modules) > len(names) + 1


def test_other_layers_of_one_model_are_other_modules(tmp_path: Path) -> None:
    """Of another number, name or shape: merged as ever, with what they lack told."""
    a = bare(tmp_path / "a", {"h": 2, **{f"layers.{k}.q": 2 for k in range(4)}})
    b = bare(tmp_path / "b", {"h": 2, **{f"layers.{k}.q": 2 for k in range(4, 8)}})
    c = bare(tmp_path / "c", {"h": 2, **{f"layers.{k}.mlp.up": 2 for k in range(4)}})
    assert len(merge([a, b, c], tmp_path / "m").lacking) == 12


def test_weights_from_examples_need_all_uploads_to_say_theirs(tmp_path: Path) -> None:
    a, b = bare(tmp_path / "a", {Q: 2}), bare(tmp_path / "b", {Q: 2})
    (a / "upload.json").write_text(json.dumps({"client": "a", "num_examples": 30, "round": 1}))
    with pytest.raises(AdapterFormatError, match=rf"{b} has no upload\.json.*1 of 2"):
        merge([a, b], tmp_path / "m", weights_from="num_examples")
    (b / "upload.json").write_text(json.dumps({"client": "b", "num_examples": 10, "round": 1}))
    assert merge([a, b], tmp_path / "m", weights_from="num_examples").weights == (0.75, 0.25)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_error": math.nan}, "--max-error must be a number from 0"),
        ({"max_error": -0.1}, "--max-error must be a number from 0"),
        ({"max_error": math.inf}, "--max-error must be a number from 0"),
        ({"missing": "renormalise", "sum": True}, "--sum.*renormalise"),
        ({"missing": "skip"}, "--missing must be one of"),
        ({"heads": "mean"}, "--heads must be one of"),
        ({"dtype": "int8"}, "float16, bfloat16"),
        ({"dtype": "float8"}, "float16, bfloat16"),
        ({"rank": 0}, "a rank is a whole number"),
        ({"rank": True}, "a rank is a whole number"),
        ({"weights": [1, -1]}, "--sum"),
        ({"weights": [1e308, 1e308]}, "up to 1e"),
        ({"weights": [1], "weights_from": "num_examples"}, "not both"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_and_nothing_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    a, b = bare(tmp_path / "a", {Q: 2}), bare(tmp_path / "b", {Q: 2})
    with pytest.raises(FedLoRAError, match=said):
        merge([a, b], tmp_path / "deep" / "m", **options)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("weights", ["1_0,2", "٣,1", "nan,1", "inf,1", "1e400,1", "0x1,2", "1,,2", " ", "1;2"])
def test_weights_on_the_command_line_are_plain_numbers(weights: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = bare(tmp_path / "a", {Q: 2}), bare(tmp_path / "b", {Q: 2})
    assert "weights" in main("merge", a, b, "-o", tmp_path / "m", "--weights", weights).complaint()


def test_one_base_under_two_names(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Two spellings are one, and it is said; another name needs --same-base; the hub's is handed on, not a path."""
    a = bare(tmp_path / "a", {Q: 2}, base_model_name_or_path="/models/Llama-3.1-8B", revision="main")
    b = bare(tmp_path / "b", {Q: 2}, base_model_name_or_path="meta-llama/Llama-3.1-8B", revision=None)
    c = bare(tmp_path / "c", {Q: 2}, base_model_name_or_path="meta-llama/llama-3.1-8b", revision=None)
    assert "one base model" in merge([b, c], tmp_path / "m").warnings[0]
    assert "--same-base" in main("merge", a, b, "-o", tmp_path / "n").complaint()
    assert main("merge", a, b, "--same-base", "-o", tmp_path / "n").code == 0
    assert config_of(tmp_path / "n")["base_model_name_or_path"] == "meta-llama/Llama-3.1-8B"


# ---- sums ------------------------------------------------------------------------------------------------------------


def test_a_sum_takes_weights_as_they_are(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Task arithmetic: a + 2 b, and a - b; without weights all count 1."""
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})
    for name, weights in (("m", (1.0, 2.0)), ("n", (1.0, -1.0)), ("o", None)):
        merge([a, b], tmp_path / name, sum=True, weights=weights)
        assert distance(tmp_path / name, mean(a, b, weights=weights or (1, 1))) < 1e-6
    assert main("merge", a, b, "--sum", "--weights", "1,-1", "-o", tmp_path / "p").code == 0
    assert updates(tmp_path / "n").keys() == updates(tmp_path / "p").keys()
    report = merge([a, a], tmp_path / "zero", sum=True, weights=[1, -1])
    assert "cancel" in str(report.warnings)


def test_a_sum_of_heads_has_no_meaning_unless_weights_add_up_to_one(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 2)
    with pytest.raises(AdapterFormatError, match=r"add up to 2"):
        merge([a, b], tmp_path / "m", sum=True)
    merge([a, b], tmp_path / "m", sum=True, weights=[2, -1])
    for path in HEADS:
        want = 2 * read_adapter(a)[0].heads[path] - read_adapter(b)[0].heads[path]
        torch.testing.assert_close(read_adapter(tmp_path / "m")[0].heads[path], want)
    merge([a, b], tmp_path / "n", sum=True, heads="first")


def test_a_sum_is_for_merges_without_a_method(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})
    assert "--sum" in main("merge", a, b, "--sum", "--method", "fedit", "-o", tmp_path / "n").complaint()
    assert not (tmp_path / "n").exists()


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_type_of_the_adapters_is_kept_and_what_rounding_costs_is_measured(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """rounding: the distance of what was written from the dense mean of what was read, to a tenth of a percent."""
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}, dtype=dtype), bare(tmp_path / "b", {Q: 4, V: 3}, dtype=dtype)
    report = merge([a, b], tmp_path / "m")
    assert {t.dtype for t in load_file(tmp_path / "m" / "adapter_model.safetensors").values()} == {dtype}
    off = distance(tmp_path / "m", mean(a, b))
    if dtype.itemsize == 2:
        assert report.rounding == pytest.approx(off, rel=1e-3) and 1e-4 < off < 1e-2
        assert f"adds {report.rounding:.2e}" in (tmp_path / "m" / "README.md").read_text()
    else:
        small = 1e-7 if dtype == torch.float32 else 1e-14
        assert report.rounding == pytest.approx(off, rel=1e-3, abs=1e-14) and off < small


def test_types_that_differ_are_promoted_and_it_is_said(tmp_path: Path) -> None:
    a, b = bare(tmp_path / "a", {Q: 2}, dtype=torch.bfloat16), bare(tmp_path / "b", {Q: 2}, dtype=torch.float16)
    report = merge([a, b], tmp_path / "m")
    assert report.dtype == "float32" and "different types; written as float32" in report.warnings[0]
    report = merge([a, b], tmp_path / "n", dtype="bfloat16")
    assert report.dtype == "bfloat16" and not report.warnings and report.rounding > 1e-4


def test_a_type_that_is_too_narrow_is_said(tmp_path: Path) -> None:
    """Numbers below float16's smallest become zero: the distance is measured here, too."""
    a = bare(tmp_path / "a", {Q: 2}, scale=1e-7)
    report = merge([a], tmp_path / "m", dtype="float16")
    assert report.rounding == pytest.approx(distance(tmp_path / "m", mean(a)), rel=1e-3) and report.rounding > 0.02
    assert "float16 is too narrow" in report.warnings[0]


def test_float16_that_overflows_is_refused(tmp_path: Path) -> None:
    a = bare(tmp_path / "a", {Q: 2}, scale=1e5)
    with pytest.raises(AdapterFormatError, match=r"float16 holds up to 6\.55e\+04.*--dtype"):
        merge([a], tmp_path / "m", dtype="float16")
    with pytest.raises(ConfigError, match=r"by writing bfloat16.*--max-error"):
        merge([a], tmp_path / "m", dtype="bfloat16", max_error=1e-4)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e200), (torch.float64, 1e155)])
def test_updates_beyond_every_number_are_refused(dtype: torch.dtype, size: float) -> None:
    huge = lora(20, 2, 12, "huge").map(lambda t: (t * size).to(dtype))
    with pytest.raises(AdapterFormatError, match="overflows"):
        combine("m", [huge], [1.0])


# ---- readers with one alpha ------------------------------------------------------------------------------------------


def dense_by(folder: Path, scale: Callable[[dict[str, Any], str, int], float]) -> dict[str, Tensor]:
    """What a program makes of an adapter that scales B A by its own rule: of config, module and the tensor's rank."""
    tensors, config = load_file(folder / "adapter_model.safetensors"), config_of(folder)
    found = {}
    for key, A in tensors.items():
        if ".lora_A." in key:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            B = tensors[key.replace("lora_A", "lora_B")]
            found[module] = scale(config, module, len(A)) * (B.double() @ A.double())
    return found


def _pattern(config: dict[str, Any], field: str, module: str, default: float) -> float:
    return next((v for k, v in config.get(field, {}).items() if re.match(rf"(.*\.)?({k})$", module)), default)


READERS: dict[str, Callable[[dict[str, Any], str, int], float]] = {
    # peft/tuners/lora: both patterns, by regular expression
    "peft": lambda c, m, r: _pattern(c, "alpha_pattern", m, c["lora_alpha"]) / _pattern(c, "rank_pattern", m, c["r"]),
    # llama.cpp, llama_adapter_lora_weight::get_scale: the file's alpha, the tensor's rank
    "alpha / tensor rank": lambda c, m, r: c["lora_alpha"] / r,
    # vLLM, PEFTHelper.vllm_lora_scaling_factor: the config's two numbers for all modules
    "alpha / config r": lambda c, m, r: c["lora_alpha"] / c["r"],
}
KINDS: dict[str, tuple[dict[str, int], dict[str, int], dict[str, Any]]] = {
    "one rank": ({Q: 3, V: 3}, {Q: 3, V: 3}, {}),
    "ranks differ": ({Q: 2, V: 3}, {Q: 3, V: 4}, {}),
    "a module of one only": ({Q: 3, V: 3}, {Q: 3}, {}),
    "energy": ({Q: 3, V: 3}, {Q: 3, V: 3}, {"rank": "energy=0.9"}),
    "ranks far apart": ({Q: 10} | {f"m.{k}": 1 for k in range(6)}, {Q: 10}, {}),
    "cut": ({Q: 3, V: 1}, {Q: 3, V: 1}, {"rank": 4}),
    "sum": ({Q: 3, V: 1}, {Q: 3, V: 1}, {"sum": True, "weights": [2, -1]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_gets_the_scale_right(kind: str, tmp_path: Path) -> None:
    """docs/decisions/0018: one rank, alpha = r. The inputs, with alpha = 2 r and patterns, are not so."""
    one, two, options = KINDS[kind]
    a, b = bare(tmp_path / "a", one), bare(tmp_path / "b", two)
    merge([a, b], tmp_path / "m", **options)
    want = updates(tmp_path / "m")  # which the tests above compare with the dense mean
    for name, scale in READERS.items():
        for module, update in dense_by(tmp_path / "m", scale).items():
            torch.testing.assert_close(update, want[module], rtol=0, atol=1e-12, msg=name)


# ---- dry runs, cards -------------------------------------------------------------------------------------------------


def test_a_dry_run_reports_all_and_writes_nothing(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = bare(tmp_path / "a", {Q: 2, V: 3}), bare(tmp_path / "b", {Q: 4, V: 3})
    wet = merge([a, b], tmp_path / "m", rank=2)
    before = sorted(tmp_path.rglob("*"))
    dry = merge([a, b], tmp_path / "not" / "there", rank=2, dry_run=True)
    assert dataclasses.replace(dry, out=wet.out, written=True) == wet
    done = main("merge", a, b, "--rank", "2", "--dry-run", "-o", tmp_path / "not" / "there")
    assert done.code == 0 and "nothing was written" in done.out
    for words in (["merge", a, b], ["merge", a, b, "--method", "glora"], ["resize", a]):
        done = main(*words, "--rank", "2", "--dry-run")
        assert done.code == 0 and "nothing was written: rank" in done.out
        done = main(*words, "--rank", "2")
        assert done.code == 2 and "give -o DIRECTORY" in done.err
    assert sorted(tmp_path.rglob("*")) == before


HOSTILE = ["x|y", "a`b", "<img src=x>", "[click](http://evil)", "a\nb: c", "a\x1b[31m", "**b**", "\u202eabc", "é"]


@pytest.mark.parametrize("word", HOSTILE, ids=repr)
def test_no_strangers_word_acts_in_the_card(word: str, tmp_path: Path) -> None:
    """Folders and base models; the front matter has the lines that it should have, the tables their columns."""
    try:
        base = {"base_model_name_or_path": word} if word.isprintable() else {}  # else it is not even read
        folder = bare(tmp_path / "in" / word, {Q: 2}, **base)
    except OSError:
        pytest.skip("no folder can have this name")
    merge([folder], tmp_path / "m")
    text = (tmp_path / "m" / "README.md").read_text()
    front = text.split("---\n")[1].splitlines()
    assert [line.partition(":")[0] for line in front if not line.startswith("- ")] in (
        ["library_name", "tags"], ["library_name", "base_model", "tags"],
    )  # fmt: skip
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 6 and {line.count("|") for line in rows} == {4, 5}
    body = re.sub(r"`[^`\n]*`", "", text.split("---\n", 2)[2])  # code, where no markup acts
    for bad in ("<img", "](http", "\x1b", "\u202e"):
        assert bad not in body, word
    assert "\x1b" not in text and "\u202e" not in text
    assert str(tmp_path) not in text


def test_a_base_that_is_a_path_is_not_in_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for k, base in enumerate(("/models/x", "~/x", "../x", "a/b/c", "models/mine", "C:\\x")):
        merge([bare(tmp_path / str(k), {Q: 2}, base_model_name_or_path=base)], tmp_path / f"m{k}")
        assert "base_model" not in (tmp_path / f"m{k}" / "README.md").read_text()
    for k, (base, line) in enumerate((("org/name", "org/name"), ("no", '"no"'), ("a: b", '"a: b"'))):
        merge([bare(tmp_path / f"n{k}", {Q: 2}, base_model_name_or_path=base)], tmp_path / f"o{k}")
        assert f"\nbase_model: {line}\n" in (tmp_path / f"o{k}" / "README.md").read_text()


def test_progress_is_told_of_every_module(tmp_path: Path) -> None:
    told: list[tuple[list[str], str]] = []

    def progress(steps: Any, what: str) -> Any:
        told.append((list(steps), what))
        return steps

    merge([bare(tmp_path / "a", {Q: 2, V: 2})], tmp_path / "m", progress=progress)
    assert told == [([Q, V], "merging")]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how-to/adapters.md, "From Python": three lines, and what is around them."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "adapters.md"
    saved(tmp_path, "A", 10), saved(tmp_path, "B", 10)
    monkeypatch.chdir(tmp_path)
    found = run_page(page, tmp_path)
    assert len([line for line in python_blocks(page)[0].splitlines() if line.strip()]) <= 3
    assert found["small"].rank == 4 and not Path("NOWHERE").exists() and "% lost" in capsys.readouterr().out
    assert len(found["tried"].modules) == len(SHAPES)


def test_of_no_adapter_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match="at least 1 adapter"):
        merge([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_of_other_models_are_named(tmp_path: Path) -> None:
    """By the widths of a module that both have."""
    one, other = bare(tmp_path / "a", {"q": 2}), bare(tmp_path / "b", {"q": 2})
    tensors = load_file(other / "adapter_model.safetensors")
    name = "base_model.model.q.lora_A.weight"
    save_file(tensors | {name: torch.cat([tensors[name]] * 2, dim=1)}, other / "adapter_model.safetensors")
    with pytest.raises(AdapterFormatError, match=rf"'q'.*12.*{re.escape(str(one))}.*24.*{re.escape(str(other))}"):
        merge([one, other], tmp_path / "m")


def test_a_result_of_rank_one_has_rank_one(tmp_path: Path) -> None:
    assert merge([bare(tmp_path / "a", {"q": 1})], tmp_path / "m").rank == 1
