"""Writing what peft reads: whole or not at all. Kinds of evidence: *end-to-end* (we write and peft reads), *oracle*
(base + scaling * B @ A added densely), refusals.
"""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from torch import nn

from fedlora.adapters import AdapterSpec, read_adapter, write_adapter
from fedlora.adapters.io import read_model
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.core.lora import Adapter, LoRA
from fedlora.errors import AdapterFormatError, FactorNotShared
from support.peft_boundary import (
    READABLE,
    assert_close,
    assert_peft_loads,
    assert_same,
    kept,
    loaded,
    random_like,
)
from support.peft_models import peft_layers, peft_updates
from support.tiny_models import logits

WRITABLE = ["list", "all-linear", "Conv1D", "heads", "heads of several tensors"]


@functools.cache
def read_once(name):
    return read_model(kept(name)[1])


def like(name, ranks, dtype=torch.float32):
    """A base model, a random adapter of the given ranks for it, and the spec of peft's adapter for that model."""
    adapter, spec = read_once(name)
    return READABLE[name][0], random_like(adapter, ranks, dtype), spec


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


class TestWriteAdapter:
    @pytest.mark.parametrize("name", WRITABLE)
    def test_peft_loads_the_base_plus_the_scaled_product(self, name, tmp_path):
        """Of one rank and of several; scalings that have an end in binary, and that have none."""
        for k, (ranks, scaling) in enumerate((((3, 4, 8), 1.0), ((2, 1), 1 / 3))):
            build, adapter, spec = like(name, ranks)
            write_adapter(tmp_path / str(k), adapter, AdapterSpec(spec.config, scaling))
            assert_peft_loads(build, tmp_path / str(k), adapter, scaling)

    @pytest.mark.parametrize("name", READABLE)
    def test_what_was_read_is_written_with_the_same_meaning(self, name, written_by_peft, tmp_path):
        build, model, scaling, directory = written_by_peft(name)
        adapter, spec = read_adapter(directory, scaling=scaling or 1.5)
        write_adapter(tmp_path / "out", adapter, spec)
        assert_close(logits(loaded(build, tmp_path / "out")), logits(model))
        again, spec_again = read_adapter(tmp_path / "out", scaling=spec.scaling)
        assert_same(again, adapter)
        config = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
        assert sorted(config["target_modules"]) == sorted(adapter.modules)  # in full: no pattern is handed on
        kept_ = {k: v for k, v in spec.config.items() if v is not None and k != "modules_to_save"}
        assert kept_.items() <= spec_again.config.items()

    @pytest.mark.parametrize("scaling", [2.0, 1 / 3, 8 / math.sqrt(6)], ids="{:.3g}".format)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_round_trip_is_exact(self, dtype, scaling, tmp_path):
        _, adapter, spec = like("heads", (3, 4, 25, 24), dtype)
        spec = AdapterSpec({**spec.config, "use_rslora": True}, scaling)  # the scale is the spec's, whatever was read
        write_adapter(tmp_path / "out", adapter, spec)
        again, spec_again = read_adapter(tmp_path / "out", scaling=scaling)
        assert_same(again, adapter)
        assert spec_again.scaling == scaling and spec_again.config["modules_to_save"] == ["classifier"]

    @pytest.mark.parametrize("turn", range(2))
    def test_ranks_of_names_that_contain_one_another_do_not_cross(self, turn, tmp_path):
        """Oracle: peft's ranks and updates. In one turn `a.q` has the common rank, in the other `b.a.q`."""
        names = ["a.q", "b.a.q", "a.q2", "a.qq", "c.b.a.q", "l.1.q", "l.11.q"]
        ranks = [[4, 2, 3, 4, 5, 1, 6], [2, 4, 3, 1, 5, 4, 6]][turn]
        generator = torch.Generator().manual_seed(turn)
        adapter = Adapter(
            {
                name: LoRA(torch.randn(5, r, generator=generator), torch.randn(r, 6, generator=generator))
                for name, r in zip(names, ranks, strict=True)
            }
        )
        write_adapter(tmp_path, adapter, AdapterSpec({}, 0.75))
        model = loaded(lambda: Tree(*names), tmp_path)
        assert {path: layer.r["default"] for path, layer in peft_layers(model).items()} == adapter.ranks
        for name, update in peft_updates(model).items():
            torch.testing.assert_close(update, 0.75 * adapter.modules[name].delta(), rtol=1e-5, atol=1e-5)
        assert_same(read_adapter(tmp_path, scaling=0.75)[0], adapter)

    def test_writing_twice_gives_the_same_three_files(self, tmp_path):
        _, adapter, spec = like("heads", (2, 4))
        for out in ("one", "two", "two"):
            write_adapter(tmp_path / out, adapter, spec)
        files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
        assert set(files) == {CONFIG_FILE, WEIGHTS_FILE, "README.md"}
        assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}

    def test_views_shared_tensors_and_a_card_are_written(self, tmp_path):
        """Views turned in memory that require gradients; one A for all modules."""
        build, adapter, spec = like("list", (4,))
        A = next(iter(adapter.modules.values())).A
        sharing = Adapter({name: LoRA(module.B, A) for name, module in adapter.modules.items()})
        turned = adapter.map(lambda t: t.T.contiguous().T.requires_grad_())
        for name, given, want in (("views", turned, adapter), ("shared", sharing, sharing)):
            write_adapter(tmp_path / name, given, spec, card="# Mine\n")
            assert_peft_loads(build, tmp_path / name, want, 1.0)
            assert (tmp_path / name / "README.md").read_text() == "# Mine\n"


def of_modules(change):
    return lambda a: Adapter({name: change(lora) for name, lora in a.modules.items()}, a.heads)


# The change to a good adapter with a head, and what the refusal names.
UNWRITABLE = [
    (of_modules(lambda lora: LoRA(lora.B * math.nan, lora.A)), "lora_B.weight' holds NaN"),
    (lambda a: Adapter(a.modules, {n: h * math.nan for n, h in a.heads.items()}), "classifier"),
    (of_modules(lambda lora: LoRA(lora.B[:, :0], lora.A[:0])), "each of rank 1"),
    (of_modules(lambda lora: LoRA(lora.B, None)), "lora_A.weight' is missing"),
    (lambda a: Adapter({}, a.heads), "has modules"),
    (lambda a: Adapter({f"_orig_mod.{name}": lora for name, lora in a.modules.items()}, a.heads), "wrapper"),
]


class TestRefusedWrites:
    def test_nothing_is_written_and_what_was_there_stays(self, tmp_path):
        _, adapter, spec = like("heads", (4,))
        there = tmp_path / "there"
        write_adapter(there, adapter, spec)
        before = {path.name: path.read_bytes() for path in there.iterdir()}
        for change, message in UNWRITABLE:
            for out in (there, tmp_path / "new"):
                with pytest.raises((AdapterFormatError, FactorNotShared), match=message):
                    write_adapter(out, change(adapter), spec)
            assert not (tmp_path / "new").exists()
            assert before == {path.name: path.read_bytes() for path in there.iterdir()}

    def test_heads_that_the_spec_does_not_save(self, tmp_path):
        build, adapter, spec = like("heads", (4,))
        spec = AdapterSpec({**spec.config, "modules_to_save": None, "task_type": None})
        write_adapter(tmp_path / "out", adapter, spec)
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)
        assert_same(read_adapter(tmp_path / "out")[0], adapter)

    def test_saved_modules_without_heads(self, tmp_path):
        # So comes the server's adapter when heads stay with the clients.
        build, adapter, spec = like("heads", (4,))
        adapter = Adapter(adapter.modules)
        write_adapter(tmp_path / "out", adapter, AdapterSpec({**spec.config, "task_type": "SEQ_CLS"}))
        assert_peft_loads(build, tmp_path / "out", adapter, 1.0)


def test_no_stranger_makes_peft_import_a_module(plain, tmp_path):
    """auto_mapping names what AutoPeftModel imports: only transformers' is handed on."""
    for library, handed in (("os", False), ("transformers.models.bert.modeling_bert", True)):
        mapping = {"base_model_class": "x", "parent_library": library}
        config = json.loads((plain / CONFIG_FILE).read_text()) | {"auto_mapping": mapping}
        (plain / CONFIG_FILE).write_text(json.dumps(config))
        write_adapter(tmp_path / library, *read_adapter(plain))
        written = json.loads((tmp_path / library / CONFIG_FILE).read_text())
        assert (written.get("auto_mapping") == mapping) is handed
