"""How far a server's result is from what it should be: exactness against the true mean, drift under a change of gauge.

Everything is measured on factor pairs: ||X - Y||_F of two updates is the norm of one stacked pair, never a dense one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedlora.client import Upload
from fedlora.lora import Adapter, LoRA, stack
from fedlora.methods.padded_average import PaddedAverage
from fedlora.seeds import derive_seed
from fedlora.server import Server, ServerState


def relative_difference(got: Mapping[str, LoRA], want: Mapping[str, LoRA]) -> float:
    """||got - want||_F / ||want||_F over all modules together; inf where want is zero and got is not."""
    gap = math.fsum(stack([got[m], want[m]], [1.0, -1.0]).norm() ** 2 for m in want)
    size = math.fsum(want[m].norm() ** 2 for m in want)
    return math.sqrt(gap / size) if size else (math.inf if gap else 0.0)


def mean_update(uploads: Sequence[Upload], weights: Mapping[str, float]) -> dict[str, LoRA]:
    """Module -> sum_i p_i B_i A_i as one stacked pair, p_i normalised over those who hold the module."""
    counted = [u for u in uploads if u.client.id in weights]
    means = {}
    for name in sorted({name for u in counted for name in u.adapter.modules}):
        held = [u for u in counted if name in u.adapter.modules]
        total = math.fsum(weights[u.client.id] for u in held)
        means[name] = stack([u.adapter.modules[name] for u in held], [weights[u.client.id] / total for u in held])
    return means


def padded_average_error(state: ServerState, uploads: Sequence[Upload], weights: Mapping[str, float]) -> float:
    """The relative error that zero-padded factor averaging would have made on these uploads, against the true mean."""
    server = Server(PaddedAverage(), heads="frozen")
    accepted = [
        replace(u, num_examples=weights[u.client.id], adapter=Adapter(u.adapter.modules))
        for u in uploads
        if u.client.id in weights
    ]
    averaged = server.aggregate(server.init(Adapter(state.start.modules)), accepted)
    return relative_difference(server.global_update(averaged), mean_update(accepted, weights))


def random_gauge(rank: int, condition: float, *seed: str | int) -> Tensor:
    """An invertible Q (rank, rank), float64, of that 2-norm condition: orthogonal x geometric x orthogonal."""
    generator = torch.Generator().manual_seed(derive_seed("gauge", *seed))
    left, right = (
        torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q for _ in range(2)
    )
    sizes = torch.logspace(0.5, -0.5, rank, base=condition, dtype=torch.float64)
    Q: Tensor = left * sizes @ right
    return Q


def regauge(upload: Upload, condition: float, *, seed: int = 0) -> Upload:
    """The same update in random coordinates: each (B, A) as (B Q, Q^-1 A), in float64 so that storing costs nothing."""

    def move(name: str, lora: LoRA) -> LoRA:
        B, A = (t.double() for t in lora.factors)
        Q = random_gauge(lora.rank, condition, seed, upload.client.id, name)
        return LoRA(B @ Q, torch.linalg.solve(Q, A))

    modules = {name: move(name, lora) for name, lora in upload.adapter.modules.items()}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def gauge_drift(server: Server, state: ServerState, uploads: Sequence[Upload], *, condition: float = 10.0) -> float:
    """How far, relatively, the server's model moves when clients re-express their updates in random coordinates."""
    plain = server.aggregate(state, [replace(u, adapter=u.adapter.map(lambda t: t.double())) for u in uploads])
    moved = server.aggregate(state, [regauge(u, condition) for u in uploads])
    return relative_difference(server.global_update(moved), server.global_update(plain))
