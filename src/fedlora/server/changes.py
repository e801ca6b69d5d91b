"""How far each client's update moved from what the server sent it, and in which direction relative to the others.

A client's *change* X_i is D_i - R_i over all modules and heads together: D_i = B_i A_i is its upload, R_i its readout.
If one factor travels, the other is the readout's; if one stays at the client, the change is only that of the factor
that travelled. A module that a client does not hold counts as no change.

Only products are used, so coordinates, ranks and zero columns do not matter. With the columns l_a of all B's and the
rows r_a of all A's, each readout's once for all clients that got it, and W_ia = 1 for i's own, -1 for its readout's,

    <X_i, X_j> = (W E W^T)_ij,   E_ab = (l_a . l_b) (r_a . r_b)

These sums cancel if a change is small relative to its terms: a change of 1e-3 in coordinates of condition 1e6 keeps no
digit. The sizes of the terms show which clients are affected. For those, D_i - R_i is computed first, as one pair with
orthonormal columns from two QR factorisations, which then replaces their terms. All in float64. Cost of one matrix:
O(S^2 (d_out + d_in)), with S columns, from sum r_i to 2 sum r_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.linalg import distinct, gram, norm, shortest
from fedlora.linalg.cancelling import ARITHMETIC
from fedlora.linalg.parallel import Each, one_by_one

_LOST = 1e7  # the smallest safe ratio of ||X_i||^2 to the rounding in the sums
_BLURRED = 1e-3  # relative to a norm: smaller noise does not change distances between clients
_COORDINATES = 1e6
_WHOLE = 2048  # columns up to which E is computed at once
_CACHED = 2**22  # numbers in a strip, 32 MB


@dataclass(frozen=True, eq=False)
class Changes:
    """The clients' changes, reduced to what rules need. float64, on the CPU.

    norms (n,): ||X_i||. cosines (n, n): <X_i, X_j> / (||X_i|| ||X_j||), 1 with itself, 0 with a change of norm 0.
    noise (n,): the rounding that arithmetic in the client's own coordinates leaves in X_i; no part of any change.

    The client controls the noise: terms that cancel can hide any change in it. `measured` excludes clients that hide
    more than rules tolerate; their norm of 0 does not mean "no change".
    """

    norms: Tensor
    cosines: Tensor
    noise: Tensor

    def measured(self) -> Tensor:
        """(n,) bool: the noise is small relative to the client's own norm or the round's lower median norm. If most did
        not move, it is at most a million times the round's lower median noise, the effect that coordinates may have."""
        return measurable(self.norms, self.noise)

    def of(self, clients: Sequence[int]) -> Changes:
        """The changes of some clients."""
        at = torch.tensor(clients, dtype=torch.long)
        return Changes(self.norms[at], self.cosines[at][:, at], self.noise[at])


def measurable(norms: Tensor, noise: Tensor) -> Tensor:
    """(n,) bool: the noise is small relative to the own norm, or the round's: see `Changes.measured`."""
    middle, usual = (float(x.nan_to_num(math.inf).median()) if len(x) else 0.0 for x in (norms, noise))
    limit = _BLURRED * norms.clamp(min=middle)
    if middle == 0:
        limit = limit.clamp(min=_COORDINATES * usual)
    return torch.isfinite(noise) & (noise <= limit)


@dataclass(frozen=True, eq=False)
class Sent:
    """One client's part in one matrix. sent: its upload. begun: the readout that the server sent it, at its rank."""

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
        modules: for each module, each client's part, in the order of `uploads`; None if it does not hold the module.
        heads: the server's, if heads travel; each client's change of them also counts.
    """
    parts = each(_of_module, list(modules))
    parts += [
        _of_tensors([u.adapter.heads[name] for u in uploads], [head] * len(uploads)) for name, head in heads.items()
    ]
    return _together(parts, len(uploads))


# ------------------------------------------------------------------------------------------------------------- inside


@dataclass(frozen=True, eq=False)
class _Part:
    """One matrix. clients (k,): its clients' indices. gram (k, k): of X_i / top_i. noise (k,): in units of top_i."""

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
    pairs = [_terms(one) for one in parts]
    if any(pair is None for pair in pairs):  # a factor stays at the client: use only the other one's change
        (name,) = parts[0].sent.tensors()
        found = _of_tensors([p.sent.tensors()[name] for p in parts], [p.begun.tensors()[name] for p in parts])
    else:
        found = _of_products([pair for pair in pairs if pair is not None])
    return _Part(torch.tensor(held, dtype=torch.long), found.top, found.gram, found.noise)


@dataclass(frozen=True, eq=False)
class _Terms:
    """X = left right - begun_left begun_right, in the dtypes as received."""

    left: Tensor
    right: Tensor
    begun_left: Tensor
    begun_right: Tensor


def _terms(one: Sent) -> _Terms | None:
    """D - R; None if the product is unknown."""
    sent, begun = one.sent.tensors(), one.begun.tensors()
    if len(begun) < 2:
        return None
    B_0, A_0 = one.begun.factors
    if len(sent) == 2:
        B, A = (t.detach() for t in one.sent.factors)
        return _Terms(B, A, B_0, A_0)
    none = B_0[:, :0], A_0[:0]
    if "B" in sent:
        return _Terms(sent["B"].detach().double() - B_0.double(), A_0, *none)
    return _Terms(B_0, sent["A"].detach().double() - A_0.double(), *none)


def _of_tensors(sent: Sequence[Tensor], begun: Sequence[Tensor]) -> _Part:
    """The part for whole tensors, entry by entry; shorter ones are padded with zeros."""
    sizes = [float(norm(t.detach())) + float(norm(b)) for t, b in zip(sent, begun, strict=True)]
    terms = torch.tensor(sizes, dtype=torch.float64)
    flat = [t.detach().double().flatten() - b.double().flatten() for t, b in zip(sent, begun, strict=True)]
    X = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
    top = _power_of_two(X.abs().amax(dim=1))
    X = X / top[:, None]
    noise = ARITHMETIC * terms.to(top) / top
    return _Part(torch.arange(len(sent)), top.cpu(), (X @ X.mT).cpu(), noise.cpu())


def _of_products(clients: Sequence[_Terms]) -> _Part:
    found = _summed(clients)
    own = found.gram.diagonal()
    unsafe = found.noise.square() * _LOST > ARITHMETIC * own
    if bool(unsafe.any()):
        shorter = [_orthonormal(one) if bad else one for one, bad in zip(clients, unsafe.tolist(), strict=True)]
        again = _summed(shorter)
        # The noise from rounding in the client's own coordinates stays the same.
        found = _Part(again.clients, again.top, again.gram, found.noise * (found.top / again.top))
    return found


def _summed(clients: Sequence[_Terms]) -> _Part:
    """The part from each client's terms; readout columns that several clients got are used once."""
    left, right = torch.cat([t.begun_left for t in clients], dim=1), torch.cat([t.begun_right for t in clients], dim=0)
    at, place = distinct(left, right)
    left = torch.cat([*(t.left for t in clients), left.index_select(1, at)], dim=1)
    right = torch.cat([*(t.right for t in clients), right[at]], dim=0)
    widths = [t.left.shape[1] for t in clients]
    back = [t.begun_left.shape[1] for t in clients]
    place = torch.cat([torch.arange(sum(widths), device=left.device), sum(widths) + place])
    who = torch.arange(len(clients), device=left.device)
    owner = torch.cat([who.repeat_interleave(torch.tensor(n, device=left.device)) for n in (widths, back)])
    sign = torch.cat([torch.ones(sum(widths)), -torch.ones(sum(back))]).to(left.device, torch.float64)
    scale = torch.ones(len(right), dtype=torch.float64, device=left.device)
    if torch.float64 in (left.dtype, right.dtype):  # products of four float64 may overflow; of narrower ones they fit
        l_scale = _power_of_two(norm(left, dim=0))
        left, right = left / l_scale, right * l_scale[:, None]
        scale = _power_of_two(norm(right, dim=1))
        right = right / scale[:, None]
    products = (gram(left), gram(right.mT)) if left.shape[1] <= _WHOLE else None
    if products:
        sizes = (products[0].diagonal() * products[1].diagonal()).sqrt()
    else:
        sizes = norm(left, dim=0) * norm(right, dim=1)
    largest = torch.zeros(len(clients), dtype=torch.float64, device=left.device)
    top = _power_of_two(largest.scatter_reduce(0, owner, (scale * sizes)[place], "amax"))
    W = torch.zeros(len(clients), len(right), dtype=torch.float64, device=left.device)
    W.index_put_((owner, place), sign * (scale[place] / top[owner]), accumulate=True)
    total = W @ (products[0] * products[1]) @ W.mT if products else _by_strips(left, right, W)
    return _Part(who.cpu(), top.cpu(), total.cpu(), (ARITHMETIC * (W.abs() @ sizes)).cpu())


def _by_strips(left: Tensor, right: Tensor, W: Tensor) -> Tensor:
    """W E W^T, in strips of E if E is large."""
    strip = max(1, _CACHED // left.shape[1])
    left, right = left.double(), right.double()
    total = torch.zeros(len(W), len(W), dtype=W.dtype, device=W.device)
    for first in range(0, left.shape[1], strip):
        part = slice(first, first + strip)
        total += W[:, part] @ ((left[:, part].mT @ left) * (right[part] @ right.mT)) @ W.mT
    return total


def _orthonormal(one: _Terms) -> _Terms:
    """D - R as one pair with columns that do not cancel; it has no readout."""
    B, A = shortest([(1.0, one.left, one.right), (-1.0, one.begun_left, one.begun_right)])
    return _Terms(B, A, B[:, :0], A[:0])


def _power_of_two(sizes: Tensor) -> Tensor:
    """2^floor(log2 x) of each, within the range that float64 can invert; 1 for zero."""
    exponent = torch.frexp(sizes).exponent.clamp(-1000, 1000) - 1
    return torch.where(sizes > 0, torch.ldexp(torch.ones_like(sizes), exponent), 1.0)


__all__ = ["Changes", "Sent", "changes", "measurable"]
