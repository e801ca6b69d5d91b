"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedlora.core.lora import LoRA

Shape = Literal["full", "left", "two-sided"]


@dataclass(frozen=True, eq=False)
class Bases:
    """Q (d_out, a) and P (d_in, b) of one module; None stands for the identity. d_out, d_in: of the module."""

    d_out: int
    d_in: int
    Q: Tensor | None = None
    P: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(a, b) of Q^T X P."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """a b: entries of the private vector that are this module's."""
        raise NotImplementedError

    def project(self, change: LoRA) -> Tensor:
        """Q^T (B A) P, float64 (a, b)."""
        raise NotImplementedError

    def lift(self, projected: Tensor) -> LoRA:
        """Q X P^T as a float64 pair of rank at most min(a, b)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Geometry:
    """In which space changes are summed: full (a = d_out, b = d_in), left (Q only), two-sided (Q and P)."""

    shape: Shape = "full"
    dims: int = 0  # a and b at most; not used by "full"

    def size(self, d_out: int, d_in: int) -> int:
        """a b of a module."""
        raise NotImplementedError

    def bases(self, released: LoRA, module: str, round: int, seed: int) -> Bases:
        """From the released update of the module (public) and public random directions of (seed, round, module)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Layout:
    """One private vector of all modules and heads: each module's Q^T X P, then each head, sorted by name."""

    modules: Mapping[str, Bases]
    heads: Mapping[str, tuple[int, ...]]  # head -> its shape

    @property
    def size(self) -> int:
        """d: entries of the whole vector."""
        raise NotImplementedError

    def vector(self, changes: Mapping[str, LoRA], heads: Mapping[str, Tensor]) -> Tensor:
        """float64 (d,): the changes in place; zeros for a module or head that is not there."""
        raise NotImplementedError

    def parts(self, vector: Tensor) -> tuple[dict[str, LoRA], dict[str, Tensor]]:
        """(module -> lifted pair, head -> tensor) of a vector (d,), all float64."""
        raise NotImplementedError
