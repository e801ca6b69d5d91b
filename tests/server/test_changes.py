"""The Gram matrix of the clients' changes, against dense float64 matrices. Kind: oracle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Upload
from fedlora.analysis.audit import random_gauge
from fedlora.server import changes
from fedlora.server.changes import gram_of_changes
from fedlora.testing.federations import noise

HEADS = {"head": noise((3, 4), "head")}
NONE: dict[str, Tensor] = {}
RANKS = (1, 2, 4, 4, 6)
SHAPES = {"q": (20, 14), "v": (9, 30)}


def pair(shape: tuple[int, int], r: int, *seed: str | int, dtype: torch.dtype = torch.float64) -> LoRA:
    return LoRA(noise((shape[0], r), *seed, "B", dtype=dtype), noise((r, shape[1]), *seed, "A", dtype=dtype))


def upload(k: int, adapter: Adapter) -> Upload:
    return Upload(Client(f"c{k}", adapter.ranks), 1, adapter)


def dense(sent: Sequence[Upload], begun: Sequence[Adapter], heads: dict[str, Tensor]) -> Tensor:
    """The oracle: X as one row a client; a module that it lacks is zero."""
    rows = []
    for u, old in zip(sent, begun, strict=True):
        row = [(u.adapter.heads[name].double() - head).flatten() for name, head in heads.items()]
        for m, shape in SHAPES.items():
            X = torch.zeros(shape, dtype=torch.float64)
            if m in u.adapter.modules:
                new, was = (x.modules[m].map(Tensor.double) for x in (u.adapter, old))
                X = LoRA(new.B if new.B is not None else was.B, new.A if new.A is not None else was.A).delta()
                X = X - was.delta()
            row.append(X.flatten())
        rows.append(torch.cat(row))
    X = torch.stack(rows)
    return X @ X.mT


def expect(got: Tensor, want: Tensor, rel: float) -> None:
    """Relative to ||X_i|| ||X_j||."""
    size = want.diagonal().sqrt()
    assert float(((got - want).abs() / (size[:, None] * size)).max()) < rel
    assert torch.equal(got, got.mT)


def a_federation(dtype: torch.dtype) -> tuple[list[Upload], list[Adapter]]:
    """Five clients of mixed ranks; the third lacks v; readouts share slots, one has a dead slot and one column
    beside another row, one has a slot twice."""
    common = {m: pair(shape, 6, "common", m, dtype=dtype) for m, shape in SHAPES.items()}
    sent, begun = [], []
    for k, r in enumerate(RANKS):
        held = [m for m in SHAPES if (m, k) != ("v", 2)]
        old = {m: common[m].first(r).map(Tensor.clone) for m in held}
        if k == 3:
            old["q"].B[:, 3] = 0  # type: ignore[index]
            old["q"].A[2] *= 2  # type: ignore[index]
        if k == 4:
            old["q"].B[:, 1], old["q"].A[1] = old["q"].B[:, 0], old["q"].A[0]  # type: ignore[index]
        new = {m: pair(SHAPES[m], r, "new", m, k, dtype=dtype) for m in held}
        sent.append(upload(k, Adapter(new, {"head": noise((3, 4), "head", k)})))
        begun.append(Adapter(old, HEADS))
    return sent, begun


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strip", [256, 7])
def test_it_is_that_of_dense_changes(dtype: torch.dtype, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the columns that are multiplied at once."""
    monkeypatch.setattr(changes, "_STRIP", strip)
    sent, begun = a_federation(dtype)
    expect(gram_of_changes(sent, begun, HEADS), dense(sent, begun, HEADS), 1e-12)


def test_small_changes_in_bad_coordinates_are_measured() -> None:
    """Changes of 1e-3 in coordinates of condition 1e6, where sums over the factors' columns keep no digit: the terms'
    squares are 1e18 times that of the change."""
    begun = [Adapter({m: pair(shape, 4, "begun", m) for m, shape in SHAPES.items()})] * 5
    sent = []
    for k in range(5):
        modules = {}
        for m, old in begun[k].modules.items():
            B, A = old.factors
            Q = random_gauge(4, 1e6, k)
            modules[m] = LoRA((B + 1e-3 * noise(tuple(B.shape), "dB", m, k)) @ Q, torch.linalg.solve(Q, A))
        sent.append(upload(k, Adapter(modules)))
    plain = [upload(k, Adapter({m: LoRA(begun[k].modules[m].factors[0] + 1e-3 * noise((s[0], 4), "dB", m, k),
                                        begun[k].modules[m].factors[1]) for m, s in SHAPES.items()}))
             for k in range(5)]  # fmt: skip
    want = dense(plain, begun, NONE)
    expect(gram_of_changes(plain, begun, NONE), want, 1e-9)
    expect(gram_of_changes(sent, begun, NONE), want, 1e-6)  # rounding in their own coordinates: 1e-16 x 1e6 x 1e3
    L = torch.cat([sent[0].adapter.modules["q"].factors[0], begun[0].modules["q"].factors[0]], 1)
    R = torch.cat([sent[0].adapter.modules["q"].factors[1], -begun[0].modules["q"].factors[1]], 0)
    q = float((sent[0].adapter.modules["q"].delta() - begun[0].modules["q"].delta()).square().sum())
    assert abs(float(((L.mT @ L) * (R @ R.mT)).sum()) / q - 1) > 0.1, "the sums that do not work"


@pytest.mark.parametrize("factor", ["B", "A"])
def test_if_one_factor_travels_the_other_is_the_one_that_was_sent(factor: str) -> None:
    sent, begun = a_federation(torch.float64)
    one = [
        upload(k, Adapter({m: LoRA(**{"B": None, "A": None, factor: lora.tensors()[factor]})
                           for m, lora in u.adapter.modules.items()}))
        for k, u in enumerate(sent)
    ]  # fmt: skip
    expect(gram_of_changes(one, begun, NONE), dense(one, begun, NONE), 1e-12)
    # If it stays at the clients, only the other one's entries can be compared: slot by slot, as zero-padded.
    left = [Adapter({m: LoRA(**{"B": None, "A": None, factor: lora.tensors()[factor]})
                     for m, lora in old.modules.items()}) for old in begun]  # fmt: skip
    rows = torch.zeros(5, 2, 6 * 30, dtype=torch.float64)
    for k, (u, old) in enumerate(zip(one, left, strict=True)):
        for m, lora in u.adapter.modules.items():
            moved = lora.tensors()[factor] - old.modules[m].tensors()[factor]
            slots = moved.mT if factor == "B" else moved
            rows[k, list(SHAPES).index(m), : slots.numel()] = slots.flatten()
    X = rows.flatten(1)
    expect(gram_of_changes(one, left, NONE), X @ X.mT, 1e-12)
