"""How far each client's update moved from what the client was sent, and in which direction beside the others'.

A client's *change* X_i is D_i - R_i over all modules and heads together: D_i = B_i A_i what it sent, R_i what it was
sent. Where one factor travels the other is what the client was sent; where one stays at the client, the change is that
of the factor that travelled. A module that a client does not hold is no change.

Only products enter, so no coordinates, no rank and no zero columns matter. A Gram product of factors would cancel: of a
change of 1e-3 in coordinates of condition 1e6 no digit is left. So D_i and R_i are subtracted first, as small factors
in orthonormal coordinates of all columns that were sent, and the inner products taken after that. All in float64.
Cost of one matrix: O(S^2 (d_out + d_in)) with S = 2 sum r_i, or O(S d_out d_in) where S is larger than d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.linalg import norm
from fedlora.linalg.parallel import Each, one_by_one

# What float64 leaves of a sum, relative to its largest term: a change below that is none.
_ARITHMETIC = 64 * 2.0**-53
_CACHED = 2**22  # numbers of a panel, 32 MB


@dataclass(frozen=True, eq=False)
class Changes:
    """The clients' changes, up to what no rule needs to know. float64, on the CPU.

    norms (n,): ||X_i||. cosines (n, n): <X_i, X_j> / (||X_i|| ||X_j||), 1 with itself, 0 beside a change of norm 0.
    noise (n,): what arithmetic in the client's own coordinates leaves of X_i: rounding, and no part of any change.
    """

    norms: Tensor
    cosines: Tensor
    noise: Tensor


@dataclass(frozen=True, eq=False)
class Sent:
    """One client's part in one matrix. sent: what travelled. begun: what the client was sent, at its rank."""

    sent: LoRA
    begun: LoRA


def changes(
    modules: Sequence[Sequence[Sent | None]],
    uploads: Sequence[Upload],
    heads: Mapping[str, Tensor],
    each: Each = one_by_one,
) -> Changes:
    """All clients' changes.

    Args:
        modules: for each module, what each client of `uploads` has there; None where it does not hold it.
        heads: the server's own, of those that travel: each client's change of them counts as well.
    """
    parts = each(_of_module, list(modules))
    parts += [
        _of_tensors([u.adapter.heads[name] for u in uploads], [head] * len(uploads)) for name, head in heads.items()
    ]
    return _together(parts, len(uploads))


# ------------------------------------------------------------------------------------------------------------- inside


@dataclass(frozen=True, eq=False)
class _Part:
    """One matrix. clients (k,): whom it is of. gram (k, k): of X_i / top_i. noise (k,): in units of top_i."""

    clients: Tensor
    top: Tensor
    gram: Tensor
    noise: Tensor


def _together(parts: Sequence[_Part], count: int) -> Changes:
    squares = torch.zeros(len(parts), count, dtype=torch.float64)
    noises = torch.zeros_like(squares)
    for k, part in enumerate(parts):
        squares[k, part.clients] = part.top * part.gram.diagonal().clamp(min=0).sqrt()
        noises[k, part.clients] = part.top * part.noise
    norms, noise = norm(squares, dim=0), norm(noises, dim=0)
    norms = torch.where(norms > noise, norms, 0.0)
    cosines = torch.zeros(count, count, dtype=torch.float64)
    for part in parts:
        own = norms[part.clients]
        share = torch.where(own > 0, part.top / torch.where(own > 0, own, 1.0), 0.0)
        cosines[part.clients[:, None], part.clients] += share[:, None] * part.gram * share
    cosines = ((cosines + cosines.mT) / 2).clamp(-1, 1)
    cosines.fill_diagonal_(1.0)
    some = (norms > 0).to(cosines)
    return Changes(norms, cosines * some[:, None] * some + torch.diag(1 - some), noise)


def _of_module(clients: Sequence[Sent | None]) -> _Part:
    held = [k for k, one in enumerate(clients) if one is not None]
    parts = [one for one in clients if one is not None]
    if not parts:
        return _Part(
            torch.tensor(held, dtype=torch.long), *(torch.zeros(s, dtype=torch.float64) for s in (0, (0, 0), 0))
        )
    pairs = [_difference(one) for one in parts]
    if any(pair is None for pair in pairs):  # a factor stays at the client: the other one's own change
        (name,) = parts[0].sent.tensors()
        found = _of_tensors([p.sent.tensors()[name] for p in parts], [p.begun.tensors()[name] for p in parts])
    else:
        found = _of_products([pair for pair in pairs if pair is not None])
    return _Part(torch.tensor(held, dtype=torch.long), found.top, found.gram, found.noise)


def _difference(one: Sent) -> tuple[Tensor, Tensor] | None:
    """D - R as one pair; None where the product is not known."""
    sent, begun = one.sent.tensors(), one.begun.tensors()
    if len(begun) < 2:
        return None
    B_0, A_0 = (t.double() for t in one.begun.factors)
    if len(sent) == 2:
        B, A = (t.detach().double() for t in one.sent.factors)
        return torch.cat([B, B_0], dim=1), torch.cat([A, -A_0], dim=0)
    if "B" in sent:
        return sent["B"].detach().double() - B_0, A_0
    return B_0, sent["A"].detach().double() - A_0


def _of_tensors(sent: Sequence[Tensor], begun: Sequence[Tensor]) -> _Part:
    """Of whole tensors, entry by entry; shorter ones end in zeros."""
    terms = torch.tensor([float(norm(t.detach())) + float(norm(b)) for t, b in zip(sent, begun, strict=True)])
    flat = [t.detach().double().flatten() - b.double().flatten() for t, b in zip(sent, begun, strict=True)]
    X = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
    top = _power_of_two(X.abs().amax(dim=1))
    X = X / top[:, None]
    noise = _ARITHMETIC * terms.to(top) / top
    return _Part(torch.arange(len(sent)), top.cpu(), (X @ X.mT).cpu(), noise.cpu())


def _of_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> _Part:
    widths = [left.shape[1] for left, _ in pairs]
    B, A = torch.cat([left for left, _ in pairs], dim=1), torch.cat([right for _, right in pairs], dim=0)
    scale = _power_of_two(norm(B, dim=0))  # a diagonal gauge is gone, exactly
    B, A = B / scale, A * scale[:, None]
    sizes = norm(A, dim=1)
    top = torch.stack([_power_of_two(own.max()) for own in torch.split(sizes, widths)])
    A = A / top.repeat_interleave(torch.tensor(widths, device=top.device))[:, None]
    noise = [float(_ARITHMETIC * 2 * own.sum()) for own in torch.split(norm(A, dim=1), widths)]
    left = torch.linalg.qr(B, mode="r").R if B.shape[0] > B.shape[1] else B
    right = torch.linalg.qr(A.mT, mode="r").R.mT if A.shape[1] > A.shape[0] else A
    return _Part(
        torch.arange(len(pairs)), top.cpu(), _gram(left, right, widths).cpu(), torch.tensor(noise).to(top.cpu())
    )


def _gram(left: Tensor, right: Tensor, widths: Sequence[int]) -> Tensor:
    """<L_i R_i, L_j R_j> of the blocks of left (m, S) and right (S, n), by panels of rows."""
    count, total = len(widths), torch.zeros(len(widths), len(widths), dtype=torch.float64, device=left.device)
    starts = [sum(widths[:k]) for k in range(count)]
    blocks = [right[at : at + width] for at, width in zip(starts, widths, strict=True)]
    panel = max(1, _CACHED // max(1, count * right.shape[1]))
    for first in range(0, left.shape[0], panel):
        rows = left[first : first + panel]
        X = rows.new_empty(count, rows.shape[0], right.shape[1])
        for k, (at, width) in enumerate(zip(starts, widths, strict=True)):
            torch.matmul(rows[:, at : at + width], blocks[k], out=X[k])
        flat = X.flatten(1)
        total += flat @ flat.mT
    return total


def _power_of_two(sizes: Tensor) -> Tensor:
    """2^floor(log2 x) of each, within what float64 has an inverse of; 1 for zero."""
    exponent = torch.frexp(sizes).exponent.clamp(-1000, 1000) - 1
    return torch.where(sizes > 0, torch.ldexp(torch.ones_like(sizes), exponent), 1.0)


__all__ = ["Changes", "Sent", "changes"]
