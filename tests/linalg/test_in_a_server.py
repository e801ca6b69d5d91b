"""What the numerics promise of a whole server. Kinds: structural; and what reviews found once."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.analysis.audit import padded_average_error
from support.federations import noise


class _Largest(TorchDispatchMode):
    """Remembers the largest result of any torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def aggregated(pairs: dict[str, LoRA], **hparams: object) -> tuple[Server, ServerState, list[Upload]]:
    """A round of GLoRA on one module."""
    server = Server(build("glora", **hparams))
    sent = [Upload(Client(c, lora.rank), 1, Adapter({"m": lora})) for c, lora in pairs.items()]
    widest = max(pairs.values(), key=lambda lora: lora.rank)
    seed = LoRA(torch.zeros_like(widest.factors[0]), torch.ones_like(widest.factors[1]))
    return server, server.aggregate(server.init(Adapter({"m": seed})), sent), sent


@pytest.mark.parametrize("name", ["glora", "flexlora", "fedex-lora", "fedit", "padded-average"])
def test_no_matrix_of_the_size_of_the_weight_is_ever_formed(name: str) -> None:
    """While sum r_i < min(d_out, d_in): init, aggregate, download, global update, diagnostics, every torch result."""
    for dtype in (torch.float32, torch.float64):
        d_out, d_in, r = 300, 260, 4
        seed = Adapter({"m": LoRA(torch.zeros(d_out, r, dtype=dtype), noise((r, d_in), "seed").to(dtype))})
        pairs = {c: LoRA(noise((d_out, r), c, "B"), noise((r, d_in), c, "A")).map(lambda t: t.to(dtype)) for c in "abc"}  # noqa: B023
        sent = [Upload(Client(c, r), 1, Adapter({"m": lora})) for c, lora in pairs.items()]
        server = Server(build(name))
        with _Largest() as largest:
            state = server.aggregate(server.init(seed), sent)
            server.download(state, Client("a", r))
            server.global_update(state)
            server.diagnostics(state)
            padded_average_error(state, sent, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
        assert largest.numel < d_out * d_in / 4
        with _Largest() as largest:  # the watch works
            server.global_update(state)["m"].delta()
        assert largest.numel == d_out * d_in


@pytest.mark.parametrize("shape", [(96, 80), (32, 32), (24, 200), (200, 24)], ids=str)
def test_a_state_is_made_of_plain_tensors(shape: tuple[int, int]) -> None:
    """Row after row in memory, also those of one column: what is stored and sent is their bytes."""
    for ranks, rho in product([(1,), (1, 1, 1), (1, 4), (8, 8, 8, 8)], (1.0, 0.5, 0.1)):
        pairs = {
            f"c{k}": LoRA(noise((shape[0], r), k, "B").float(), noise((r, shape[1]), k, "A").float())
            for k, r in enumerate(ranks)
        }
        _, whole, _ = aggregated(pairs, rho=rho)
        state = whole.modules["m"]
        traces = [t for trace in state.history.values() for t in (trace.basis, trace.alignment)]
        for t in (state.spectrum.B, state.spectrum.s, state.spectrum.A, *traces):
            assert t.is_contiguous() and t.stride(-1) == 1
