"""Peft's own adapters of tiny models, by name, and comparisons of what is read and written with what peft computes."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import safetensors.torch
import torch
from peft import LoraConfig, PeftModel

from fedlora.adapters.reader import WEIGHTS_FILE
from fedlora.core.lora import Adapter, LoRA
from support.peft_models import dense_logits, trained
from support.tiny_models import bert_of_two_layers, distilbert, gpt2, llama, logits


def lora(**fields):
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**copy.deepcopy(defaults | fields))  # peft appends to modules_to_save in place


def loaded(build, directory):
    return PeftModel.from_pretrained(build(), directory)


def stored(directory):
    return safetensors.torch.load((directory / WEIGHTS_FILE).read_bytes())  # not mapped: tests write over it


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


CAUSAL, SEQ = {"task_type": "CAUSAL_LM"}, {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
# name -> (base model, fields of LoraConfig, the scaling that all its modules share or None)
READABLE = {
    "list": (llama, CAUSAL, 2.0),
    "looking ahead, as Unsloth": (llama, {"target_modules": r"^(?!.*mlp).*(?:q|v)_proj(?=$)"}, 2.0),
    "all-linear": (llama, CAUSAL | {"target_modules": "all-linear"}, 2.0),
    "rsLoRA": (llama, CAUSAL | {"use_rslora": True, "r": 6}, 8 / math.sqrt(6)),
    "Conv1D": (gpt2, CAUSAL | {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}, 2.0),
    "heads": (bert_of_two_layers, SEQ, 2.0),
    "heads of several tensors": (bert_of_two_layers, SEQ | {"modules_to_save": ["pooler"]}, 2.0),
    # peft saves every module whose path ends with a name of modules_to_save: pre_classifier, for classifier.
    "heads by ending": (distilbert, SEQ | {"target_modules": ["q_lin", "v_lin"]}, 2.0),
    "an output saved whole": (llama, CAUSAL | {"modules_to_save": ["lm_head"]}, 2.0),
    "ranks by suffix": (llama, CAUSAL | {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 4}}, 2.0),
    "alphas by suffix": (llama, CAUSAL | {"alpha_pattern": {"self_attn.q_proj": 3, "v_proj": 0.5}}, None),
    "whole names": (
        llama,
        CAUSAL | {"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 3.5, r"v_proj$": 5}},
        None,
    ),
    "rsLoRA with patterns": (
        bert_of_two_layers,
        SEQ | {"use_rslora": True, "rank_pattern": {"query": 9}, "alpha_pattern": {"1.attention.self.value": 5}},
        None,
    ),
}
COMMON = [name for name, (_, _, scaling) in READABLE.items() if scaling is not None]


def readable(name):
    build, fields, scaling = READABLE[name]
    return build, trained(build, lora(**fields)), scaling


@functools.cache
def kept(name):
    """`readable(name)`, made once, for tests that only look."""
    return readable(name)
