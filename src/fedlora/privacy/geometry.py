"""The space in which changes are clipped, summed and noised: all of d_out x d_in, or a subspace of each module.

    v = Q^T (B A) P        Q (d_out, a), P (d_in, b), orthonormal columns; the next state moves by Q (S / n) P^T

Q and P come from earlier (public) releases and from public random directions, so choosing them costs nothing: it is
adaptive post-processing. They never come from what clients send in the same round. Orthonormality only preserves the
signal; the bound on one client does not rely on it, because we compute the norm of v itself.

shape        a          b         price: noised entries, for a module of 768 x 768 and dims = 16
full         d_out      d_in      589,824    nothing of the change is lost, and all of it is noised
two-sided    dims       dims      256        least noise; what lies outside Q and P is lost

The best choice depends on noise and clients. Error of the sum at relative noise 0.01 / 0.05 / 0.2 in a toy example:
full, then SVD 0.05 / 0.51 / 5.4; two-sided 0.28 / 0.43 / 1.2 (design notes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.errors import HyperparameterError, ShapeError
from fedlora.seeds import derive_seed

Shape = Literal["full", "two-sided"]

FRESH = 0.25  # least share of random dims: without any, directions that were never released could never be learned


@dataclass(frozen=True, eq=False)
class Bases:
    """One module's Q (d_out, a) and P (d_in, b), float64 with orthonormal columns; None means the identity.

    For a method that shares one factor beside a frozen public one, P may be the frozen one's directions, and Q None.

    Raises:
        ShapeError: a basis does not have the module's height.
    """

    d_out: int
    d_in: int
    Q: Tensor | None = None
    P: Tensor | None = None

    def __post_init__(self) -> None:
        for name, X, d in (("Q", self.Q, self.d_out), ("P", self.P, self.d_in)):
            if X is not None and (X.ndim != 2 or X.shape[0] != d or not 1 <= X.shape[1] <= d):
                raise ShapeError(f"the basis {name} must be ({d}, 1 to {d} columns); got {tuple(X.shape)}.")

    @property
    def shape(self) -> tuple[int, int]:
        """(a, b), the shape of Q^T X P."""
        return (self.d_out if self.Q is None else self.Q.shape[1], self.d_in if self.P is None else self.P.shape[1])

    @property
    def size(self) -> int:
        """a b: this module's entries in the private vector."""
        a, b = self.shape
        return a * b

    def project(self, change: LoRA) -> Tensor:
        """Q^T (B A) P, float64 (a, b), for a pair B (d_out, r), A (r, d_in).

        Raises:
            ShapeError: the pair has another module's shape.
        """
        B, A = change.factors
        if B.shape[0] != self.d_out or A.shape[1] != self.d_in:
            raise ShapeError(
                f"a change of this module must be ({self.d_out}, {self.d_in}); got a pair of "
                f"({B.shape[0]}, {A.shape[1]})."
            )
        left = B.detach().to(device="cpu", dtype=torch.float64)
        right = A.detach().to(device="cpu", dtype=torch.float64)
        if self.Q is not None:
            left = self.Q.T @ left
        if self.P is not None:
            right = right @ self.P
        return left @ right

    def lift(self, projected: Tensor) -> LoRA:
        """Q X P^T as a float64 pair of rank min(a, b).

        Raises:
            ShapeError: X is not (a, b).
        """
        a, b = self.shape
        if tuple(projected.shape) != (a, b):
            raise ShapeError(f"the tensor to lift must be ({a}, {b}); got {tuple(projected.shape)}.")
        X = projected.to(torch.float64)
        if a <= b:
            left = torch.eye(a, dtype=torch.float64) if self.Q is None else self.Q
            return LoRA(left, X if self.P is None else X @ self.P.T)
        right = torch.eye(b, dtype=torch.float64) if self.P is None else self.P.T
        return LoRA(X if self.Q is None else self.Q @ X, right.contiguous())


@dataclass(frozen=True)
class Geometry:
    """The shape of the space, for all modules. dims: the most columns of Q and P; "full" has none.

    Raises:
        HyperparameterError: an unknown shape, or dims that do not fit it.

    Example:
        >>> from fedlora.privacy import Geometry
        >>> Geometry("two-sided", dims=16).size(768, 768), Geometry("full").size(768, 768)
        (256, 589824)
    """

    shape: Shape = "full"
    dims: int = 0

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise HyperparameterError(f"privacy: shape must be one of {get_args(Shape)}; got {self.shape!r}.")
        whole = isinstance(self.dims, int) and not isinstance(self.dims, bool)
        if self.shape == "full" and self.dims != 0:
            raise HyperparameterError(f"privacy: the shape full has all dimensions; leave dims = {self.dims!r} out.")
        if self.shape != "full" and (not whole or self.dims < 1):
            raise HyperparameterError(
                f"privacy: the shape {self.shape} needs dims, how many directions of each module to keep (16, say); "
                f"got {self.dims!r}."
            )

    def size(self, d_out: int, d_in: int) -> int:
        """a b: entries in the private vector for a module (d_out, d_in)."""
        return d_out * d_in if self.shape == "full" else min(self.dims, d_out) * min(self.dims, d_in)

    def bases(self, released: LoRA, module: str, round: int, seed: int) -> Bases:
        """One module's bases for one round.

        Args:
            released: the module's update as released before, B (d_out, r), A (r, d_in); of rank 0, or zero, if there is
                none. Only its column and row spaces matter, not its gauge.
            seed: public. With the round and the module's name it determines the random directions.

        At least a quarter of the directions are random; the others are the strongest of the released update.

        Raises:
            ShapeError: released values are not finite.
        """
        B, A = released.factors
        d_out, d_in = B.shape[0], A.shape[1]
        if self.shape == "full":
            return Bases(d_out, d_in)
        left, right = strongest(released)
        P = self._filled(right, d_in, "P", module, round, seed)
        return Bases(d_out, d_in, self._filled(left, d_out, "Q", module, round, seed), P)

    def _filled(self, known: Tensor, d: int, side: str, module: str, round: int, seed: int) -> Tensor:
        """(d, min(dims, d)) orthonormal: the first of `known`, then random ones. The whole space if dims >= d."""
        dims = min(self.dims, d)
        kept = known[:, : min(known.shape[1], dims - math.ceil(FRESH * dims))]
        generator = torch.Generator().manual_seed(derive_seed("privacy-basis", seed, round, module, side))  # public
        drawn = torch.randn(d, dims - kept.shape[1], generator=generator, dtype=torch.float64)
        found: Tensor = torch.linalg.qr(torch.cat([kept, drawn - kept @ (kept.T @ drawn)], dim=1)).Q
        return found


def strongest(released: LoRA) -> tuple[Tensor, Tensor]:
    """Left and right singular vectors of B A, (d_out, k) and (d_in, k) in float64, strongest first; k counts those
    above rounding.

    Raises:
        ShapeError: values are not finite.
    """
    B, A = (t.detach().to(device="cpu", dtype=torch.float64) for t in released.factors)
    if not (bool(torch.isfinite(B).all()) and bool(torch.isfinite(A).all())):
        raise ShapeError("a released update holds NaN or Inf, so no bases can be made from it.")
    if released.rank == 0:
        return torch.zeros(len(B), 0, dtype=torch.float64), torch.zeros(A.shape[1], 0, dtype=torch.float64)
    left, right = torch.linalg.qr(B), torch.linalg.qr(A.T)
    U, s, Vh = torch.linalg.svd(left.R @ right.R.T)
    count = int((s > 1e-12 * s[0]).sum()) if float(s[0]) > 0 else 0
    return left.Q @ U[:, :count], right.Q @ Vh[:count].T


@dataclass(frozen=True, eq=False)
class Layout:
    """One private vector for all modules and heads: each module's Q^T X P row by row, then each head, sorted by name.

    modules: module -> its bases. heads: head -> its shape. Every round has all of them, even those that no client
    holds.

    Raises:
        ShapeError: there is nothing to sum.
    """

    modules: Mapping[str, Bases]
    heads: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", ReadOnly({k: self.modules[k] for k in sorted(self.modules)}))
        object.__setattr__(self, "heads", ReadOnly({k: tuple(self.heads[k]) for k in sorted(self.heads)}))
        if self.size < 1:
            raise ShapeError("a private sum has no entries: neither modules nor heads.")
        if twice := set(self.modules) & set(self.heads):
            raise ShapeError(f"{min(twice)!r} is both a module and a head of the private sum.")

    @property
    def size(self) -> int:
        """d: entries in the whole vector."""
        return sum(bases.size for bases in self.modules.values()) + sum(map(math.prod, self.heads.values()))

    def vector(self, changes: Mapping[str, LoRA], heads: Mapping[str, Tensor]) -> Tensor:
        """float64 (d,): the changes in their places, with zeros for missing modules and heads.

        Raises:
            ShapeError: a module or head has no place, or not its place's shape.
        """
        extra = sorted((set(changes) - set(self.modules)) | (set(heads) - set(self.heads)))
        if extra:
            raise ShapeError(f"{len(extra)} modules or heads have no place in the private vector, {extra[0]!r} first.")
        parts = []
        for name, bases in self.modules.items():
            there = name in changes
            part = bases.project(changes[name]) if there else torch.zeros(bases.shape, dtype=torch.float64)
            parts.append(part.reshape(-1))
        for name, shape in self.heads.items():
            head = heads.get(name)
            if head is not None and tuple(head.shape) != shape:
                raise ShapeError(f"the change of head {name!r} must be {shape}; got {tuple(head.shape)}.")
            head = torch.zeros(shape) if head is None else head.detach().cpu()
            parts.append(head.to(torch.float64).reshape(-1))
        return torch.cat(parts)

    def parts(self, vector: Tensor) -> tuple[dict[str, LoRA], dict[str, Tensor]]:
        """(module -> its part, lifted to a pair, head -> its part) from a vector (d,); all float64.

        Raises:
            ShapeError: the vector has another size.
        """
        if tuple(vector.shape) != (self.size,):
            raise ShapeError(f"a private vector must have ({self.size},) entries here; got {tuple(vector.shape)}.")
        X, at = vector.to(torch.float64), self.slices()
        modules = {name: bases.lift(X[at[name]].reshape(bases.shape)) for name, bases in self.modules.items()}
        return modules, {name: X[at[name]].reshape(shape) for name, shape in self.heads.items()}

    def slices(self) -> dict[str, slice]:
        """Module or head -> its entries in the vector, for comparing signal and noise part by part."""
        sizes = {name: b.size for name, b in self.modules.items()} | {n: math.prod(s) for n, s in self.heads.items()}
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = slice(at, at + size)
            at += size
        return found
