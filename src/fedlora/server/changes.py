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
    return (G + G.mT) / 2


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
    parts = [new for new, _ in pairs]
    W = torch.eye(len(pairs), dtype=torch.float64).repeat_interleave(torch.tensor([x.rank for x in parts]), dim=1)
    if got := {k: old for k, (_, old) in enumerate(pairs) if old is not None}:
        slots, places = distinct_slots(list(got.values()))
        back = torch.zeros(len(pairs), slots.rank, dtype=W.dtype)
        for k, at in zip(got, places, strict=True):
            back[k] -= torch.bincount(torch.tensor(at, dtype=torch.long), minlength=slots.rank)
        parts, W = [*parts, slots], torch.cat([W, back], dim=1)
    L = torch.cat([x.factors[0].detach() for x in parts], dim=1).double()
    R = torch.cat([x.factors[1].detach() for x in parts]).double()
    G = torch.zeros(len(pairs), len(pairs), dtype=W.dtype)
    for first in range(0, len(R), _STRIP):  # the blocks on and right of the diagonal: the others are their transposes
        s, rest = slice(first, first + _STRIP), slice(first, None)
        E = (L[:, s].mT @ L[:, rest]) * (R[s] @ R[rest].mT)
        E[:, : len(E)] /= 2
        G += W[:, s] @ E @ W[:, rest].mT
    return G + G.mT, W.abs() @ (L.norm(dim=0) * R.norm(dim=1))


def distinct_slots(loras: Sequence[LoRA]) -> tuple[LoRA, list[list[int]]]:
    """The different slots of these pairs as one pair, bit for bit; and for each pair which of them it has.

    Clients that got the same components of a mean share slots, and a sum of what all got needs each once. Slots that
    are still B = 0 add nothing, but differ between clients: they are left out.
    """
    slots: dict[bytes, tuple[int, Tensor, Tensor]] = {}
    places: list[list[int]] = []
    for lora in loras:
        B, A = lora.factors[0].detach().mT.contiguous(), lora.factors[1].detach().contiguous()
        at = []
        for b, a, live in zip(B, A, (B != 0).any(dim=1).tolist(), strict=True):
            if live:
                key = b.view(torch.uint8).numpy().tobytes() + a.view(torch.uint8).numpy().tobytes()
                at.append(slots.setdefault(key, (len(slots), b, a))[0])
        places.append(at)
    if not slots:
        return loras[0].first(0), places
    _, Bs, As = zip(*slots.values(), strict=True)
    return LoRA(torch.stack(Bs, dim=1), torch.stack(As)), places


def _orthonormal(x: LoRA) -> LoRA:
    Q, T = torch.linalg.qr(x.factors[0])
    P, S = torch.linalg.qr(x.factors[1].mT)
    return LoRA(Q @ (T @ S.mT), P.mT)


def _entries(changes: Sequence[Tensor]) -> Tensor:
    X = pad_sequence([x.flatten() for x in changes], batch_first=True)
    return X @ X.mT
