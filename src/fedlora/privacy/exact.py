"""Arithmetic of the private sum without rounding: norms of integers, and exact discrete Gaussian noise.

The noise is opendp's `make_gaussian`: the sampler of Canonne, Kamath and Steinke, "The Discrete Gaussian for
Differential Privacy" (2020), with the system's cryptographic randomness. It takes about 13 microseconds an entry on one
core. torch's generators and Python's `random` are never used here: torch's CPU generator keeps 32 bits of its seed.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError

_LIMB = 21  # bits: a product of two limbs has 42, and 2^20 such products sum to less than 2^62
_BLOCK = 2**20
LARGEST = 2 ** (2 * _LIMB) - 1  # the largest allowed absolute value
_AT_ONCE = 2**13  # entries drawn per call, for which Ctrl-C waits


def squared_norm(integers: Tensor) -> int:
    """sum x^2 of an int64 vector as a Python integer, exact for absolute values up to 2^42 - 1.

    Each |x| is h 2^21 + l, so that x^2 = h^2 2^42 + 2 h l 2^21 + l^2, and each of the three sums fits int64.

    Raises:
        OverflowError: an entry is larger.
    """
    total = 0
    for block in torch.split(integers, _BLOCK):
        if int(block.max()) > LARGEST or int(block.min()) < -LARGEST:  # before abs: abs(-2^63) overflows to itself
            raise OverflowError(f"an entry is larger than 2^{2 * _LIMB} - 1")
        size = block.abs()
        high, low = size >> _LIMB, size & (2**_LIMB - 1)
        total += int((high * high).sum()) << (2 * _LIMB)
        total += int((high * low).sum()) << (_LIMB + 1)
        total += int((low * low).sum())
    return total


def held(integers: Tensor, bound: int) -> Tensor:
    """The vector, shrunk if its norm exceeds `bound` until it does not, in exact arithmetic.

    |x| becomes floor(|x| bound / N) with N = ceil of its norm, so that the squares sum to at most bound^2.
    """
    squared = squared_norm(integers) if integers.numel() else 0
    if squared <= bound * bound:
        return integers
    over = math.isqrt(squared - 1) + 1
    shrunk = [(abs(x) * bound // over) * (1 if x > 0 else -1) for x in integers.tolist()]
    return torch.tensor(shrunk, dtype=torch.int64)


def with_noise(total: Tensor, scale: float) -> Tensor:
    """int64 (d,): each entry plus an independent N_Z(0, scale^2). The caller has checked that both fit.

    Raises:
        HyperparameterError: opendp is missing.
    """
    measure = _measurement(scale)
    return torch.cat([torch.tensor(measure(part.tolist()), dtype=torch.int64) for part in torch.split(total, _AT_ONCE)])


@functools.lru_cache(maxsize=16)
def _measurement(scale: float) -> Any:
    """A function from a list of integers to the list with noise."""
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise missing("opendp, which draws the noise", error) from error
    dp.enable_features("contrib")
    return dp.m.make_gaussian(dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float), scale=scale)


def missing(library: str, error: ImportError) -> HyperparameterError:
    """The error for one of privacy's two libraries that cannot be imported. library: its name, and what it does."""
    return HyperparameterError(
        f"privacy needs the library {library}; it cannot be imported ({error}). Nothing replaces it: pip install "
        f"'fedlora[privacy]'."
    )
