"""The space in which changes are clipped, summed and noised: all of d_out x d_in, or a subspace of each module.

    v = Q^T (B A) P        Q (d_out, a), P (d_in, b), orthonormal columns; the next state moves by Q (S / n) P^T

Q and P come from earlier (public) releases and from public random directions, so choosing them costs nothing: it is
adaptive post-processing. They never come from what clients send in the same round. Orthonormality only preserves the
signal; the bound on one client does not rely on it, because we compute the norm of v itself.

dims    shape         a        b       noised entries of a module of 768 x 768
None    full          d_out    d_in    589,824    nothing of the change is lost, and all of it is noised
16      two-sided     16       16      256        least noise; what lies outside Q and P is lost
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.seeds import derive_seed

_FRESH = 0.25  # least share of random dims: without any, directions that were never released could never be learned


@dataclass(frozen=True, eq=False)
class Bases:
    """One module's Q (d_out, a) and P (d_in, b), float64 with orthonormal columns; both None: the identity."""

    d_out: int
    d_in: int
    Q: Tensor | None = None
    P: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(a, b), the shape of Q^T X P."""
        return (self.d_out if self.Q is None else self.Q.shape[1], self.d_in if self.P is None else self.P.shape[1])

    def project(self, change: LoRA) -> Tensor:
        """Q^T (B A) P, float64 (a, b), for a pair B (d_out, r), A (r, d_in)."""
        B, A = (t.detach().to(device="cpu", dtype=torch.float64) for t in change.factors)
        return B @ A if self.Q is None or self.P is None else (self.Q.T @ B) @ (A @ self.P)

    def lift(self, projected: Tensor) -> LoRA:
        """Q X P^T as a float64 pair of rank min(a, b), for X (a, b)."""
        (a, b), X = self.shape, projected.to(torch.float64)
        if self.Q is None or self.P is None:
            return LoRA(torch.eye(a, dtype=X.dtype), X) if a <= b else LoRA(X, torch.eye(b, dtype=X.dtype))
        return LoRA(self.Q, X @ self.P.T) if a <= b else LoRA(self.Q @ X, self.P.T.contiguous())


def bases_of(released: LoRA, dims: int | None, module: str, round: int, seed: int) -> Bases:
    """One module's bases for one round. At least a quarter of the directions are random; the others are the strongest
    of the released update.

    Args:
        released: the module's update as released before, B (d_out, r), A (r, d_in); of rank 0, or zero, if there is
            none. Only its column and row spaces matter, not its gauge.
        dims: the most columns of Q and P; None: the whole space.
        seed: public. With the round and the module's name it determines the random directions.

    Example:
        >>> nothing = LoRA(torch.zeros(768, 0), torch.zeros(0, 768))
        >>> bases_of(nothing, 16, "q", round=1, seed=0).shape
        (16, 16)
    """
    B, A = (t.detach().to(device="cpu", dtype=torch.float64) for t in released.factors)
    d_out, d_in = B.shape[0], A.shape[1]
    if dims is None:
        return Bases(d_out, d_in)
    left, right = torch.linalg.qr(B), torch.linalg.qr(A.T)
    U, s, Vh = torch.linalg.svd(left.R @ right.R.T)
    count = int((s > 1e-12 * s.max()).sum()) if released.rank else 0  # those above rounding; none of zero
    seeds = (derive_seed("privacy-basis", seed, round, module, side) for side in ("Q", "P"))
    sides = zip((left.Q @ U[:, :count], right.Q @ Vh[:count].T), seeds, strict=True)
    return Bases(d_out, d_in, *(_filled(known, dims, of) for known, of in sides))


def _filled(known: Tensor, dims: int, seed: int) -> Tensor:
    """(d, min(dims, d)) orthonormal: the first of `known`, then random ones. The whole space if dims >= d."""
    d, dims = len(known), min(dims, len(known))
    kept = known[:, : dims - math.ceil(_FRESH * dims)]
    generator = torch.Generator().manual_seed(seed)  # public
    drawn = torch.randn(d, dims - kept.shape[1], generator=generator, dtype=torch.float64)
    found: Tensor = torch.linalg.qr(torch.cat([kept, drawn - kept @ (kept.T @ drawn)], dim=1)).Q
    return found


@dataclass(frozen=True, eq=False)
class Layout:
    """One private vector for all modules and heads: each module's Q^T X P row by row, then each head, sorted by name.

    modules: module -> its bases. heads: head -> its shape. Every round has all of them, even those that no client
    holds.
    """

    modules: Mapping[str, Bases]
    heads: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", ReadOnly({k: self.modules[k] for k in sorted(self.modules)}))
        object.__setattr__(self, "heads", ReadOnly({k: tuple(self.heads[k]) for k in sorted(self.heads)}))

    @property
    def size(self) -> int:
        """d: entries in the whole vector."""
        return sum(map(math.prod, self._shapes().values()))

    def vector(self, changes: Mapping[str, LoRA], heads: Mapping[str, Tensor]) -> Tensor:
        """float64 (d,): the changes in their places, with zeros for missing modules and heads."""
        there = {name: self.modules[name].project(change) for name, change in changes.items()}
        there |= {name: head.detach().to(device="cpu", dtype=torch.float64) for name, head in heads.items()}
        shapes = self._shapes()
        parts = [there.get(name, torch.zeros(shape, dtype=torch.float64)) for name, shape in shapes.items()]
        return torch.cat([part.reshape(-1) for part in parts])

    def parts(self, vector: Tensor) -> tuple[dict[str, LoRA], dict[str, Tensor]]:
        """(module -> its part, lifted to a pair, head -> its part) from a vector (d,); all float64."""
        shapes = self._shapes()
        pieces = torch.split(vector.to(torch.float64), [math.prod(shape) for shape in shapes.values()])
        found = {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        lifted = {name: bases.lift(found[name]) for name, bases in self.modules.items()}
        return lifted, {name: found[name] for name in self.heads}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Module or head -> the shape of its part, in the order of the vector."""
        return {**{name: bases.shape for name, bases in self.modules.items()}, **self.heads}
