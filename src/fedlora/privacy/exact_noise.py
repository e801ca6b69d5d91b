"""Exact discrete Gaussian noise on integers.

It uses opendp's `make_gaussian`: the sampler of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential
Privacy" (2020), with the system's cryptographic randomness. It takes about 13 microseconds per entry (measured on one
core), so 13 seconds per round for a million entries. We never use torch's generators or Python's `random` here: torch's
CPU generator keeps only 32 bits of its seed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fedlora.privacy import extras

_AT_ONCE = 2**13  # entries drawn per call, for which Ctrl-C waits


def with_noise(total: Tensor, scale: float) -> Tensor:
    """int64 (d,): each entry plus an independent N_Z(0, scale^2). The caller has checked that both fit.

    Raises:
        HyperparameterError: opendp is missing.
    """
    measure = _measurement(scale)
    starts = range(0, len(total), _AT_ONCE)
    parts = (measure(total[at : at + _AT_ONCE].tolist()) for at in starts)
    return torch.cat([torch.tensor(part, dtype=torch.int64) for part in parts])


@functools.lru_cache(maxsize=16)
def _measurement(scale: float) -> Any:
    """A function from a list of integers to the list with noise."""
    dp = extras.opendp()
    dp.enable_features("contrib")
    return dp.m.make_gaussian(dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float), scale=scale)
