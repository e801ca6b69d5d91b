"""Thin-matrix numerics for the matrices of a round; no (d_out, d_in) matrix is formed.

`factored` Q R of tall columns; `product` a sum of products in their coordinates; `consensus` each client's subspace,
and what a budget keeps; `projection` the result in energy order, its error measured; `spectrum` how that is stored;
`stacks` many small matrices at once.
"""

from fedlora.linalg.basics import norm, rank_tolerance, unit_roundoff, weighted_mean
from fedlora.linalg.factored import norm_of_product
from fedlora.linalg.product import Term
from fedlora.linalg.projection import Components, ProjectedSum, projected_sum, projected_sums, svd_of_product
from fedlora.linalg.spectrum import Spectrum

__all__ = [
    "Components", "ProjectedSum", "Spectrum", "Term", "norm", "norm_of_product", "projected_sum", "projected_sums",
    "rank_tolerance", "svd_of_product", "unit_roundoff", "weighted_mean",
]  # fmt: skip
