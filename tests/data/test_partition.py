"""Partitions: *oracle* (the formula with plain lists), every index once, and the errors."""

from __future__ import annotations

import numpy as np
import pytest

from fedlora.data.partition import dirichlet, iid
from fedlora.errors import DataError
from fedlora.seeds import derive_seed

BALANCED = np.arange(3000) % 3


def plain_dirichlet(labels: list[int], clients: int, alpha: float, seed: int, min_size: int) -> list[list[int]]:
    """methods.md 12.2 with lists; int() of every cut, the last share takes what is left."""
    rng = np.random.default_rng(derive_seed(seed, "partition", "dirichlet"))
    while True:
        held: list[list[int]] = [[] for _ in range(clients)]
        for k in sorted(set(labels)):
            indices = list(rng.permutation([i for i, y in enumerate(labels) if y == k]))
            total, start = 0.0, 0
            prop = rng.dirichlet([alpha] * clients)
            for c in range(clients):
                total += prop[c]
                end = len(indices) if c == clients - 1 else int(total * len(indices))
                held[c] += indices[start:end]
                start = end
        if min(map(len, held)) >= min_size:
            return [list(rng.permutation(part)) for part in held]


@pytest.mark.parametrize(("alpha", "min_size"), [(0.1, 8), (0.5, 60), (10.0, 0)])
def test_dirichlet_is_the_written_formula(alpha, min_size):
    labels = [0] * 200 + [3] * 90 + [1] * 110  # unequal classes, 2 absent; rows 1 and 2 redraw at this seed
    expected = plain_dirichlet(labels, 4, alpha, 10, min_size)
    for given_labels in (labels, np.array(labels)):
        parts = dirichlet(given_labels, 4, alpha, seed=10, min_size=min_size)
        assert [part.tolist() for part in parts] == expected and {part.dtype for part in parts} == {np.dtype("int64")}
    assert sorted(index for part in expected for index in part) == list(range(400))


@pytest.mark.parametrize(("size", "clients"), [(10, 3), (7, 7), (200, 20)])
def test_iid_deals_every_index_once_in_equal_sizes(size, clients):
    parts = iid(size, clients, seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))
    sizes = [len(part) for part in parts]
    assert len(sizes) == clients and max(sizes) - min(sizes) <= 1
    assert all(map(np.array_equal, parts, iid(size, clients, seed=1)))


def test_what_is_no_partition() -> None:
    for alpha in (0.0, float("nan"), 1e308):
        with pytest.raises(DataError, match="alpha must be in"):
            dirichlet(BALANCED, 3, alpha, seed=0)
    with pytest.raises(DataError, match="least 1 client"):
        dirichlet(BALANCED, 0, 0.5, seed=0)
    with pytest.raises(DataError, match=r"min_size >= 0; got 0.5 and -1"):
        dirichlet(BALANCED, 3, 0.5, seed=0, min_size=-1)
    with pytest.raises(DataError, match=r"clients=4, N=3"):
        iid(3, 4, seed=0)
    for labels in ([], [[0, 1], [1, 0]], ["a", "b"], [True, False], [0, 1, -1]):
        with pytest.raises(DataError, match="whole numbers >= 0"):
            dirichlet(labels, 1, 0.5, seed=0, min_size=0)
    with pytest.raises(DataError, match=r"1000 draws of Dir\(0.5\) .* 8 clients 29 of the 240 examples"):
        dirichlet(BALANCED[:240], 8, 0.5, seed=0, min_size=29)
