"""Every kind of adapter that peft writes, read, written and merged. Kinds of evidence: oracle and end-to-end.

peft makes two adapters of random numbers on a tiny model and saves them. Expected values come from peft and PyTorch
alone: the state dicts of `merge_and_unload` on a fresh base, in float64, and their mean with weights 0.7 and 0.3, key
by key. Nothing of fedlora computes one. What a merge writes is loaded by peft on a fresh base and compared in the same
way, and its logits, unmerged, with those of the dense model that has the oracle's weights.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fedlora import read_adapter, write_adapter
from fedlora.adapters.config_meaning import Resolved, parameter_names
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.errors import AdapterFormatError
from support.command_line import Said
from support.peft_cases import (
    BOTH,
    CASES,
    CAUSAL,
    EXPERTS,
    GROUPED,
    LLAMA,
    WEIGHTS,
    Case,
    base_state,
    dense,
    loaded,
    lora,
    mixture,
    saved,
)
from support.tiny_models import llama

pytestmark = [
    pytest.mark.filterwarnings(rule)
    for rule in (
        # peft 0.21 asks transformers 5 for a property of its old name, whenever an adapter is added.
        r"ignore:.is_gradient_checkpointing. is deprecated:FutureWarning:transformers\.modeling_utils",
        # Without a base model fedlora says what it would have asked it.
        r"ignore:.*with ensure_weight_tying, the base model decides:UserWarning",
        # peft's save_pretrained takes every lora_B.bias for a damaged matrix.
        r"ignore:Adapter 'default'. \d+ LoRA tensor.s. have invalid shape:UserWarning:peft\.utils\.save_and_load",
        # ... says that it saves an embedding that is adapted, and cannot look up a base that has no name.
        r"ignore:Setting .save_embedding_layers. to .True.:UserWarning:peft\.utils\.save_and_load",
        # ... looks for the names of rank_pattern and alpha_pattern among modules only, and applies them to parameters
        # all the same; for AdaLoRA rank_pattern holds masks.
        r"ignore:The following (rank|alpha)_pattern keys did not match any targeted module:RuntimeWarning",
        # ... says that it merges into tied weights, which is what the tied cases are about.
        r"ignore:Input and output embeddings are no longer tied after merging:UserWarning:peft",
        r"ignore:Model with .tie_word_embeddings=True.:UserWarning:peft\.tuners\.tuners_utils",
    )
]


# ---- models ----------------------------------------------------------------------------------------------------------


# ---- cases -----------------------------------------------------------------------------------------------------------


# ---- the oracle ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def said(case: Case, model: nn.Module) -> Tensor:
    out = model(**case.inputs)
    found: Tensor = getattr(out, "logits", out)
    return found


@dataclass(frozen=True)
class Made:
    """Two adapters that peft saved, what peft's dense models of them hold and say, and the mean of what they hold."""

    case: Case
    folders: tuple[Path, Path]
    states: tuple[dict[str, Tensor], dict[str, Tensor]]
    said: tuple[Tensor, Tensor]
    mean: dict[str, Tensor]
    base: dict[str, Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @functools.cache
    def make(name: str) -> Made:
        case, root = CASES[name], tmp_path_factory.mktemp("made")
        folders = (saved(case, 0, root / "a"), saved(case, 1, root / "b"))
        models = [dense(case, folder) for folder in folders]
        logits = (said(case, models[0]), said(case, models[1]))
        states = tuple({k: t.clone() for k, t in model.state_dict().items()} for model in models)
        assert states[0].keys() == states[1].keys()
        mean = {k: sum(w * s[k] for w, s in zip(WEIGHTS, states, strict=True)) for k in states[0]}
        mean = {k: t.to(states[0][k].dtype) for k, t in mean.items()}  # type: ignore[union-attr]
        return Made(case, folders, states, logits, mean, base_state(case))  # type: ignore[arg-type]

    return make


def assert_states(got: Mapping[str, Tensor], want: Mapping[str, Tensor], x: Made, inputs: tuple[int, ...]) -> None:
    """Key by key; what none of the inputs changes is the base's bit for bit."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=0, atol=x.case.tolerance, msg=lambda m, k=key: f"{k}: {m}")
        if all(torch.equal(x.states[k][key], x.base[key]) for k in inputs):
            assert torch.equal(got[key], x.base[key]), key


# ---- known defects ---------------------------------------------------------------------------------------------------

READ, MERGED = "read and written", "merged"
DEFECTS: dict[tuple[str, str], str] = {}
for _what in (READ, MERGED):
    DEFECTS |= {
        (
            _what,
            "AdaLoRA, convolution",
        ): "AdaLoRA stores a convolution's A flat; written as LoRA's, peft cannot load it",
    }


def cases(what: str) -> list[Any]:
    """All names; those that fail for a known reason are marked."""
    known = {name: pytest.mark.xfail(strict=True, reason=DEFECTS[what, name]) for w, name in DEFECTS if w == what}
    return [pytest.param(name, marks=[known[name]] if name in known else []) for name in CASES]


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", CASES)
def test_the_inputs_are_what_the_test_says(name: str, made: Callable[[str], Made]) -> None:
    """The two adapters differ and change what they should, by a lot; peft's dense models say what its adapters say."""
    x = made(name)
    for state, folder, whole in zip(x.states, x.folders, x.said, strict=True):
        changed = {k for k, t in state.items() if not torch.equal(t, x.base[k])}
        assert changed and all(any(part in key for part in x.case.changed) for key in changed)
        assert max(float((state[k] - x.base[k]).abs().max()) for k in changed) > 0.1
        torch.testing.assert_close(
            said(x.case, loaded(x.case, folder)), whole, rtol=0, atol=1e-4 if x.case.tolerance > 1e-6 else 1e-9
        )
    both = {k for s in x.states for k, t in s.items() if not torch.equal(t, x.base[k])}
    assert all(any(part in key for key in both) for part in x.case.changed)
    assert any(not torch.equal(x.states[0][k], x.states[1][k]) for k in both)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", cases(READ))
def test_what_is_read_is_written_with_the_same_meaning(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """peft loads the copy on a fresh base: its weights and logits are those of the original."""
    x = made(name)
    for k, (folder, state) in enumerate(zip(x.folders, x.states, strict=True)):
        adapter, spec = read_adapter(folder)
        write_adapter(tmp_path / folder.name, adapter, spec)
        got = said(x.case, loaded(x.case, tmp_path / folder.name))
        torch.testing.assert_close(got, x.said[k], rtol=0, atol=max(x.case.tolerance * 100, 1e-9))
        assert_states(dense(x.case, tmp_path / folder.name).state_dict(), state, x, (k,))


@pytest.mark.quick(23)
@pytest.mark.parametrize("name", cases(MERGED))
def test_a_merge_is_the_mean_of_the_dense_models(
    name: str, made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    """`fedlora merge` of both: every tensor of peft's dense model of the result is the weighted mean of both ones'.

    Narrow ones are written wide here: what rounding them again costs, tests/adapters/test_merge_api.py measures.
    """
    x = made(name)
    more = ["--missing", "zero"] if name in ("regex, list", "some layers") else []  # no module in common: to be said
    more += ["--dtype", "float32"] if 1e-10 < x.case.tolerance < 1e-5 else []
    done = main("merge", *x.folders, "--weights", ",".join(map(str, WEIGHTS)), *more, "-o", tmp_path / "m")
    assert done.code == 0, done.err
    assert_states(dense(x.case, tmp_path / "m").state_dict(), x.mean, x, (0, 1))
    want = dense(x.case, x.folders[0])
    want.load_state_dict(x.mean)
    got = said(x.case, loaded(x.case, tmp_path / "m"))
    torch.testing.assert_close(got, said(x.case, want), rtol=0, atol=max(x.case.tolerance * 100, 1e-9))
    assert float((got - said(x.case, x.case.build())).abs().max()) > 0.05
    assert main("validate", tmp_path / "m").code == 0


# name -> (the field that the refusal names, fields of peft's config)
REFUSED = {
    "DoRA": ("use_dora", {"use_dora": True}),
    "PiSSA": ("init_lora_weights", {"init_lora_weights": "pissa"}),
    "PiSSA, fast": ("init_lora_weights", {"init_lora_weights": "pissa_niter_4"}),
    "OLoRA": ("init_lora_weights", {"init_lora_weights": "olora"}),
    "aLoRA": ("alora_invocation_tokens", {"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_update_is_refused_by_its_field(
    name: str, made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    """In a merge too, beside a sound adapter; nothing is written."""
    named, fields = REFUSED[name]
    bad = saved(lora(llama, CAUSAL | fields), 0, tmp_path / "bad")  # not in float64: PiSSA cannot
    with pytest.raises(AdapterFormatError, match=rf"\b{named} = "):
        read_adapter(bad)
    done = main("merge", made("linear").folders[0], bad, "-o", tmp_path / "m")
    assert done.code == 2 and f"{named} = " in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (peft.LoHaConfig, {"target_modules": ["q_proj"]}),
        (peft.LoKrConfig, {"target_modules": ["q_proj"]}),
        (peft.IA3Config, {"target_modules": ["q_proj"], "feedforward_modules": []}),
        (peft.PromptTuningConfig, {"num_virtual_tokens": 2}),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    config: Callable[..., Any], fields: dict[str, Any], main: Callable[..., Said], tmp_path: Path
) -> None:
    bad = saved(Case(LLAMA, CAUSAL | fields, {}, configs=(config, config)), 0, tmp_path / "bad")
    with pytest.raises(AdapterFormatError, match=r"\bpeft_type = "):
        AdapterFile(bad)
    done = main("validate", bad)
    assert done.code == 2 and "peft_type = " in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]], ids=str)
def test_nested_parameters_of_different_scalings_are_refused(
    order: tuple[str, ...], main: Callable[..., Said], tmp_path: Path
) -> None:
    """peft nests them in the order in which the module registered them, which no file tells: a guess may swap them."""
    fields = EXPERTS | {"alpha_pattern": {"down_proj": 2}}
    bad = saved(lora(mixture(*order), fields), 0, tmp_path / "bad")
    with pytest.raises(AdapterFormatError, match=r"layers\.0\.experts.*alpha_pattern"):
        read_adapter(bad)
    done = main("merge", bad, bad, "-o", tmp_path / "m")
    assert done.code == 2 and done.err.count("\n") == 1 and not (tmp_path / "m").exists()


def test_nested_parameters_of_different_numbers_of_experts() -> None:
    """By hand: 4 rows are one expert of rank 4, 6 are two of rank 3, and neither fits the other. Of ranks 2 and 4, 4
    and 16 rows fit in both orders."""
    config = {"r": 3, "lora_alpha": 6}
    said = Resolved(config, {"m.bias": 4}, {}, {})
    assert parameter_names("m", [4, 6], ["bias", "up"], said) == ("m.bias", "m.up")
    with pytest.raises(AdapterFormatError, match="different scalings"):
        parameter_names("m", [4, 16], ["bias", "up"], Resolved(config, {"m.bias": 4, "m.up": 2}, {}, {}))


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1:UserWarning:peft")
def test_a_grouped_convolution_is_refused(main: Callable[..., Said], tmp_path: Path) -> None:
    """Its B has r / groups columns: no product of two matrices."""
    bad = saved(lora(GROUPED, {"target_modules": ["grouped"]}), 0, tmp_path / "bad")
    with pytest.raises(AdapterFormatError, match=r"module 'grouped'.*grouped convolutions"):
        AdapterFile(bad)


# what -> (adapters by case and number, what the refusal names)
UNALIKE = {
    "other tokens": (("trained tokens", 0), ("trained tokens by name", 0), "trainable_token_indices"),
    "no tokens": (("trained tokens", 0), ("linear", 0), "trainable_token_indices"),
    "repeated layers": (("layers repeated", 0), ("linear", 0), "layer_replication"),
    "other parameters": (("experts, one parameter", 0), ("experts, two nested", 0), "target_parameters"),
    "a head of one only": (("lm_head in full", 0), ("linear", 0), "lm_head.weight"),
    "biases of one only": (("bias all without a head", 0), ("lora_bias of one only", 0), "bias"),
    "biases of the other only": (("lora_bias of one only", 0), ("bias all without a head", 0), "bias"),
}


@pytest.mark.parametrize("what", UNALIKE)
def test_adapters_whose_other_tensors_do_not_add_up(
    what: str, made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    (one, i), (two, j), named = UNALIKE[what]
    done = main("merge", made(one).folders[i], made(two).folders[j], "-o", tmp_path / "m")
    assert done.code == 2 and named in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["linear", "convolutions", "embedding", "lora_bias", "Mixtral", "AdaLoRA"])
def test_a_file_says_what_it_holds(name: str, made: Callable[[str], Made]) -> None:
    """Ranks and shapes of each module, before a tensor is read; their products are peft's updates, one by one."""
    x = made(name)
    file = AdapterFile(x.folders[0])
    assert set(file.ranks) == set(file.modules)
    for module in file.modules:
        path, _, expert = module.partition("[")
        weight = f"{path}.weight"
        if expert:  # nested: the one registered first is inside
            weight = path.removesuffix(".base_layer") + (".gate_up_proj" if "base_layer" in path else ".down_proj")
        change = x.states[0][weight] - x.base[weight]
        change = change[int(expert[:-1])] if expert else change
        delta = file.lora(module).delta().double()
        want = change.T if "embed" in path else change.flatten(1)
        torch.testing.assert_close(delta, want, rtol=0, atol=max(x.case.tolerance, 1e-9))
        assert file.lora(module).rank == file.ranks[module]


def test_a_merge_is_the_same_in_any_order_of_the_fields(
    made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    """Two runs, and a run of copies whose configs list their fields backwards, give the same bytes."""
    x = made("rank and alpha patterns")
    turned = []
    for folder in x.folders:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (tmp_path / folder.name).mkdir()
        (tmp_path / folder.name / CONFIG_FILE).write_text(json.dumps(dict(reversed(config.items()))))
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
        safetensors.torch.save_file(dict(reversed(tensors.items())), tmp_path / folder.name / WEIGHTS_FILE)
        turned.append(tmp_path / folder.name)
    for out, folders in zip("pqr", itertools.chain([x.folders, x.folders, turned]), strict=True):
        assert main("merge", *folders, "-o", tmp_path / out).code == 0
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert len({(tmp_path / out / name).read_bytes() for out in "pqr"}) == 1, name
