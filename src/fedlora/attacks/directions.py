"""Attacks on coordinates and subspaces rather than values: inserted directions, and another gauge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.attacks.changes import balanced, svd
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Upload
from fedlora.core.sent import Sent
from fedlora.seeds import derive_seed


def regauged(upload: Upload, condition: float, *seed: str | int) -> Upload:
    """The same update as (B Q, Q^-1 A) with Q = O D: O orthogonal, D powers of two from sqrt(condition) to 1 / sqrt.

    Powers of two are exact and O rounds like any product, so the update stays the same up to its dtype's roundoff,
    whatever the condition. A rank of 1 is scaled by the largest entry of D.
    """
    modules = {}
    for name, lora in upload.adapter.modules.items():
        B, A = (t.detach().double() for t in lora.factors)
        generator = torch.Generator().manual_seed(derive_seed("attack-gauge", *seed, upload.client.id, name))
        O = torch.linalg.qr(torch.randn(lora.rank, lora.rank, generator=generator, dtype=torch.float64)).Q
        half = math.log2(condition) / 2
        D = torch.exp2(torch.linspace(half, -half, lora.rank, dtype=torch.float64).round())
        modules[name] = _as_sent(LoRA(B @ O * D, (O.mT @ A) / D[:, None]), lora)
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def with_insertion(
    sent: Sent, known: Sequence[Sent], sizes: Mapping[str, Sequence[float]], strength: float, *seed: str | int
) -> Upload:
    """The client's upload with new directions in every module and its readout's heads.

    known: all of the round's, including the byzantine clients. sizes: module -> the sizes of its honest changes;
    `strength` times their median is the target size of that module's change.
    """
    modules = {}
    for name, lora in sent.upload.adapter.modules.items():
        largest = max(s.upload.client.ranks({name: None}).get(name, 0) for s in known)
        columns = _new_directions(known, name, largest, *seed)
        size = strength * median(sizes[name]) if sizes.get(name) else 0.0
        modules[name] = _as_sent(_inserted(sent.begun.modules[name], lora.rank, columns, size, *seed, name), lora)
    heads = {name: sent.begun.heads[name].to(head.dtype) for name, head in sent.upload.adapter.heads.items()}
    return replace(sent.upload, adapter=Adapter(modules, heads))


def _new_directions(sent: Sequence[Sent], module: str, count: int, *seed: str | int) -> Tensor:
    """(d_out, <= count) orthonormal columns, orthogonal to every update and readout; none if these fill the space.

    They are the same for all inserting clients, so that these vote together.
    """
    held = [a.modules[module] for s in sent for a in (s.upload.adapter, s.begun) if module in a.modules]
    U, s, _ = torch.linalg.svd(torch.cat([x.factors[0].detach().double() for x in held], dim=1), full_matrices=False)
    taken = U[:, s > 1e-10 * s[:1]]
    generator = torch.Generator().manual_seed(derive_seed("attack-directions", *seed, module))
    random = torch.randn(len(U), min(count, len(U) - taken.shape[1]), generator=generator, dtype=torch.float64)
    for _ in range(2):  # twice, to remove what rounding left
        random = random - taken @ (taken.mT @ random)
    Q: Tensor = torch.linalg.qr(random).Q
    return Q


def _inserted(begun: LoRA, rank: int, columns: Tensor, size: float, *seed: str | int) -> LoRA:
    """The readout with its weakest slots replaced by new directions, changed by `size` in total, as far as possible.

    Empty slots are used first. Of the others we give up those whose squares make up half of size^2, and at least one if
    none is empty, so the change can be larger than requested. The new directions share the other half.
    """
    U, s, Vh = svd(begun.map(Tensor.double))
    held = min(rank, int((s > 1e-13 * s[:1]).sum()))
    tails = s[:held].square().flip(0).cumsum(0)  # cost of giving up the weakest, the two weakest, ...
    given = int((tails <= size * size / 2).sum())
    if held - given == rank:
        given = 1
    free = min(rank - held + given, columns.shape[1])  # there may be fewer new directions than room
    kept = held - max(0, min(given, free - (rank - held)))
    old = balanced(U, s[:kept], Vh, kept)
    generator = torch.Generator().manual_seed(derive_seed("attack-rows", *seed))
    rows = torch.linalg.qr(torch.randn(begun.factors[1].shape[1], free, generator=generator, dtype=torch.float64)).Q.mT
    root = math.sqrt(size / math.sqrt(2 * max(1, free)))
    B, A = torch.cat([old.factors[0], columns[:, :free] * root], dim=1), torch.cat([old.factors[1], rows * root])
    return LoRA(pad(B, (0, rank - B.shape[1])), pad(A, (0, 0, 0, rank - len(A))))


def _as_sent(made: LoRA, like: LoRA) -> LoRA:
    """In the dtypes of the upload that it replaces."""
    return LoRA(*(t.to(s.dtype) for t, s in zip(made.factors, like.factors, strict=True)))
