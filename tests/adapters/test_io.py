"""The PEFT boundary against the installed peft and transformers, on tiny models (no network).

Kinds of evidence: *oracle* (peft's `get_delta_weight` and logits; base + scaling * B @ A added densely to a copy of the
base weights) and *end-to-end* (peft writes and we read; we write and peft reads).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import AdaLoraConfig, LoHaConfig, LoraConfig, LoraGAConfig, PeftModel, get_peft_model
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn

from fedlora.adapters.config_fields import _layer_ranges, check_config
from fedlora.adapters.io import AdapterSpec, load_into_model, pad_rank, read_adapter, read_model, write_adapter
from fedlora.adapters.reader import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from fedlora.core.lora import Adapter, LoRA
from fedlora.errors import AdapterFormatError, FactorNotShared, FedLoRAError
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.peft_models import dense_logits, peft_layers, peft_updates, randomise, saved, trained
from support.tiny_models import TOKENS, bert_of_two_layers, distilbert, gpt2, llama, logits

pytestmark = [FUTURE_NAMES, LORA_BIAS]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


# ---- inputs and oracles ----------------------------------------------------------------------------------------------


def lora(**fields):
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**copy.deepcopy(defaults | fields))  # peft appends to modules_to_save in place


def loaded(build, directory):
    return PeftModel.from_pretrained(build(), directory)


def edit(directory, **fields):
    """Change fields of adapter_config.json, keeping the order of a mapping as given (peft sorts its keys)."""
    file = directory / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def stored(directory):
    return safetensors.torch.load_file(directory / WEIGHTS_FILE)


def updates_of(adapter, scaling=1.0):
    return {name: scaling * module.delta() for name, module in adapter.modules.items()}


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def assert_same(got: Adapter, want: Adapter):
    """Bit for bit, dtype included."""
    assert (list(got.modules), list(got.heads)) == (list(want.modules), list(want.heads))
    pairs = [(got.modules[n].tensors()[k], t) for n, m in want.modules.items() for k, t in m.tensors().items()]
    for a, b in [*pairs, *((got.heads[n], head) for n, head in want.heads.items())]:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_peft_loads(build, directory, adapter, scaling):
    """peft's model of the directory is base + scaling * B @ A, and that is not the base itself."""
    want = dense_logits(build, updates_of(adapter, scaling), adapter.heads)
    assert_close(logits(loaded(build, directory)), want)
    assert (want - logits(build())).abs().max() > 0.05


def random_like(adapter, ranks, dtype=torch.float32, seed=7):
    """Random numbers in the modules and heads of `adapter`, with the given ranks in turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    modules = {}
    for (name, module), r in zip(adapter.modules.items(), itertools.cycle(ranks)):
        B, A = module.factors
        modules[name] = LoRA(draw(B.shape[0], r), draw(r, A.shape[1]))
    return Adapter(modules, {name: draw(*head.shape) for name, head in adapter.heads.items()})


class Tree(nn.Module):
    """Linear layers (5, 6) at the given dotted paths; the output is their sum."""

    def __init__(self, *paths):
        super().__init__()
        for path in paths:
            *parents, leaf = path.split(".")
            module = self
            for parent in parents:
                if parent not in dict(module.named_children()):
                    module.add_module(parent, nn.Module())
                module = module.get_submodule(parent)
            module.add_module(leaf, nn.Linear(6, 5))
        self.paths = paths

    def forward(self, x):
        return sum(self.get_submodule(path)(x) for path in self.paths)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.conv(x).mean(dim=(2, 3)))


class NormNet(nn.Module):
    """Its head holds buffers beside parameters."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, x):
        return self.head(self.fc(x))


CAUSAL, SEQ = {"task_type": "CAUSAL_LM"}, {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
# name -> (base model, fields of LoraConfig, the scaling that all its modules share or None)
READABLE = {
    "list": (llama, CAUSAL, 2.0),
    "regex": (llama, CAUSAL | {"target_modules": r".*\.1\.self_attn\.(k|v)_proj"}, 2.0),
    "all-linear": (llama, CAUSAL | {"target_modules": "all-linear"}, 2.0),
    "no task type": (llama, {}, 2.0),
    "some layers": (llama, CAUSAL | {"layers_to_transform": [1]}, 2.0),
    "excluded": (llama, CAUSAL | {"exclude_modules": ["model.layers.0.self_attn.v_proj"]}, 2.0),
    "alpha 1, rank 3": (llama, CAUSAL | {"r": 3, "lora_alpha": 1}, 1 / 3),
    "alpha 2.5": (llama, CAUSAL | {"lora_alpha": 2.5}, 2.5 / 4),
    "rsLoRA": (llama, CAUSAL | {"use_rslora": True, "r": 6}, 8 / math.sqrt(6)),
    "Conv1D": (gpt2, CAUSAL | {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}, 2.0),
    "Conv1D, all-linear": (gpt2, CAUSAL | {"target_modules": "all-linear", "fan_in_fan_out": True, "r": 3}, 8 / 3),
    "heads": (bert_of_two_layers, SEQ, 2.0),
    "heads of several tensors": (bert_of_two_layers, SEQ | {"modules_to_save": ["pooler"]}, 2.0),
    # peft saves every module whose path ends with a name of modules_to_save: pre_classifier, for classifier.
    "heads by ending": (distilbert, SEQ | {"target_modules": ["q_lin", "v_lin"]}, 2.0),
    "ranks by suffix": (llama, CAUSAL | {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 4}}, 2.0),
    "alphas by suffix": (llama, CAUSAL | {"alpha_pattern": {"self_attn.q_proj": 3, "v_proj": 0.5}}, None),
    "ranks by regex": (llama, CAUSAL | {"rank_pattern": {r"layers\.1\..*_proj": 6, "q_proj": 3}}, None),
    "alphas by regex": (llama, CAUSAL | {"alpha_pattern": {r"^model\.layers\.0\..*(q|v)_proj": 3.5}}, None),
    "ranks and alphas": (llama, CAUSAL | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*0.*_proj": 5}}, None),
    "rsLoRA with patterns": (
        bert_of_two_layers,
        SEQ | {"use_rslora": True, "rank_pattern": {"query": 9}, "alpha_pattern": {"layer.1.*": 5}},
        None,
    ),
    "orthogonal start": (llama, CAUSAL | {"init_lora_weights": "orthogonal"}, 2.0),
    "gaussian start": (llama, CAUSAL | {"init_lora_weights": "gaussian"}, 2.0),
    "random start": (llama, CAUSAL | {"init_lora_weights": False}, 2.0),
}
COMMON = [name for name, (_, _, scaling) in READABLE.items() if scaling is not None]


def readable(name):
    build, fields, scaling = READABLE[name]
    return build, trained(build, lora(**fields)), scaling


@pytest.fixture(scope="module")
def written_by_peft(tmp_path_factory):
    """name -> `readable(name)` and the directory that peft wrote. Made once, for tests that only look."""

    @functools.cache
    def make(name):
        build, model, scaling = readable(name)
        return build, model, scaling, saved(model, tmp_path_factory.mktemp("peft"))

    return make


@pytest.fixture
def plain(written_by_peft, tmp_path):
    """A plain adapter that peft saved: 4 modules of rank 4 and alpha 8, no heads. For edits that must be refused."""
    return shutil.copytree(written_by_peft("list")[-1], tmp_path / "plain")


# ---- reading what peft wrote -----------------------------------------------------------------------------------------


class TestReadAdapter:
    @pytest.mark.quick(12)
    @pytest.mark.parametrize("name", READABLE)
    def test_the_update_is_the_one_of_peft(self, name, written_by_peft):
        build, model, _, directory = written_by_peft(name)
        adapter, spec = read_adapter(directory)
        want = peft_updates(model)
        assert set(adapter.modules) == set(want)
        for module, update in updates_of(adapter).items():
            torch.testing.assert_close(update, want[module], rtol=1e-5, atol=1e-6)
        assert spec.scaling == 1.0
        assert_close(dense_logits(build, updates_of(adapter), adapter.heads), logits(model))
        assert (logits(build()) - logits(model)).abs().max() > 0.05

    @pytest.mark.parametrize("name", COMMON)
    def test_the_common_scaling_gives_the_stored_factors_bit_for_bit(self, name, written_by_peft):
        _, _, scaling, directory = written_by_peft(name)
        adapter, spec = read_adapter(str(directory), scaling=scaling)
        assert spec.scaling == scaling
        tensors = stored(directory)
        for module, pair in adapter.modules.items():
            for factor, tensor in pair.tensors().items():
                assert torch.equal(tensor, tensors.pop(f"{PREFIX}{module}.lora_{factor}.weight"))
        assert {f"{PREFIX}{head}" for head in adapter.heads} == set(tensors)
        assert all(torch.equal(head, tensors[f"{PREFIX}{path}"]) for path, head in adapter.heads.items())

    @pytest.mark.parametrize("scaling", [0.5, 2.0, 3.7])
    def test_units_change_B_alone(self, scaling, written_by_peft):
        _, model, _, directory = written_by_peft("ranks and alphas")
        adapter, _ = read_adapter(directory, scaling=scaling)
        tensors, want = stored(directory), peft_updates(model)
        for module, update in updates_of(adapter, scaling).items():
            torch.testing.assert_close(update, want[module], rtol=1e-5, atol=1e-6)
            assert torch.equal(adapter.modules[module].A, tensors[f"{PREFIX}{module}.lora_A.weight"])

    def test_heads_are_named_by_their_path_in_the_base_model(self, written_by_peft):
        build, _, _, directory = written_by_peft("heads of several tensors")
        adapter, spec = read_adapter(directory)
        assert set(adapter.heads) == {
            "bert.pooler.dense.bias",
            "bert.pooler.dense.weight",
            "classifier.bias",
            "classifier.weight",
        }
        shapes = {name: parameter.shape for name, parameter in build().named_parameters()}
        assert all(head.shape == shapes[name] for name, head in adapter.heads.items())
        assert set(spec.config["modules_to_save"]) == {"pooler", "classifier", "score"}

    @pytest.mark.parametrize(
        "keys",
        list(itertools.permutations(["q_proj", r".*\.1\..*", "self_attn.(q|v)_proj"])),
        ids=lambda keys: " > ".join(keys),
    )
    def test_of_several_matching_patterns_the_first_in_the_file_wins(self, keys, tmp_path):
        ranks = {key: {"q": 2, ".": 3, "s": 5}[key[0]] for key in keys}
        alphas = {key: {"q": 7.0, ".": 11.0, "s": 1.5}[key[0]] for key in reversed(keys)}
        model = trained(llama, lora(**CAUSAL, rank_pattern=ranks, alpha_pattern=alphas))
        saved(model, tmp_path)
        edit(tmp_path, rank_pattern=ranks, alpha_pattern=alphas)
        adapter, _ = read_adapter(tmp_path)
        want = peft_updates(loaded(llama, tmp_path))
        for module, update in updates_of(adapter).items():
            torch.testing.assert_close(update, want[module], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(update, peft_updates(model)[module], rtol=1e-5, atol=1e-6)
        assert adapter.ranks == {path: layer.r["default"] for path, layer in peft_layers(model).items()}

    def test_a_pattern_matches_whole_names(self, tmp_path):
        names = ["a.q", "a.xq", "b.a.q", "q.a"]
        model = trained(lambda: Tree(*names), lora(target_modules=names, alpha_pattern={"b.a.q": 3, "q": 5}))
        adapter, _ = read_adapter(saved(model, tmp_path))
        for module, update in peft_updates(model).items():
            torch.testing.assert_close(adapter.modules[module].delta(), update, rtol=1e-5, atol=1e-6)

    def test_the_order_in_the_file_counts_and_not_the_one_in_memory(self, tmp_path):
        # peft sorts the keys when it saves, so its own reloaded model differs from the one in memory.
        model = trained(llama, lora(**CAUSAL, alpha_pattern={"q_proj": 16, "layers.1.*q_proj": 32}))
        adapter, _ = read_adapter(saved(model, tmp_path))
        reloaded = peft_updates(loaded(llama, tmp_path))
        name = "model.layers.1.self_attn.q_proj"
        assert not torch.allclose(reloaded[name], peft_updates(model)[name])
        for module, update in updates_of(adapter).items():
            torch.testing.assert_close(update, reloaded[module], rtol=1e-5, atol=1e-6)

    def test_the_spec_keeps_the_rest_of_the_config(self, tmp_path):
        saved(trained(llama, lora(**CAUSAL, lora_dropout=0.25)), tmp_path)
        edit(tmp_path, base_model_name_or_path="some/base", revision="abc")
        _, spec = read_adapter(tmp_path)
        assert spec.base_model == "some/base"
        assert spec.config["revision"] == "abc"
        assert spec.config["lora_dropout"] == 0.25
        assert spec.config["target_modules"] == ["q_proj", "v_proj"]
        assert not {"r", "lora_alpha", "rank_pattern", "alpha_pattern"} & set(spec.config)

    @pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
    def test_the_spec_does_not_depend_on_the_order_of_a_set(self, field, plain):
        # peft keeps both as sets, so their order in the file is arbitrary.
        names = [*(["q_proj", "v_proj"] if field == "target_modules" else []), "x", "y"]
        edit(plain, **{field: names})
        _, spec = read_adapter(plain)
        edit(plain, **{field: names[::-1]})
        assert read_adapter(plain)[1] == spec

    @pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
    def test_a_start_that_leaves_the_base_weights_alone_is_read(self, init, plain):
        edit(plain, init_lora_weights=init)
        assert len(read_adapter(plain)[0].modules) == 4

    @pytest.mark.filterwarnings(
        # The conversion loads a second adapter on purpose.
        r"ignore:(PiSSA|OLoRA) changes the base weights:UserWarning:peft\.peft_model"
    )
    @pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
    def test_an_adapter_that_peft_converted_is_relative_to_the_original_base(self, init, tmp_path):
        model = get_peft_model(llama(), lora(**CAUSAL, r=2, init_lora_weights=init)).eval()
        saved_converted(model, tmp_path, init)
        adapter, _ = read_adapter(tmp_path / "converted")
        assert set(adapter.ranks.values()) == {4}  # [B | B_0] and [A; A_0]
        assert_close(dense_logits(llama, updates_of(adapter), {}), logits(model))

    def test_a_converted_lora_ga_adapter_is_read(self, tmp_path):
        # The conversion that the refusal advises; peft keeps lora_ga_config in the file after it.
        model = get_peft_model(*lora_ga_model()).eval()
        with pytest.raises(AdapterFormatError, match="lora_ga"):
            read_adapter(saved(model, tmp_path / "before"))
        saved_converted(model, tmp_path, "lora_ga")
        adapter, _ = read_adapter(tmp_path / "converted")
        assert_close(dense_logits(llama, updates_of(adapter), {}), logits(model))


def saved_converted(model, directory, init):
    """Train, then save with path_initial_model_for_weight_conversion, as peft's documentation does it."""
    config = model.peft_config["default"]
    config.init_lora_weights = True
    model.save_pretrained(directory / "start")
    config.init_lora_weights = init
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    model.save_pretrained(
        directory / "converted", path_initial_model_for_weight_conversion=os.fspath(directory / "start")
    )


def lora_ga_model():
    """A base model prepared by one backward pass, and the config for it."""
    model = llama()
    config = lora(**CAUSAL, r=2, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    inputs = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    preprocess_loraga(model, config, lambda: model(inputs_embeds=inputs, labels=TOKENS).loss.backward())
    return model, config


# ---- writing what peft reads -----------------------------------------------------------------------------------------

WRITABLE = ["list", "regex", "all-linear", "no task type", "Conv1D", "heads", "heads of several tensors"]


@functools.cache
def read_once(name):
    return read_model(readable(name)[1])


def like(name, ranks, dtype=torch.float32):
    """A base model, a random adapter of the given ranks for it, and the spec of peft's adapter for that model."""
    adapter, spec = read_once(name)
    return READABLE[name][0], random_like(adapter, ranks, dtype), spec


class TestWriteAdapter:
    @pytest.mark.quick(12)
    @pytest.mark.parametrize(
        ("ranks", "scaling"),
        [((4,), 2.0), ((4,), 0.7), ((3,), 1 / 3), ((3, 4, 8), 1.0), ((3, 4, 8), 0.7), ((2, 1), 1 / 3)],
        ids=str,
    )
    @pytest.mark.parametrize("name", WRITABLE)
    def test_peft_loads_the_base_plus_the_scaled_product(self, name, ranks, scaling, tmp_path):
        build, adapter, spec = like(name, ranks)
        write_adapter(tmp_path / "out", adapter, AdapterSpec(spec.config, scaling))
        assert_peft_loads(build, tmp_path / "out", adapter, scaling)

    @pytest.mark.quick(12)
    @pytest.mark.parametrize("name", READABLE)
    def test_what_was_read_is_written_with_the_same_meaning(self, name, written_by_peft, tmp_path):
        build, model, scaling, directory = written_by_peft(name)
        adapter, spec = read_adapter(directory, scaling=scaling or 1.5)
        write_adapter(tmp_path / "out", adapter, spec)
        assert_close(logits(loaded(build, tmp_path / "out")), logits(model))
        again, spec_again = read_adapter(tmp_path / "out", scaling=spec.scaling)
        assert_same(again, adapter)
        changed = {"use_rslora", "init_lora_weights"}  # both folded into the numbers
        if name in ("regex", "some layers", "excluded"):  # names are written in place of what chooses among them
            assert sorted(spec_again.config["target_modules"]) == sorted(adapter.modules)
            choosing = {"exclude_modules", "layers_to_transform", "layers_pattern"}
            assert not any(spec_again.config[field] for field in choosing)
            changed |= {"target_modules", *choosing}
        assert {k: v for k, v in spec_again.config.items() if k not in changed} == {
            k: v for k, v in spec.config.items() if k not in changed
        }

    @pytest.mark.parametrize("scaling", [1.0, 2.0, 0.7, 1 / 3, 8 / math.sqrt(6)], ids="{:.3g}".format)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_round_trip_is_exact(self, dtype, scaling, tmp_path):
        _, adapter, spec = like("heads", (3, 4, 25, 24), dtype)
        spec = AdapterSpec(spec.config, scaling)
        write_adapter(tmp_path / "out", adapter, spec)
        again, spec_again = read_adapter(tmp_path / "out", scaling=scaling)
        assert_same(again, adapter)
        assert spec_again == AdapterSpec({**spec.config, "inference_mode": True}, scaling)

    @pytest.mark.parametrize("turn", range(4))
    def test_patterns_of_names_that_contain_one_another_do_not_cross(self, turn, tmp_path):
        names = ["a.q", "b.a.q", "a.q2", "a.qq", "aXq", "q", "c.b.a.q", "l.1.q", "l.10.q", "l.11.q", "d+e", "dde"]
        ranks = [*range(1, 7), 4, 4, 4, *range(1, 4)]
        ranks = ranks[turn * 3 :] + ranks[: turn * 3]  # each name has the common rank 4 in a turn, others in the rest
        generator = torch.Generator().manual_seed(turn)
        adapter = Adapter(
            {
                name: LoRA(torch.randn(5, r, generator=generator), torch.randn(r, 6, generator=generator))
                for name, r in zip(names, ranks, strict=True)
            }
        )
        _, spec = read_model(get_peft_model(Tree(*names), lora(target_modules=names)))
        write_adapter(tmp_path, adapter, AdapterSpec(spec.config, 0.75))
        model = loaded(lambda: Tree(*names), tmp_path)
        assert {path: layer.r["default"] for path, layer in peft_layers(model).items()} == adapter.ranks
        for name, update in peft_updates(model).items():
            torch.testing.assert_close(update, 0.75 * adapter.modules[name].delta(), rtol=1e-5, atol=1e-5)
        assert_same(read_adapter(tmp_path, scaling=0.75)[0], adapter)

    def test_one_rank_needs_no_patterns(self, tmp_path):
        build, adapter, spec = like("list", (3, 4, 8))
        padded = Adapter({name: pad_rank(module, 8) for name, module in adapter.modules.items()})
        write_adapter(tmp_path / "out", padded, spec)
        config = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
        assert (config["r"], config["lora_alpha"]) == (8, 8)
        assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {})
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)

    def test_writing_twice_gives_the_same_three_files(self, tmp_path):
        _, adapter, spec = like("heads", (2, 4))
        for out in ("one", "two", "two"):
            write_adapter(tmp_path / out, adapter, spec)
        files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
        assert set(files) == {CONFIG_FILE, WEIGHTS_FILE, "README.md"}
        assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}

    def test_an_adapter_in_the_way_is_replaced(self, plain):
        _, spec = read_adapter(plain)
        adapter = random_like(read_adapter(plain)[0], (6, 2))
        write_adapter(plain, adapter, spec)
        assert_peft_loads(llama, plain, adapter, 1.0)

    def test_the_card(self, tmp_path):
        _, adapter, spec = like("list", (4,))
        write_adapter(tmp_path / "own", adapter, spec, card="# Mine\n")
        assert (tmp_path / "own" / "README.md").read_text() == "# Mine\n"
        write_adapter(
            tmp_path / "default", adapter, AdapterSpec({**spec.config, "base_model_name_or_path": "some/base"})
        )
        assert "base_model: some/base" in (tmp_path / "default" / "README.md").read_text()

    def test_views_and_tensors_that_require_gradients_are_written(self, tmp_path):
        build, adapter, spec = like("list", (4,))
        views = adapter.map(lambda t: t.T.contiguous().T.requires_grad_())
        write_adapter(tmp_path / "out", views, spec)
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)

    def test_modules_may_share_a_tensor(self, tmp_path):
        build, adapter, spec = like("list", (4,))
        A = next(iter(adapter.modules.values())).A
        sharing = Adapter({name: LoRA(module.B, A) for name, module in adapter.modules.items()})
        write_adapter(tmp_path / "out", sharing, spec)
        assert_peft_loads(build, tmp_path / "out", sharing, 1.0)


def poisoned(adapter, value):
    name, module = list(adapter.modules.items())[-1]
    B = module.B.clone()
    B[0, 0] = value
    return Adapter({**adapter.modules, name: LoRA(B, module.A)}, adapter.heads)


# what -> (the change to a good adapter with a head, what the refusal names)
UNWRITABLE = {
    "NaN": (lambda a: poisoned(a, math.nan), "lora_B.*NaN"),
    "Inf": (lambda a: poisoned(a, math.inf), "lora_B.*Inf"),
    "NaN in a head": (lambda a: Adapter(a.modules, {n: h * math.nan for n, h in a.heads.items()}), "classifier"),
    "rank 0": (
        lambda a: Adapter({n: LoRA(m.B[:, :0], m.A[:0]) for n, m in a.modules.items()}, a.heads),
        "query.* rank 0",
    ),
    "no A": (lambda a: Adapter({n: LoRA(m.B, None) for n, m in a.modules.items()}, a.heads), "factor A"),
    "no modules": (lambda a: Adapter({}, a.heads), "module"),
}


class TestRefusedWrites:
    @pytest.mark.parametrize("what", UNWRITABLE)
    def test_nothing_is_written(self, what, tmp_path):
        _, adapter, spec = like("heads", (4,))
        change, message = UNWRITABLE[what]
        with pytest.raises((AdapterFormatError, FactorNotShared), match=message):
            write_adapter(tmp_path / "new" / "out", change(adapter), spec)
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("what", UNWRITABLE)
    def test_what_was_there_stays(self, what, tmp_path):
        _, adapter, spec = like("heads", (4,))
        there = tmp_path / "there"
        write_adapter(there, adapter, spec)
        before = {path.name: path.read_bytes() for path in there.iterdir()}
        change, message = UNWRITABLE[what]
        with pytest.raises((AdapterFormatError, FactorNotShared), match=message):
            write_adapter(there, change(adapter), spec)
        assert before == {path.name: path.read_bytes() for path in there.iterdir()}

    # An adapter and a spec that disagree: refused, or put right. Never a directory that means something else.

    def test_heads_that_the_spec_does_not_save(self, tmp_path):
        build, adapter, spec = like("heads", (4,))
        spec = AdapterSpec({**spec.config, "modules_to_save": None, "task_type": None})
        try:
            write_adapter(tmp_path / "out", adapter, spec)
        except AdapterFormatError:
            return
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)
        assert_same(read_adapter(tmp_path / "out")[0], adapter)

    @pytest.mark.parametrize("task", ["SEQ_CLS", None])
    def test_saved_modules_without_heads(self, task, tmp_path):
        # So comes the server's adapter when heads stay with the clients.
        build, adapter, spec = like("heads", (4,))
        adapter = Adapter(adapter.modules)
        try:
            write_adapter(tmp_path / "out", adapter, AdapterSpec({**spec.config, "task_type": task}))
        except AdapterFormatError:
            return
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)

    @pytest.mark.parametrize("targets", [["q_proj"], r".*\.q_proj"], ids=str)
    def test_modules_that_the_spec_does_not_target(self, targets, tmp_path):
        # peft would leave them out without a word.
        build, adapter, spec = like("list", (4,))
        try:
            write_adapter(tmp_path / "out", adapter, AdapterSpec({**spec.config, "target_modules": targets}))
        except AdapterFormatError:
            return
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)


# ---- models in memory ------------------------------------------------------------------------------------------------


def two_adapters():
    """One classifier with two adapters of different ranks and targets, and the same scaling 2."""
    model = get_peft_model(bert_of_two_layers(), lora(**SEQ), adapter_name="one")
    model.add_adapter("two", lora(**SEQ | {"r": 3, "lora_alpha": 6, "target_modules": ["value", "dense"]}))
    for seed, name in enumerate(("two", "one"), start=1):
        model.set_adapter(name)
        randomise(model, seed)
    return model.eval()


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before, where=""):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if where in name)


class TestModels:
    @pytest.mark.parametrize("name", READABLE)
    def test_a_model_reads_as_its_directory_does(self, name, written_by_peft):
        _, model, scaling, directory = written_by_peft(name)
        for unit in {1.0, scaling or 1.0}:
            from_model, spec = read_model(model, scaling=unit)
            from_file, file_spec = read_adapter(directory, scaling=unit)
            assert_same(from_model, from_file)
            assert spec.scaling == unit
            differ = {k for k, v in spec.config.items() if file_spec.config[k] != v}
            assert differ <= {"inference_mode", "auto_mapping"}  # set by peft as it saves

    @pytest.mark.parametrize("name", COMMON)
    def test_read_and_load_are_exact_in_the_common_scaling(self, name):
        _, model, scaling = readable(name)
        before = snapshot(model)
        adapter, _ = read_model(model, scaling=scaling)
        for path, layer in peft_layers(model).items():
            assert torch.equal(adapter.modules[path].B, layer.lora_B["default"].weight)
            assert torch.equal(adapter.modules[path].A, layer.lora_A["default"].weight)
        randomise(model, seed=2)
        assert not unchanged(model, before)
        load_into_model(model, adapter, scaling=scaling)
        assert unchanged(model, before)

    @pytest.mark.parametrize("scaling", [1.0, 0.7, 2.0])
    @pytest.mark.parametrize("name", ["list", "Conv1D", "heads", "rsLoRA", "ranks and alphas"])
    def test_a_loaded_adapter_is_the_base_plus_the_scaled_product(self, name, scaling):
        build, model, _ = readable(name)
        own, _ = read_model(model)
        adapter = random_like(own, list(own.ranks.values()))
        load_into_model(model, adapter, scaling=scaling)
        assert_close(logits(model), dense_logits(build, updates_of(adapter, scaling), adapter.heads))
        again, _ = read_model(model, scaling=scaling)
        for path, update in updates_of(again).items():
            torch.testing.assert_close(update, adapter.modules[path].delta(), rtol=1e-5, atol=1e-6)

    def test_what_was_read_is_a_copy(self):
        _, model, scaling = readable("heads")
        adapter, _ = read_model(model, scaling=scaling)
        before = adapter.map(torch.clone)
        randomise(model, seed=2)
        assert_same(adapter, before)

    def test_adapters_of_one_model_are_apart(self):
        model = two_adapters()
        for name, rank in (("one", 4), ("two", 3)):
            adapter, _ = read_model(model, name)
            assert set(adapter.ranks.values()) == {rank}
            assert set(adapter.modules) == set(peft_layers(model, name))
            model.set_adapter(name)
            assert_close(logits(model), dense_logits(bert_of_two_layers, updates_of(adapter), adapter.heads))

    def test_an_adapter_without_heads_beside_one_with_heads(self):
        model = trained(llama, lora(**CAUSAL, modules_to_save=["lm_head"]))
        model.add_adapter("plain", lora(**CAUSAL))
        with_head, plain = read_model(model)[0], read_model(model, "plain")[0]
        assert (list(with_head.heads), list(plain.heads)) == (["lm_head.weight"], [])
        before = snapshot(model)
        load_into_model(model, with_head)
        load_into_model(model, plain, "plain")
        assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items() if "lm_head" in k)

    def test_loading_one_adapter_leaves_the_other_and_the_base_alone(self):
        model = two_adapters()
        before = snapshot(model)
        adapter, _ = read_model(model, "one", scaling=2.0)
        load_into_model(model, adapter.map(torch.zeros_like), "one", scaling=2.0)
        changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
        assert changed == {key for key in before if ".one." in key}
        load_into_model(model, adapter, "one", scaling=2.0)
        assert unchanged(model, before)

    def test_a_model_adapted_by_transformers_alone_is_read(self):
        model = llama()
        model.add_adapter(lora(**CAUSAL, init_lora_weights=False), "default")
        adapter, _ = read_model(model.eval())
        assert_close(dense_logits(llama, updates_of(adapter), {}), logits(model))

    def test_from_model_to_directory_to_peft(self, tmp_path):
        model = two_adapters()
        for name in ("one", "two"):
            model.set_adapter(name)
            adapter, spec = read_model(model, name, scaling=2.0)
            write_adapter(tmp_path / name, adapter, spec)
            assert_close(logits(loaded(bert_of_two_layers, tmp_path / name)), logits(model))

    def test_buffers_of_a_head_are_the_same_in_a_model_and_its_directory(self, tmp_path):
        base = NormNet()
        model = trained(lambda: copy.deepcopy(base), lora(target_modules=["fc"], modules_to_save=["head"]))
        from_file, spec = read_adapter(saved(model, tmp_path))
        from_model, _ = read_model(model)
        assert_same(from_model, from_file)
        load_into_model(model, from_file)
        write_adapter(tmp_path, from_model, spec)
        x = torch.ones(3, 6)
        torch.testing.assert_close(loaded(lambda: base, tmp_path)(x), model(x))

    @pytest.mark.parametrize("build", [NormNet, llama])
    def test_a_model_without_adapters(self, build):
        with pytest.raises(AdapterFormatError, match="default"):
            read_model(build())

    def test_an_adapter_that_the_model_lacks(self):
        model = two_adapters()
        adapter, _ = read_model(model, "one")
        with pytest.raises(AdapterFormatError, match=r"three.*one.*two"):
            read_model(model, "three")
        with pytest.raises(AdapterFormatError):
            load_into_model(model, adapter, "three")


def changed_module(change):
    """Apply `change` to the last module, so that the others would be copied before it is looked at."""

    def apply(adapter):
        name, module = list(adapter.modules.items())[-1]
        return Adapter({**adapter.modules, name: change(*module.factors)}, adapter.heads)

    return apply


# what -> (the change to an adapter that fits, what the refusal names)
UNFIT = {
    "a module too few": (lambda a: Adapter(dict(list(a.modules.items())[1:]), a.heads), "modules.*layer.0"),
    "a module too many": (
        lambda a: Adapter({**a.modules, "bert.extra": a.modules[next(iter(a.modules))]}, a.heads),
        "modules.*bert.extra",
    ),
    "a head too few": (lambda a: Adapter(a.modules, dict(list(a.heads.items())[1:])), "heads.*classifier.bias"),
    "a head too many": (lambda a: Adapter(a.modules, {**a.heads, "odd": torch.zeros(1)}), "heads.*odd"),
    "another rank": (changed_module(lambda B, A: LoRA(B[:, :3], A[:3])), r"layer.1.*\(32, 4\).*\(32, 3\)"),
    "another d_out": (changed_module(lambda B, A: LoRA(B[:1], A)), r"layer.1.*\(32, 4\).*\(1, 4\)"),
    "another d_in": (changed_module(lambda B, A: LoRA(B, A[:, :1])), r"layer.1.*\(4, 32\).*\(4, 1\)"),
    "another head shape": (
        lambda a: Adapter(a.modules, {n: h[:1] for n, h in a.heads.items()}),
        r"classifier.*\(3,.*\(1,",
    ),
}


class TestRefusedLoads:
    @pytest.mark.parametrize("what", UNFIT)
    def test_the_model_stays_as_it_was(self, what):
        _, model, _ = readable("heads")
        adapter, _ = read_model(model)
        before = snapshot(model)
        change, message = UNFIT[what]
        with pytest.raises(AdapterFormatError, match=message):
            load_into_model(model, change(adapter.map(torch.zeros_like)))
        assert unchanged(model, before)

    @pytest.mark.parametrize("what", ["use_dora", "pissa"])
    def test_a_model_that_would_not_be_the_base_plus_the_update(self, what):
        field, build = BUILT_BY_PEFT[what]
        adapter, _ = read_model(trained(llama, lora(**CAUSAL)))
        with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
            load_into_model(build(), adapter)

    @pytest.mark.parametrize(
        ("build", "named"), [(lambda: embedding_model(), "embed_tokens"), (lambda: conv_model(), r"\bconv\b")]
    )
    def test_a_model_with_an_adapted_layer_that_is_not_linear(self, build, named):
        model = build()
        with pytest.raises(AdapterFormatError, match=named):
            read_model(model)
        before = snapshot(model)
        adapter, _ = read_model(trained(llama, lora(**CAUSAL)))
        with pytest.raises(AdapterFormatError, match=named):
            load_into_model(model, adapter)
        assert unchanged(model, before)


class TestUnits:
    @pytest.mark.parametrize("scaling", [0.0, -2.0, math.nan, math.inf])
    def test_a_scaling_must_be_positive(self, scaling, plain):
        model = loaded(llama, plain)
        adapter, spec = read_adapter(plain)
        for use in (
            lambda: read_adapter(plain, scaling=scaling),
            lambda: write_adapter(plain, adapter, AdapterSpec(spec.config, scaling)),
            lambda: read_model(model, scaling=scaling),
            lambda: load_into_model(model, adapter, scaling=scaling),
        ):
            with pytest.raises(FedLoRAError, match="scaling"):
                use()


# ---- refusals --------------------------------------------------------------------------------------------------------


def built(build=llama, **fields):
    return lambda: trained(build, lora(**CAUSAL | fields))


def embedding_model():
    return trained(llama, lora(**CAUSAL, target_modules=["embed_tokens", "q_proj", "v_proj"]))


def conv_model():
    return trained(ConvNet, lora(target_modules=["conv", "fc"]))


# what -> (the field that the refusal names, a model built by peft)
BUILT_BY_PEFT = {
    "use_dora": ("use_dora", built(use_dora=True)),
    "pissa": ("init_lora_weights", built(init_lora_weights="pissa")),
    "pissa_niter_4": ("init_lora_weights", built(init_lora_weights="pissa_niter_4")),
    "olora": ("init_lora_weights", built(init_lora_weights="olora")),
    "LoHa": ("peft_type", lambda: trained(llama, LoHaConfig(r=4, target_modules=["q_proj"], **CAUSAL))),
}
# The same, of what is read from files (test_formats.py) and may not be trained here.
FILES_ONLY = {
    "lora_bias": ("lora_bias", built(bert_of_two_layers, **SEQ, lora_bias=True)),
    "bias all": ("bias", built(bert_of_two_layers, **SEQ, bias="all")),
    "bias lora_only": ("bias", built(bert_of_two_layers, **SEQ, bias="lora_only")),
    "target_parameters": ("target_parameters", built(target_modules=[], target_parameters=["q_proj.weight"])),
    "trainable_token_indices": ("trainable_token_indices", built(trainable_token_indices=[1, 2])),
    "layer_replication": ("layer_replication", built(layer_replication=[(0, 1), (0, 2)])),
    "AdaLoRA": ("peft_type", lambda: trained(llama, AdaLoraConfig(target_modules=["q_proj"], total_step=9, **CAUSAL))),
}
# (field, value) that peft cannot build here, or need not
EDITED = [
    *(
        ("init_lora_weights", init)
        for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "some-init-of-2031", ["gaussian"])
    ),
    ("megatron_config", {"hidden_size": 4}),
    ("use_qalora", True),
    ("a_field_of_2031", True),
    ("a_field_of_2031", {"some": "thing"}),
]
EDITED_FILES_ONLY = [
    ("bias", "all"),
    ("bias", "lora_only"),
    ("lora_bias", True),
    ("target_parameters", ["experts.gate_up_proj"]),
    ("trainable_token_indices", {"embed_tokens": [0]}),
    ("layer_replication", [[0, 1], [0, 2]]),
]
VARIANTS = sorted(field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant"))


class TestRefusedConfigs:
    @pytest.mark.parametrize("what", BUILT_BY_PEFT)
    def test_what_peft_built_is_refused_by_field(self, what, tmp_path):
        field, build = BUILT_BY_PEFT[what]
        model = build()
        with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
            read_adapter(saved(model, tmp_path))
        with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
            read_model(model)

    @pytest.mark.parametrize("what", FILES_ONLY)
    def test_what_files_may_have_a_model_may_not(self, what):
        field, build = FILES_ONLY[what]
        model = build()
        before = snapshot(model)
        adapter, _ = read_model(trained(llama, lora(**CAUSAL)))
        for use in (lambda: read_model(model), lambda: load_into_model(model, adapter)):
            with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
                use()
        assert unchanged(model, before)

    @pytest.mark.parametrize(("field", "value"), EDITED_FILES_ONLY, ids=str)
    def test_a_config_that_is_to_be_trained_is_refused_by_field(self, field, value, plain):
        edit(plain, **{field: value})
        config = json.loads((plain / CONFIG_FILE).read_text())
        check_config(config, where="here")
        with pytest.raises(AdapterFormatError, match=rf"here: {field} = "):
            check_config(config, where="here", in_model=True)

    @pytest.mark.parametrize(("field", "value"), EDITED, ids=str)
    def test_a_config_is_refused_by_field(self, field, value, plain):
        edit(plain, **{field: value})
        with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
            read_adapter(plain)

    @pytest.mark.parametrize("field", VARIANTS)
    def test_every_variant_that_peft_declares_is_refused(self, field, plain):
        edit(plain, **{field: {"on": True}})
        with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
            read_adapter(plain)

    @pytest.mark.parametrize("value", [None, False, 0, "", [], {}], ids=str)
    def test_an_unknown_field_that_says_nothing_is_warned_about(self, value, plain):
        want, _ = read_adapter(plain)
        edit(plain, a_field_of_2031=value)
        with pytest.warns(UserWarning, match="a_field_of_2031") as caught:
            adapter, _ = read_adapter(plain)
        assert len(caught) == 1
        assert_same(adapter, want)

    def test_an_old_config_with_few_fields_is_read(self, plain):
        want, _ = read_adapter(plain)
        few = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        (plain / CONFIG_FILE).write_text(json.dumps(few))
        assert_same(read_adapter(plain)[0], want)


class _Nested(nn.Module):
    """A module without one around it, and another of that name within: endings mean both."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.aux = nn.Module()
        self.aux.head = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 4)
        self.config = {"model_type": "custom"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x) + self.aux.head(x) * self.fc(x)
        return out


@pytest.mark.parametrize(
    "chosen",
    [{"target_modules": "head|fc"}, {"target_modules": ["head", "fc"], "exclude_modules": ["aux.head"]}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_choice_stays_where_a_list_of_paths_would_mean_more(chosen: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: what peft computes with the folder that peft wrote, and with the one that was read and written again."""
    torch.manual_seed(0)
    base = _Nested()
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, bias="all", init_lora_weights=False, **chosen))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "a")
    write_adapter(tmp_path / "b", *read_adapter(tmp_path / "a"))
    x = torch.randn(3, 4)
    want, got = (PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)(x) for name in "ab")
    torch.testing.assert_close(got, want)


def test_layers_are_repeated_in_ranges_of_any_length_up_to_a_limit() -> None:
    """Empty ones, too; backward ones are none, and no model has more than 10,000 layers."""
    taken = [
        _layer_ranges(value) for value in ([[0, 10_000]], [[0, 5_000], [2, 2], [0, 5_000]], [[3, 2]], [[0, 10_001]])
    ]
    assert taken == [True, True, False, False]
