"""The toy federations of the contracts, which live in the package: `fedlora.testing.federations`."""

from fedlora.testing.federations import (
    ALL_TRAINED,
    EXAMPLES,
    HEADS,
    SHAPES,
    Round,
    noise,
    pushed,
    rounds,
    seed_adapter,
)
from fedlora.testing.federations import EQUAL as _EQUAL
from fedlora.testing.federations import MIXED as _MIXED

EQUAL, MIXED = _EQUAL[0], _MIXED[0]  # client -> rank
FULL = (("a", "b", "c", "d"),) * 3
PARTIAL = (("a", "b", "c"), ("b", "d"), ("a", "c", "d"))  # a and c miss the second round

__all__ = [
    "ALL_TRAINED",
    "EQUAL",
    "EXAMPLES",
    "FULL",
    "HEADS",
    "MIXED",
    "PARTIAL",
    "SHAPES",
    "Round",
    "noise",
    "pushed",
    "rounds",
    "seed_adapter",
]
