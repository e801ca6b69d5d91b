"""Thin-matrix numerics for the matrices of a round; no (d_out, d_in) matrix is formed.

`factored` Q R of tall columns; `product` a sum of products in their coordinates; `gauge` each client's subspace;
`consensus` what a budget keeps; `projection` the result in energy order, its error measured; `spectrum` how that is
stored; `stacks` many small matrices at once.
"""

from .basics import norm, rank_tolerance, unit_roundoff, weighted_mean
from .product import Term
from .projection import ProjectedSum, projected_sum, projected_sums
from .spectrum import Spectrum

__all__ = [
    "ProjectedSum",
    "Spectrum",
    "Term",
    "norm",
    "projected_sum",
    "projected_sums",
    "rank_tolerance",
    "unit_roundoff",
    "weighted_mean",
]
