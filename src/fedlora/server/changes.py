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
_STRIP = 2048  # columns at once: the square of a thousand clients' columns would not fit in memory

_Terms = list[tuple[float, LoRA]]  # X as a signed sum of products


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
    distinct: list[LoRA] = []
    changes: list[_Terms] = []
    for one, old in pairs:
        if len(one.tensors()) == 1:
            changes.append([(1.0, change_of(one, old))])
            continue
        old = _live(old)
        known = next((x for x in distinct if all(map(torch.equal, x.factors, old.factors))), None)
        distinct += [] if known else [old]
        changes.append([(1.0, one), (-1.0, known or old)])
    G, terms = _products(changes)
    lost = (terms.square() > _CANCELS * G.diagonal()).tolist()
    if any(lost):
        short = [[(1.0, _orthonormal(change_of(*pairs[k])))] if bad else changes[k] for k, bad in enumerate(lost)]
        G, _ = _products(short)
    return G


def _products(changes: Sequence[_Terms]) -> tuple[Tensor, Tensor]:
    """((n, n): <X_i, X_j>, (n,): the size of X_i's terms, sum_a ||l_a|| ||r_a||)."""
    parts = {id(lora): lora for terms in changes for _, lora in terms}  # what several clients got stands here once
    L = torch.cat([lora.factors[0].detach().double() for lora in parts.values()], dim=1)
    R = torch.cat([lora.factors[1].detach().double() for lora in parts.values()])
    at = {key: k for k, key in enumerate(parts)}
    signs = torch.zeros(len(changes), len(parts), dtype=L.dtype)
    for k, terms in enumerate(changes):
        for sign, lora in terms:
            signs[k, at[id(lora)]] += sign
    W = signs.repeat_interleave(torch.tensor([lora.rank for lora in parts.values()]), dim=1)
    G = torch.zeros(len(changes), len(changes), dtype=L.dtype)
    for first in range(0, L.shape[1], _STRIP):
        s = slice(first, first + _STRIP)
        G += W[:, s] @ ((L[:, s].mT @ L) * (R[s] @ R.mT)) @ W.mT
    return (G + G.mT) / 2, W.abs() @ (L.norm(dim=0) * R.norm(dim=1))


def _live(lora: LoRA) -> LoRA:
    """Without slots that are still B = 0, whose rows of A differ between clients that got the same update."""
    B, A = lora.factors
    some = (B != 0).any(dim=0)
    return LoRA(B[:, some], A[some])


def _orthonormal(x: LoRA) -> LoRA:
    Q, T = torch.linalg.qr(x.factors[0])
    P, S = torch.linalg.qr(x.factors[1].mT)
    return LoRA(Q @ (T @ S.mT), P.mT)


def _entries(changes: Sequence[Tensor]) -> Tensor:
    X = pad_sequence([x.flatten() for x in changes], batch_first=True)
    return X @ X.mT
