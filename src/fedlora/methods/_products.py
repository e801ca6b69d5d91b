"""A round's mean update over `fedlora.linalg`: as one SVD, the same cut to the clients' consensus, and as a pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, stack
from fedlora.core.method import Update
from fedlora.linalg import Budget, ConsensusMean, Contributions, Spectrum, consensus_means, unit_roundoff
from fedlora.linalg.product import product

# The least relative rounding of a direction, as in `linalg.rank_tolerance`: a gauge of condition 1e3 often multiplies
# the noise of float64 factors.
_LEAST_NOISE = 1e-11


def mean_product(updates: Sequence[Update]) -> Spectrum:
    """sum_i w_i B_i A_i in energy order: every component, and the level below which they may be rounding."""
    Bs, As = zip(*(u.lora.factors for u in updates), strict=True)
    noise = torch.tensor([_noise(u) for u in updates for _ in range(u.lora.rank)], dtype=torch.float64)
    weights = [u.weight for u in updates]
    return product(Bs, As, weights, tolerance=noise.to(Bs[0].device), dtype=Bs[0].dtype).spectrum()


def consensus(matrices: Sequence[Sequence[Update]], ranks: Sequence[int]) -> list[ConsensusMean]:
    """For each matrix, its mean within the R directions that most of its clients' updates span, and each client's U_i.

    Terms of nobody count in the mean, and have no vote.
    """
    return consensus_means([_sent(updates) for updates in matrices], [Budget(rank) for rank in ranks])


def spectrum_of(seed: LoRA) -> Spectrum:
    """The common start in energy order; no components if it is fresh (B = 0)."""
    return mean_product([Update(None, 1.0, seed.rank, seed, unit_roundoff(seed.factors[0].dtype))])


def balanced(spectrum: Spectrum, chosen: Tensor | None = None) -> LoRA:
    """The pair of the chosen components (None: all), with sqrt(s) on both factors."""
    at = torch.arange(spectrum.rank) if chosen is None else chosen
    root = spectrum.s[at].sqrt()
    return LoRA(spectrum.U[:, at] * root, root[:, None] * spectrum.Vh[at])


def told(spectrum: Spectrum) -> dict[str, object]:
    """What a method that keeps its update as a `Spectrum` has to say of it."""
    return {
        "rank": spectrum.sound, "components": spectrum.rank, "rounding": spectrum.rounding,
        "singular_values": spectrum.s.tolist(),
    }  # fmt: skip


def _sent(updates: Sequence[Update]) -> Contributions:
    clients = [u for u in updates if u.client is not None]
    others = [(u.weight, u.lora) for u in updates if u.client is None]
    dtype = updates[0].lora.factors[0].dtype
    rest = stack([x.map(Tensor.double) for _, x in others], [w for w, _ in others]) if others else None
    return Contributions(
        pairs=[u.lora.factors for u in clients],
        weights=[u.weight for u in clients],
        roundoffs=[u.roundoff for u in clients],
        tolerances=[_noise(u) for u in clients],
        rest=None if rest is None else rest.map(lambda t: t.to(dtype)).factors,
        stored_in=dtype,
    )


def _noise(update: Update) -> float:
    return max(update.roundoff, _LEAST_NOISE)
