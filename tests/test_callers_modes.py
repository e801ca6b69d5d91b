"""The server's arithmetic does not depend on the torch modes of whoever calls it. Kind: contract.

Expected: the bits of the same calls with no mode on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlora import METHODS, Adapter, AdapterSpec, Client, Kept, LoRA, Server, build, read_adapter, write_adapter
from fedlora.adapters import merge
from fedlora.adapters.io import load_into_model
from fedlora.server.rules import GeometricMedian
from fedlora.testing.federations import rounds
from support.states import content

RANKS = dict.fromkeys("abcd", 3)
WHO = [tuple(RANKS)] * 3


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "float64": float64_by_default,
}
modes = pytest.mark.parametrize("mode", MODES)


def played(server: Server) -> Any:
    """All that is seen of each state of three rounds, float32 uploads, training outside of it."""
    seen = []
    for one in rounds(server, RANKS, WHO, torch.float32):
        updates = server.global_update(one.after) if server.has_global_model(one.after) else {}
        seen.append((one.after, [server.download(one.after, Client(c, 3)) for c in RANKS], updates))
    return content(seen)


@pytest.mark.quick(7)
@modes
@pytest.mark.parametrize("method", [*METHODS, "glora, a rule"])
def test_a_server_gives_the_same_bits(method: str, mode: str) -> None:
    name, _, rule = method.partition(", ")
    server = Server(build(name), round=Kept(GeometricMedian() if rule else None))
    want = played(server)
    with MODES[mode]():
        assert played(server) == want


def test_what_was_made_in_inference_mode_can_be_trained() -> None:
    server = Server(build("glora"))
    with torch.inference_mode():
        *_, last = rounds(server, RANKS, WHO, torch.float32)
        lora = server.download(last.after, Client("a", 3)).adapter.modules["attn.q"]
    A = nn.Parameter(lora.factors[1])
    (lora.factors[0] @ A).sum().backward()
    assert A.grad is not None


@modes
def test_merging_and_a_moved_base(mode: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    g = torch.Generator().manual_seed(0)
    pairs = [LoRA(torch.randn(16, 4, generator=g), torch.randn(4, 12, generator=g)) for _ in range(2)]
    for name, lora in zip("ab", pairs, strict=True):
        write_adapter(
            tmp_path / name, Adapter({"q": lora}), AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]})
        )

    def all_of(name: str) -> Any:
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / name)
        network = nn.Sequential()
        network.add_module("q", nn.Linear(12, 16, dtype=torch.float32))
        nn.init.zeros_(network.get_parameter("q.weight"))
        model: Any = get_peft_model(network, LoraConfig(r=4, target_modules=["q"]))  # type: ignore[arg-type]
        load_into_model(model, Adapter({"q": pairs[0]}, base={"q": pairs[1]}))
        moved = model.get_submodule("base_model.model.q").base_layer.weight.detach()
        return read_adapter(tmp_path / name)[0], moved

    want = content(all_of("want"))
    with MODES[mode]():
        assert content(all_of("got")) == want
