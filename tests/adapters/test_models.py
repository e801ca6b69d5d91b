"""A peft model in memory and its adapter. Kinds of evidence: *oracle* (base + scaling * B @ A added densely to a copy
of the base weights) and the same numbers as in the directory that peft wrote.
"""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from fedlora.adapters.io import load_into_model, read_adapter, read_model
from fedlora.core.lora import Adapter, LoRA
from fedlora.errors import AdapterFormatError
from support.peft_boundary import (
    READABLE,
    SEQ,
    assert_close,
    assert_same,
    lora,
    random_like,
    readable,
    updates_of,
)
from support.peft_models import dense_logits, peft_layers, randomise
from support.tiny_models import bert_of_two_layers, llama, logits


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


def unchanged(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class TestModels:
    @pytest.mark.parametrize("name", READABLE)
    def test_a_model_reads_as_its_directory_does(self, name, written_by_peft):
        _, model, scaling, directory = written_by_peft(name)
        for unit in {1.0, scaling or 1.0}:
            from_model, spec = read_model(model, scaling=unit)
            from_file, file_spec = read_adapter(directory, scaling=unit)
            assert_same(from_model, from_file)
            assert spec.scaling == unit
            differ = {k for k, v in spec.config.items() if file_spec.config.get(k) != v}
            assert differ <= {"auto_mapping"}  # set by peft as it saves

    @pytest.mark.parametrize("name", ["Conv1D", "heads", "rsLoRA", "ranks by suffix"])
    def test_a_loaded_adapter_is_the_base_plus_the_scaled_product(self, name, scaling=0.7):
        build, model, _ = readable(name)
        own, _ = read_model(model)
        adapter = random_like(own, list(own.ranks.values()))
        load_into_model(model, adapter, scaling=scaling)
        assert_close(logits(model), dense_logits(build, updates_of(adapter, scaling), adapter.heads))
        again, _ = read_model(model, scaling=scaling)
        for path, update in updates_of(again).items():
            torch.testing.assert_close(update, adapter.modules[path].delta(), rtol=1e-5, atol=1e-6)

    def test_adapters_of_one_model_are_apart(self):
        """Each reads as itself; loading one leaves the other and the base alone."""
        model = two_adapters()
        before = snapshot(model)
        for name, rank in (("one", 4), ("two", 3)):
            adapter, _ = read_model(model, name, scaling=2.0)
            assert set(adapter.ranks.values()) == {rank} and set(adapter.modules) == set(peft_layers(model, name))
            model.set_adapter(name)
            assert_close(logits(model), dense_logits(bert_of_two_layers, updates_of(adapter, 2.0), adapter.heads))
            load_into_model(model, adapter.map(torch.zeros_like), name, scaling=2.0)
            changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
            assert changed == {key for key in before if f".{name}." in key}
            load_into_model(model, adapter, name, scaling=2.0)
            assert unchanged(model, before)

    def test_an_adapter_that_the_model_lacks(self):
        model = two_adapters()
        adapter, _ = read_model(model, "one")
        with pytest.raises(AdapterFormatError, match="default"):
            read_model(llama())
        with pytest.raises(AdapterFormatError, match=r"three.*one.*two"):
            read_model(model, "three")
        with pytest.raises(AdapterFormatError):
            load_into_model(model, adapter, "three")


@pytest.mark.parametrize("name", ["list", "Conv1D"])
def test_a_base_that_moves_and_comes_back(name):
    """W0 + scaling * base, densely, also where weights are stored turned; the next adapter's base counts from the
    pre-trained weights, not from the last."""
    build, model, _ = readable(name)
    adapter, _ = read_model(model)
    for seed in (3, 4):
        base = random_like(adapter, [2], seed=seed).modules
        load_into_model(model, Adapter(adapter.modules, adapter.heads, base), scaling=0.5)
        whole = {path: 0.5 * (lora.delta() + base[path].delta()) for path, lora in adapter.modules.items()}
        assert_close(logits(model), dense_logits(build, whole, adapter.heads))
        assert read_model(model)[0].base is not None
    load_into_model(model, adapter, scaling=0.5)
    assert_close(logits(model), dense_logits(build, updates_of(adapter, 0.5), adapter.heads))


def last(adapter, change):
    """The last module changed, so that the others would be copied before it is looked at."""
    name, module = list(adapter.modules.items())[-1]
    return Adapter({**adapter.modules, name: change(*module.factors)}, adapter.heads)


# The change to an adapter that fits, and what the refusal names.
UNFIT = [
    (lambda a: Adapter(dict(list(a.modules.items())[1:]), a.heads), "modules.*layer.0"),
    (lambda a: Adapter({**a.modules, "bert.extra": next(iter(a.modules.values()))}, a.heads), "modules.*bert.extra"),
    (lambda a: Adapter(a.modules, {**a.heads, "odd": torch.zeros(1)}), "heads.*odd"),
    (lambda a: last(a, lambda B, A: LoRA(B[:, :3], A[:3])), r"layer.1.*\(32, 4\).*\(32, 3\)"),
    (lambda a: Adapter(a.modules, {n: h[:1] for n, h in a.heads.items()}), r"classifier.*\(3,.*\(1,"),
]


class TestRefusedLoads:
    def test_the_model_stays_as_it_was(self):
        _, model, _ = readable("heads")
        adapter, _ = read_model(model)
        before = snapshot(model)
        for change, message in UNFIT:
            with pytest.raises(AdapterFormatError, match=message):
                load_into_model(model, change(adapter.map(torch.zeros_like)))
            assert unchanged(model, before)
