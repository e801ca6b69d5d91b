"""Thin-matrix numerics in torch alone: gauge, consensus subspace, spectra. No d_out x d_in matrix below S = d.

`basics` shared basics; `batches` many small matrices in few calls; `gauge` one client's factors; `shortest` a sum of
products as one pair; `distinct` columns that pairs share; `spectrum` an update in energy order; `product` the same for
pairs side by side; `consensus` the mean update of a round, cut or whole, written to be read; `fast` replaces it where
that is safe.
"""

from fedlora.linalg.basics import eigh, gram, norm, rank_tolerance, right_svd, unit_roundoff
from fedlora.linalg.consensus import Budget, ConsensusMean, Contributions, consensus_mean, consensus_of_sums
from fedlora.linalg.distinct import distinct
from fedlora.linalg.fast import consensus_means
from fedlora.linalg.gauge import Canonical, gauge_fix, gauge_splits
from fedlora.linalg.product import svd_of_product
from fedlora.linalg.shortest import shortest
from fedlora.linalg.spectrum import Spectrum, svd_of_matrix, with_canonical_signs
from fedlora.linalg.weighted_mean import weighted_mean

__all__ = [
    "Budget",
    "Canonical",
    "ConsensusMean",
    "Contributions",
    "Spectrum",
    "consensus_mean",
    "consensus_means",
    "consensus_of_sums",
    "distinct",
    "eigh",
    "gauge_fix",
    "gauge_splits",
    "gram",
    "norm",
    "rank_tolerance",
    "right_svd",
    "shortest",
    "svd_of_matrix",
    "svd_of_product",
    "unit_roundoff",
    "weighted_mean",
    "with_canonical_signs",
]
