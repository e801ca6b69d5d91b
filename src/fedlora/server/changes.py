"""The inner products of the clients' changes, which are all that a robust rule sees. No d_out x d_in matrix is formed.

    X_i = B_i A_i - R_i,  R_i = B_0 A_0 as client i got it        <X_i, X_j> = sum_ab w_ia w_jb (l_a . l_b) (r_a . r_b)

over the columns l_a of all left and the rows r_a of all right factors, with w_ia = 1 for those that i sent and -1 for
those that it got. Only products enter, so ranks, gauges and empty slots do not matter. If one factor travels, the other
is the one that was sent; if that stays at the clients, X_i is the change of the one that travels. All in float64.

The sums cancel where a change is small beside its terms: in coordinates of condition 1e6, a change of 1e-3 keeps no
digit. Such a pair is first written with orthonormal columns (two QRs), whose terms are no larger than the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedlora.core.lora import Adapter, LoRA, change_of
from fedlora.core.messages import Upload

_CANCELS = 1e7  # terms^2 over ||X||^2: below, G keeps 9 of float64's 16 digits, and rules call 6 of them equal
_STRIP = 256  # columns at once: of a thousand clients' columns the square would not fit in memory


def gram_of_changes(uploads: Sequence[Upload], begun: Sequence[Adapter], heads: Mapping[str, Tensor]) -> Tensor:
    """(n, n): <X_i, X_j> over all modules and heads together, float64. A module that a client lacks has not moved.

    Cost of a module with S = sum_i r_i: the Gram matrices of S + r columns where all clients got the same, otherwise of
    up to 2 S.

    Args:
        begun: what each client was sent, at its rank; without a factor that stays at the clients.
        heads: the server's, if they travel.
    """
    G = torch.zeros(len(uploads), len(uploads), dtype=torch.float64)
    for name in dict.fromkeys(name for u in uploads for name in u.adapter.modules):
        held = [k for k, u in enumerate(uploads) if name in u.adapter.modules]
        sent, got = [uploads[k].adapter.modules[name] for k in held], [begun[k].modules[name] for k in held]
        G[torch.tensor(held)[:, None], held] += _module(sent, got)
    for name, head in heads.items():
        G += _entries([u.adapter.heads[name].detach().double() - head.double() for u in uploads])
    return G


def _module(sent: Sequence[LoRA], got: Sequence[LoRA]) -> Tensor:
    pairs = list(zip(sent, got, strict=True))
    if len(got[0].tensors()) == 1:
        (name,) = sent[0].tensors()
        moved = [one.tensors()[name].detach().double() - old.tensors()[name].double() for one, old in pairs]
        return _entries([x.mT if name == "B" else x for x in moved])  # slot by slot, so that zeros pad the later slots
    if len(sent[0].tensors()) == 1:
        return _products([(change_of(*pair), None) for pair in pairs])[0]
    G, terms = _products(pairs)
    lost = (terms.square() > _CANCELS * G.diagonal()).tolist()
    if any(lost):
        G, _ = _products(
            [(_orthonormal(change_of(*pairs[k])), None) if bad else pairs[k] for k, bad in enumerate(lost)]
        )
    return G


def _products(pairs: Sequence[tuple[LoRA, LoRA | None]]) -> tuple[Tensor, Tensor]:
    """((n, n): <X_i, X_j>, (n,): the size of X_i's terms, sum_a ||l_a|| ||r_a||), from what each sent and got."""
    n, parts, owners = len(pairs), [new for new, _ in pairs], [torch.eye(len(pairs), dtype=torch.float64)]
    owners = [owners[0].repeat_interleave(torch.tensor([new.rank for new in parts]), dim=1)]
    if got := {k: old for k, (_, old) in enumerate(pairs) if old is not None}:
        slots, places = distinct_slots(list(got.values()))
        parts.append(slots)
        owners.append(torch.zeros(n, slots.rank, dtype=torch.float64))
        for k, at in zip(got, places, strict=True):
            owners[1][k, at] -= 1
    W = torch.cat(owners, dim=1)
    L, R = (torch.empty(W.shape[1], d, dtype=W.dtype) for d in (len(parts[0].factors[0]), parts[0].factors[1].shape[1]))
    ends = torch.tensor([part.rank for part in parts]).cumsum(0).tolist()
    for part, end in zip(parts, ends, strict=True):
        L[end - part.rank : end], R[end - part.rank : end] = part.factors[0].detach().mT, part.factors[1].detach()
    G = torch.zeros(n, n, dtype=rows.dtype)
    for first in range(0, len(L), _STRIP):  # the blocks on and right of the diagonal: the others are their transposes
        s, rest = slice(first, first + _STRIP), slice(first, None)
        E = (L[s] @ L[rest].mT) * (R[s] @ R[rest].mT)
        E[:, : len(E)] /= 2
        G += W[:, s] @ E @ W[:, rest].mT
    return G + G.mT, W.abs() @ (L.norm(dim=1) * R.norm(dim=1))


def distinct_slots(loras: Sequence[LoRA]) -> tuple[LoRA, list[list[int]]]:
    """The different slots of these pairs as one pair, bit for bit; and for each pair which of them it has.

    Clients that got the same components of a mean share slots, and a sum of what all got needs each once. Slots that
    are still B = 0 add nothing, but differ between clients: they are left out.
    """
    places: dict[bytes, int] = {}
    kept: list[tuple[Tensor, Tensor]] = []
    found: list[list[int]] = []
    for lora in loras:
        B, A = lora.factors
        at = []
        for k, row in enumerate(_rows(lora).view(torch.uint8)):
            if bool(B[:, k].any()):
                at.append(places.setdefault(row.numpy().tobytes(), len(places)))
                kept += [(B[:, k], A[k])] * (at[-1] == len(kept))
        found.append(at)
    B, A = loras[0].factors
    slots = (
        LoRA(torch.stack([b for b, _ in kept], 1), torch.stack([a for _, a in kept])) if kept else LoRA(B[:, :0], A[:0])
    )
    return slots, found


def _rows(lora: LoRA) -> Tensor:
    """(r, d_out + d_in): each slot's column of B beside its row of A."""
    B, A = lora.factors
    return torch.cat([B.detach().mT, A.detach()], dim=1)


def _orthonormal(x: LoRA) -> LoRA:
    Q, T = torch.linalg.qr(x.factors[0])
    P, S = torch.linalg.qr(x.factors[1].mT)
    return LoRA(Q @ (T @ S.mT), P.mT)


def _entries(changes: Sequence[Tensor]) -> Tensor:
    X = pad_sequence([x.flatten() for x in changes], batch_first=True)
    return X @ X.mT
