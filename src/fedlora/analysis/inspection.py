"""What an adapter contains, and how two adapters differ: norms, spectra, dead slots, subspaces, gauge.

All of it works on factor pairs. Numbers about the update do not depend on the gauge; those about factors say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.adapters.reader import AdapterFile
from fedlora.core.lora import LoRA, stack
from fedlora.errors import ShapeError
from fedlora.linalg import Term, norm, projected_sum, svd_of_product, unit_roundoff

_SAME = 1e-5  # the rounding that float32 storage leaves


@dataclass(frozen=True)
class Facts:
    """Numbers about one module's update. rank: its slots; numerical: the rank of B A; effective: exp of the entropy of
    the energy shares, the number of directions really used; dead: slots that can never train (B and A both zero);
    balance: ||B|| / ||A||, which depends on the gauge."""

    rank: int
    numerical: int
    effective: float
    norm: float
    dead: int
    balance: float
    singular_values: tuple[float, ...]


def facts(lora: LoRA) -> Facts:
    """The facts of one update.

    Example:
        >>> found = facts(LoRA(torch.ones(6, 2), torch.ones(2, 5)))
        >>> found.rank, found.numerical
        (2, 1)
    """
    B, A = (t.double() for t in lora.factors)
    spectrum = svd_of_product(B, A, max(unit_roundoff(t.dtype) for t in lora.factors))
    largest = float(spectrum.s[0]) if spectrum.rank else 1.0
    energy = (spectrum.s / largest).square()  # squares of tiny numbers are zero
    shares = energy / energy.sum() if spectrum.rank else energy
    size_A = float(norm(A))
    return Facts(
        rank=lora.rank,
        numerical=spectrum.sound,
        effective=math.exp(-float((shares * shares.log()).sum())) if spectrum.rank else 0.0,
        norm=float(energy.sum().sqrt()) * largest,
        dead=int(((B == 0).all(dim=0) & (A == 0).all(dim=1)).sum()),
        balance=float(norm(B)) / size_A if size_A else math.inf,
        singular_values=tuple(float(s) for s in spectrum.s),
    )


def overlap(one: LoRA, other: LoRA) -> float:
    """How much of the smaller column space lies in the larger: the mean squared cosine of their principal angles.

    Raises `ShapeError` if they belong to different matrices.

    Example:
        >>> lora = uploads[0].adapter.modules["q"]
        >>> round(overlap(lora, lora), 6)
        1.0
    """
    _check_same_matrix(one, other)
    U, V = (_columns(lora) for lora in (one, other))
    if not U.shape[1] or not V.shape[1]:
        return 0.0
    cosines = torch.linalg.svdvals(U.mT @ V)
    return float(cosines.square().sum() / min(U.shape[1], V.shape[1]))


@dataclass(frozen=True)
class ModuleDifference:
    """The difference of two adapters. update: ||X - Y|| / ||X||; B, A: the same for the factors, None if their ranks
    differ; angle: the largest principal angle of the column spaces, in degrees."""

    update: float
    B: float | None
    A: float | None
    angle: float

    @property
    def verdict(self) -> str:
        """The difference in words; "same" means within 1e-5."""
        if self.update <= _SAME:
            same = self.B is not None and self.A is not None and max(self.B, self.A) <= _SAME
            return "the same factors" if same else "the same update in another gauge"
        return "another update"


def difference(one: LoRA, other: LoRA) -> ModuleDifference:
    """The difference of two updates of one matrix. Raises `ShapeError` if they belong to different matrices.

    Example:
        >>> lora = uploads[0].adapter.modules["q"]
        >>> difference(lora, LoRA(lora.B * 2, lora.A / 2)).update < 1e-6  # the same update in another gauge
        True
    """
    _check_same_matrix(one, other)
    gap = stack([one.map(Tensor.double), other.map(Tensor.double)], [1.0, -1.0]).norm()
    size = one.norm()
    U, V = _columns(one), _columns(other)
    if U.shape[1] and U.shape[1] == V.shape[1]:
        sine = float(torch.linalg.matrix_norm(V - U @ (U.mT @ V), ord=2))  # exact for small angles, where acos is not
        angle = math.degrees(math.asin(min(1.0, sine)))
    else:
        angle = 0.0 if U.shape[1] == V.shape[1] else 90.0
    return ModuleDifference(
        update=gap / size if size else (math.inf if gap else 0.0),
        B=_relative(one.factors[0], other.factors[0]),
        A=_relative(one.factors[1], other.factors[1]),
        angle=angle,
    )


def _check_same_matrix(one: LoRA, other: LoRA) -> None:
    shapes = [(B.shape[0], A.shape[1]) for B, A in (one.factors, other.factors)]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"one update has shape {shapes[0]}, the other {shapes[1]}: they belong to different models.")


def _columns(lora: LoRA) -> Tensor:
    """An orthonormal basis of the update's column space, float64."""
    term = Term(*lora.factors, 1.0, unit_roundoff(lora.factors[0].dtype), votes=True)
    return projected_sum([term], dtype=torch.float64).bases[0]


def _relative(one: Tensor, other: Tensor) -> float | None:
    if one.shape != other.shape:
        return None
    size = float(norm(one))
    gap = float(norm(one.double() - other.double()))
    return gap / size if size else (math.inf if gap else 0.0)


# ------------------------------------------------------------------------------------------------ of adapters as files


def heads_apart(one: AdapterFile, other: AdapterFile) -> dict[str, float]:
    """Differing tensor of a saved module -> ||X - Y|| / ||X||; inf if one adapter lacks it or has another shape. Equal
    means within 1e-5, as in `ModuleDifference`."""
    found = {}
    for name in sorted({*one.heads, *other.heads}):
        apart = math.inf
        if name in one.heads and name in other.heads:
            gap = _relative(one.head(name).double(), other.head(name).double())
            apart = math.inf if gap is None else gap
        if apart > _SAME:
            found[name] = apart
    return found


def mean_overlap(one: AdapterFile, other: AdapterFile) -> float:
    """The mean `overlap` over the modules that both adapters have; 0 if there are none."""
    common = sorted(set(one.modules) & set(other.modules))
    return math.fsum(overlap(one.lora(m), other.lora(m)) for m in common) / len(common) if common else 0.0
