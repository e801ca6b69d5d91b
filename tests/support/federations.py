"""The toy federations of the contracts, which live in the package: `fedlora.testing.federations`."""

from fedlora.testing import federations
from fedlora.testing.federations import (  # noqa: F401
    ALL_TRAINED,
    EXAMPLES,
    HEADS,
    SHAPES,
    Round,
    noise,
    pushed,
    rounds,
    seed_adapter,
)  # fmt: skip

EQUAL, MIXED = federations.EQUAL[0], federations.MIXED[0]  # client -> rank
FULL = (("a", "b", "c", "d"),) * 3
PARTIAL = (("a", "b", "c"), ("b", "d"), ("a", "c", "d"))  # a and c miss the second round
