"""The toy federations of the contracts, which live in the package: `fedlora.testing.federations`."""

from fedlora.testing.federations import (
    ALL_TRAINED,
    EQUAL,
    EXAMPLES,
    FULL,
    HEADS,
    MIXED,
    PARTIAL,
    SHAPES,
    Round,
    noise,
    pushed,
    rounds,
    seed_adapter,
)

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
