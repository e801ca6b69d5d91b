"""Attacks on coordinates and subspaces rather than values: inserted directions, and another gauge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Upload
from fedlora.core.sent import Sent
from fedlora.linalg import svd_of_product
from fedlora.seeds import derive_seed


def regauged(upload: Upload, condition: float, *seed: str | int) -> Upload:
    """The same update as (B Q, Q^-1 A) with Q = O D: O orthogonal, D powers of two from sqrt(condition) to 1 / sqrt.

    Powers of two are exact and O rounds like any product, so the update stays the same up to its dtype's roundoff,
    whatever the condition. A rank of 1 is scaled by the largest entry of D.
    """

    def move(name: str, lora: LoRA) -> LoRA:
        B, A = (t.detach().double() for t in lora.factors)
        generator = torch.Generator().manual_seed(derive_seed("attack-gauge", *seed, upload.client.id, name))
        O = torch.linalg.qr(torch.randn(lora.rank, lora.rank, generator=generator, dtype=torch.float64)).Q
        half = math.log2(condition) / 2
        D = torch.exp2(torch.linspace(half, -half, lora.rank, dtype=torch.float64).round())
        moved = (B @ O * D, (O.mT @ A) / D[:, None])
        return LoRA(*(t.to(s) for t, s in zip(moved, lora.factors, strict=True)))

    modules = {name: move(name, lora) for name, lora in upload.adapter.modules.items()}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def new_directions(sent: Sequence[Sent], module: str, count: int, *seed: str | int) -> Tensor:
    """(d_out, <= count) orthonormal columns, orthogonal to every update and readout; none if these fill the space.

    They are the same for all inserting clients, so that these vote together.
    """
    spans = [adapter.modules[module].factors[0].detach().double()
             for s in sent for adapter in (s.upload.adapter, s.begun) if module in adapter.modules]  # fmt: skip
    U, s, _ = torch.linalg.svd(torch.cat(spans, dim=1), full_matrices=False)
    taken = U[:, s > 1e-10 * s.amax()] if len(s) and float(s.amax()) > 0 else U[:, :0]
    generator = torch.Generator().manual_seed(derive_seed("attack-directions", *seed, module))
    random = torch.randn(len(U), min(count, len(U) - taken.shape[1]), generator=generator, dtype=torch.float64)
    for _ in range(2):  # twice, to remove what rounding left
        random = random - taken @ (taken.mT @ random)
    return torch.linalg.qr(random).Q if random.shape[1] else random


def inserted(sent: Sent, module: str, columns: Tensor, size: float, *seed: str | int) -> LoRA:
    """The readout with its weakest slots replaced by new directions, changed by `size` in total, as far as possible.

    Empty slots are used first. Of the others we give up those whose squares make up half of size^2, and at least one if
    none is empty, so the change can be larger than requested. The new directions share the other half.
    """
    B, A = sent.begun.modules[module].factors
    rank = sent.upload.client.ranks({module: None})[module]
    old = svd_of_product(B.detach().double(), A.detach().double(), tolerance=0.0).head(rank)
    tails = old.s.square().flip(0).cumsum(0)  # cost of giving up the weakest, the two weakest, ...
    given = int((tails <= size * size / 2).sum())
    free = rank - len(old.s) + given
    if free == 0:
        given = free = 1
    free = min(free, columns.shape[1])  # there may be fewer new directions than room
    given = max(0, min(given, free - (rank - len(old.s))))
    kept = old.head(len(old.s) - given)
    generator = torch.Generator().manual_seed(derive_seed("attack-rows", *seed, module))
    rows = torch.linalg.qr(torch.randn(A.shape[1], free, generator=generator, dtype=torch.float64)).Q.mT
    root = math.sqrt(size / math.sqrt(2 * max(1, free)))
    left, right = kept.balanced
    made = LoRA(torch.cat([left, columns[:, :free] * root], dim=1), torch.cat([right, rows * root]))
    empty = rank - made.rank
    return LoRA(pad(made.factors[0], (0, empty)), pad(made.factors[1], (0, 0, 0, empty)))


def with_insertion(sent: Sent, known: Sequence[Sent], sizes: Mapping[str, Sequence[float]], strength: float,
                   *seed: str | int) -> Upload:  # fmt: skip
    """The client's upload with new directions in every module and its readout's heads.

    known: all of the round's, including the liars. sizes: module -> the sizes of its honest changes; `strength` times
    their median is the target size of that module's change.
    """
    modules = {}
    for name, lora in sent.upload.adapter.modules.items():
        largest = max(s.upload.client.ranks({name: None}).get(name, 0) for s in known)
        columns = new_directions(known, name, largest, *seed)
        size = strength * median(sizes[name]) if sizes.get(name) else 0.0
        made = inserted(sent, name, columns, size, *seed)
        modules[name] = LoRA(*(t.to(s) for t, s in zip(made.factors, lora.factors, strict=True)))
    heads = {name: sent.begun.heads[name].to(head.dtype) for name, head in sent.upload.adapter.heads.items()}
    return replace(sent.upload, adapter=Adapter(modules, heads))
