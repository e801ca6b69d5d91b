"""Assigns training examples to clients, with label skew (Dirichlet) or without (iid).

A partition is a list with one array of example indices per client; it contains every index exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedlora.errors import DataError
from fedlora.seeds import derive_seed

Indices = NDArray[np.int64]
Labels = Sequence[int] | NDArray[np.integer]
_DRAWS = 1000  # the most complete draws to try


def dirichlet(labels: Labels, clients: int, alpha: float, *, seed: int, min_size: int = 8) -> list[Indices]:
    """Deal the examples to clients with label skew: the clients' shares of class k follow Dir(alpha 1_n).

    alpha = 0.1 leaves most clients nearly one class, 0.5 is milder, 100 is close to iid. Sizes are unequal too.

        for each class k: shuffle its indices; prop ~ Dir(alpha 1_n); cut at (cumsum(prop) * len).astype(int)[:-1]
        repeat the whole draw until the smallest client has min_size examples; then shuffle within each client

    Args:
        labels: (N,) whole numbers >= 0, the class of each example.
        clients: n, at least 1.
        alpha: concentration, > 0 and at most 1e9. Smaller means more skew.
        seed: the run's seed; the stream is `derive_seed(seed, "partition", "dirichlet")`.
        min_size: fewest examples per client, >= 0. Conditioning on it reduces the skew a little.

    Returns:
        n arrays of indices into `labels`, int64, every index exactly once.

    Raises:
        DataError: labels are not whole numbers >= 0, clients, alpha or min_size is invalid, clients * min_size exceeds
            N, or none of 1000 draws gave every client min_size examples.

    Source: FedScope's `dirichlet_distribution_noniid_slice` (which redraws until min_size = 1; 8 is our choice).

    Example:
        >>> parts = dirichlet([0, 1] * 50, clients=3, alpha=1.0, seed=0)
        >>> sum(len(part) for part in parts)
        100
    """
    y = np.asarray(labels)
    if y.ndim != 1 or y.size == 0 or y.dtype.kind not in "iu" or y.min() < 0:
        raise DataError(
            f"labels must be one non-empty list of whole numbers >= 0, each example's class; got {y.dtype} of shape "
            f"{y.shape}. Without classes use iid()."
        )
    if not 0 < alpha <= 1e9 or min_size < 0:  # numpy's sums overflow for a huge alpha
        raise DataError(f"alpha must be in (0, 1e9], and min_size >= 0; got {alpha} and {min_size}.")
    if clients < 1 or clients * min_size > y.size:
        raise DataError(
            f"{clients} clients with {min_size} examples each need {clients * min_size}, and there are {y.size}; at "
            f"least 1 client is needed."
        )
    rng = np.random.default_rng(derive_seed(seed, "partition", "dirichlet"))
    classes = [np.flatnonzero(y == k) for k in np.unique(y)]
    for _ in range(_DRAWS):
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for members in classes:
            shuffled = rng.permutation(members)
            prop = rng.dirichlet(np.full(clients, alpha))
            cuts = (np.cumsum(prop) * len(shuffled)).astype(int)[:-1]
            for mine, piece in zip(pieces, np.split(shuffled, cuts), strict=True):
                mine.append(piece)
        if min(sum(len(piece) for piece in mine) for mine in pieces) >= min_size:
            return [rng.permutation(np.concatenate(mine)) for mine in pieces]
    raise DataError(
        f"none of {_DRAWS} draws of Dir({alpha}) gave each of {clients} clients {min_size} of the {y.size} "
        f"examples. Use fewer clients, a smaller min_size or a larger alpha."
    )


def iid(size: int, clients: int, *, seed: int) -> list[Indices]:
    """Deal the examples to clients at random, with sizes that differ by at most one: for data without labels, and as
    the control without skew.

    Args:
        size: N, the number of examples.
        clients: n, at least 1 and at most N.
        seed: the run's seed; the stream is `derive_seed(seed, "partition", "iid")`.

    Returns:
        n arrays of indices below N, int64, every index exactly once. The first N mod n clients hold one more.

    Raises:
        DataError: clients < 1, or fewer examples than clients.

    Example:
        >>> [len(part) for part in iid(10, clients=3, seed=0)]
        [4, 3, 3]
    """
    if not 1 <= clients <= size:
        raise DataError(f"there must be at least 1 client, and an example for each; got {clients=}, N={size}.")
    rng = np.random.default_rng(derive_seed(seed, "partition", "iid"))
    return np.array_split(rng.permutation(size).astype(np.int64), clients)
