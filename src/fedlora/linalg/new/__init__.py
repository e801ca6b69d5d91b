"""Thin-matrix numerics for the matrices of a round; no (d_out, d_in) matrix is formed.

`factored` Q R of tall columns; `gauge` each client's subspace; `consensus` what a budget keeps; `product` a sum of
products as its SVD, its error measured; `spectrum` that SVD as it is stored; `stacks` many small matrices at once.
"""

from .basics import norm, rank_tolerance, unit_roundoff, weighted_mean
from .gauge import gauge, gauges
from .product import Projection, Term, all_projected, projected
from .spectrum import Spectrum

__all__ = [
    "Projection",
    "Spectrum",
    "Term",
    "all_projected",
    "gauge",
    "gauges",
    "norm",
    "projected",
    "rank_tolerance",
    "unit_roundoff",
    "weighted_mean",
]
