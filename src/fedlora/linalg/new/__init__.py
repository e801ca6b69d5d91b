"""Thin-matrix numerics for the matrices of a round; no (d_out, d_in) matrix is formed.

`factored` Q R of tall columns; `product` a sum of products in their coordinates; `gauge` each client's subspace;
`consensus` what a budget keeps; `mean` the result as its SVD, its error measured; `spectrum` that SVD as it is stored;
`stacks` many small matrices at once.
"""

from .basics import norm, rank_tolerance, unit_roundoff, weighted_mean
from .mean import Mean, mean_product, mean_products
from .product import Term
from .spectrum import Spectrum

__all__ = [
    "Mean",
    "Spectrum",
    "Term",
    "mean_product",
    "mean_products",
    "norm",
    "rank_tolerance",
    "unit_roundoff",
    "weighted_mean",
]
