"""Choose a round's clients: a pure function of the seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed


def sample_clients(clients: Sequence[str], fraction: float, *, seed: int, round: int) -> list[str]:
    """The clients of one round, sorted: max(1, round(fraction * n)) of them, without replacement.

    A function of (seed, round) and the set of clients only. Source: docs/explanation/methods.md, client selection.

    Example:
        >>> len(sample_clients(["a", "b", "c", "d"], 0.5, seed=0, round=0))
        2
    """
    if not clients:
        raise ConfigError("there are no clients to sample from.")
    if not 0 < fraction <= 1:
        raise ConfigError(f"participation is a share in (0, 1]; got {fraction}.")
    size = max(1, math.floor(fraction * len(clients) + 0.5))
    return sorted(random.Random(derive_seed(seed, "select", round)).sample(sorted(clients), size))
