"""A method that gives the mean update gives it in every gauge, or says that rounding may have made it. Kind: oracle."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.client import receive

SHAPE, RANK = (12, 9), 3
Pair = tuple[Tensor, Tensor]


def drawn(dtype: torch.dtype = torch.float64) -> list[Pair]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return [(draw(SHAPE[0], RANK), draw(RANK, SHAPE[1])) for _ in range(3)]


def wide(X: Tensor) -> NDArray[np.object_]:
    """Whole numbers, in units of 2^-200: products and sums of the floats here are exact."""
    return np.array([[int(x * 2.0**200) for x in row] for row in X.double().tolist()], dtype=object)


def mean(pairs: list[Pair]) -> NDArray[np.object_]:
    """len(pairs) times the mean, exact."""
    total: NDArray[np.object_] = sum((wide(B) @ wide(A) for B, A in pairs), np.zeros(SHAPE, dtype=object))
    return total


def round_of(name: str, pairs: list[Pair]) -> tuple[Server, ServerState]:
    server, dtype = Server(build(name)), pairs[0][0].dtype
    seed = LoRA(torch.zeros(SHAPE[0], RANK, dtype=dtype), torch.ones(RANK, SHAPE[1], dtype=dtype))
    uploads = [Upload(Client(f"c{k}", RANK), 1, Adapter({"m": LoRA(B, A)})) for k, (B, A) in enumerate(pairs)]
    return server, server.aggregate(server.init(Adapter({"m": seed})), uploads)


def size(X: NDArray[np.object_]) -> float:
    return float(sum(int(x) ** 2 for x in X.ravel())) ** 0.5


def off(lora: LoRA, pairs: list[Pair]) -> float:
    """||update - mean|| / ||mean||."""
    want, (B, A) = mean(pairs), lora.factors
    got = wide(B) @ wide(A) * len(pairs) if lora.rank else want * 0
    return size(got - want) / size(want)


def update(name: str, pairs: list[Pair]) -> LoRA:
    server, state = round_of(name, pairs)
    return server.global_update(state)["m"]


EXACT = ["fedex-lora", "flexlora", "flora", "glora"]


def test_these_are_the_exact_ones_with_a_gauge_to_change() -> None:
    both = [name for name in METHODS if build(name).roles(0).both_shared and name not in ("glora-paper", "raflora")]
    assert [name for name in both if off(update(name, drawn()), drawn()) < 1e-13] == EXACT


@pytest.mark.parametrize("name", EXACT)
def test_the_mean_is_whole_in_every_diagonal_gauge(name: str) -> None:
    """(B c, A / c) with c = 2^k is the same update to the bit: 2^33 is 1e10. FedEx-LoRA must cancel what c makes of the
    averaged pair, and W0's change is kept to 1e-12 of its size."""
    (B, A), *others = drawn()
    for k in (6, 20, 33):
        for c in (2.0**k, 2.0**-k):
            limit = 1e-12 if name != "fedex-lora" else 1e-12 * 2.0**k
            assert off(update(name, [(B * c, A / c), *others]), drawn()) < limit, c


@pytest.mark.parametrize("name", EXACT)
def test_two_clients_in_opposite_gauges_harm_nobody(name: str) -> None:
    """diag(c, 1 / c, c) and its inverse, c = 2^k: every factor is as large as the others, and only the updates' own
    norms show that the mean factors' product is c^2 times too large. What a client trains on, W0's change and its own
    pair (of full rank where the method cuts it), is the mean up to float32's rounding too; FedEx-LoRA's own pair is
    c^2 times too large, and so is its rounding."""
    (B, A), (C, D), *others = drawn(torch.float32)
    for k in (4, 10):
        q = 2.0 ** torch.tensor([k, -k, k])
        server, state = round_of(name, [(B * q, A / q[:, None]), (C / q, D * q[:, None]), *others])
        mine = receive(server.download(state, Client("c0", RANK if name == "fedex-lora" else SHAPE[1])), None)
        assert off(server.global_update(state)["m"], drawn(torch.float32)) < 1e-6, k
        whole = mine.folded().modules["m"].map(Tensor.double)
        assert off(whole, drawn(torch.float32)) < (1e-6 if name != "fedex-lora" else 1e-6 * 4.0**k), k


@pytest.mark.parametrize("apart", [1e-6, 1e-12, 1e-14])
@pytest.mark.parametrize("name", EXACT)
def test_a_mean_that_nearly_cancels_is_right_and_told_where_it_may_be_rounding(
    name: str, apart: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Two clients of opposite updates, `apart` of their size from each other. Off by u / apart at most; from where that
    is a thousandth of the mean's norm, a server that keeps a spectrum says that all of the mean may be rounding."""
    (B, A), (C, D), _ = drawn()
    pairs = [(B, A), (-(B + apart * C), A + apart * D)]
    with caplog.at_level(logging.WARNING, "fedlora.server"):
        server, state = round_of(name, pairs)
    assert off(server.global_update(state)["m"], pairs) < 10 * 2.0**-53 / apart
    if name in ("flexlora", "glora"):
        share = server.diagnostics(state)["m"]["rounding"]
        warned = [r.message for r in caplog.records if "storing these" in r.message]
        assert (share, len(warned)) == ((1.0, 1) if apart <= 1e-12 else (0.0, 0))
