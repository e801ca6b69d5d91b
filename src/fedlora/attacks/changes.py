"""What a client's round adds to its readout, part by part, and the algebra of such changes. All in float64.

If both factors travel, a module's part is a `LoRA` whose product is the change B A - B_0 A_0: coordinates play no role.
If one travels, it is that factor's entries, (d, slots): slot k of one client is slot k of another, and a client of
smaller rank has zeros in the later ones, as in zero-padded averages. A head's part is its entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import Adapter, LoRA, change_of, stack
from fedlora.core.messages import Upload
from fedlora.core.sent import Sent
from fedlora.seeds import derive_seed

Key = tuple[str, str]  # ("module", name) for a LoRA; ("B", name), ("A", name) or ("head", name) for entries
Part = LoRA | Tensor
Change = Mapping[Key, Part]


def change(sent: Sent) -> dict[Key, Part]:
    """What the client's training added."""
    parts: dict[Key, Part] = {}
    for name, lora in sent.upload.adapter.modules.items():
        begun = sent.begun.modules[name]
        if sent.roles.both_shared:
            parts["module", name] = change_of(lora, begun)
        else:
            for factor, tensor in lora.tensors().items():
                parts[factor, name] = _by_slots(factor, tensor) - _by_slots(factor, begun.tensors()[factor])
    for name, head in sent.upload.adapter.heads.items():
        parts["head", name] = head.detach().double() - sent.begun.heads[name].double()
    return parts


def combined(parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """sum_k w_k part_k."""
    if isinstance(parts[0], LoRA):
        return stack(list(parts), list(weights))
    return torch.stack([w * part for w, part in zip(weights, _padded(parts), strict=True)]).sum(0)


def mean(parts: Sequence[Any]) -> Any:
    return combined(parts, [1 / len(parts)] * len(parts))


def deviation(parts: Sequence[Any]) -> Any:
    """The entrywise (population) standard deviation: dense, for entries of a weight's change have no factors."""
    if isinstance(parts[0], LoRA):
        dense = deviation([part.delta() for part in parts])
        return LoRA(dense, torch.eye(dense.shape[1], dtype=dense.dtype))
    return torch.stack(_padded(parts)).std(0, correction=0)


def size(part: Part) -> float:
    """The Frobenius norm."""
    return part.norm() if isinstance(part, LoRA) else float(torch.linalg.vector_norm(part))


def norm(one: Change) -> float:
    """||change||_F over all parts."""
    return math.hypot(*map(size, one.values()))


def over(changes: Sequence[Change], made: Callable[[Sequence[Any]], Any]) -> dict[Key, Any]:
    """`made` of each part, over the changes that have it."""
    keys = dict.fromkeys(key for one in changes for key in one)
    return {key: made([one[key] for one in changes if key in one]) for key in keys}


def noise(sent: Sent, *seed: str | int) -> dict[Key, Part]:
    """A random change that fits the client's rank (of a module dB A_0); its sizes mean nothing."""
    parts: dict[Key, Part] = {}
    for key, part in change(sent).items():
        if isinstance(part, LoRA):
            B, A = sent.begun.modules[key[1]].factors
            parts[key] = LoRA(_normal(B.shape, *seed, key[1]), A.double())
        else:
            parts[key] = _normal(part.shape, *seed, *key)
    return parts


def upload(sent: Sent, wanted: Mapping[Key, Any]) -> tuple[Upload, float]:
    """(readout + change as this client's upload, with its rank, shapes and dtypes; ||what did not fit|| / ||change||).

    A product of larger rank is cut to the best approximation (Eckart and Young 1936), with balanced factors.
    """
    modules, left, whole = {}, [], norm(wanted)
    for name, lora in sent.upload.adapter.modules.items():
        begun, made = sent.begun.modules[name], {}
        if sent.roles.both_shared:
            U, s, Vh = svd(stack([begun.map(Tensor.double), wanted["module", name]], [1.0, 1.0]))
            made["B"], made["A"] = balanced(U, s, Vh, lora.rank).factors
            left.append(size(s[lora.rank :]))
        for factor in lora.tensors().keys() - made.keys():
            entries = combined([_by_slots(factor, begun.tensors()[factor]), wanted[factor, name]], [1.0, 1.0])
            made[factor] = entries[:, : lora.rank] if factor == "B" else entries[:, : lora.rank].mT.contiguous()
            left.append(size(entries[:, lora.rank :]))
        modules[name] = LoRA(*(None if t is None else made[f].to(t.dtype) for f, t in (("B", lora.B), ("A", lora.A))))
    heads = {
        name: (sent.begun.heads[name].double() + wanted["head", name]).to(head.dtype)
        for name, head in sent.upload.adapter.heads.items()
    }
    return replace(sent.upload, adapter=Adapter(modules, heads)), math.hypot(*left) / whole if whole else 0.0


def svd(lora: LoRA) -> tuple[Tensor, Tensor, Tensor]:
    """(U, s, Vh) of B A, from two QRs and a small SVD."""
    Q, T = torch.linalg.qr(lora.factors[0])
    P, W = torch.linalg.qr(lora.factors[1].mT)
    O, s, Yh = torch.linalg.svd(T @ W.mT, full_matrices=False)
    return Q @ O, s, Yh @ P.mT


def balanced(U: Tensor, s: Tensor, Vh: Tensor, rank: int) -> LoRA:
    """The first `rank` components as a pair, sqrt(s) on both sides, with zeros in the slots that are left."""
    root, empty = s[:rank].sqrt(), max(0, rank - len(s))
    return LoRA(pad(U[:, :rank] * root, (0, empty)), pad(root[:, None] * Vh[:rank], (0, 0, 0, empty)))


def _by_slots(factor: str, tensor: Tensor) -> Tensor:
    """(d, slots)."""
    return (tensor if factor == "B" else tensor.mT).detach().double()


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """With zeros in slots that only others have."""
    if all(part.shape == parts[0].shape for part in parts):
        return list(parts)
    widest = max(part.shape[-1] for part in parts)
    return [pad(part, (0, widest - part.shape[-1])) for part in parts]


def _normal(shape: Sequence[int], *seed: str | int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("attack-noise", *seed))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
