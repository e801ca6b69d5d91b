"""Chooses the byzantine clients, and flips labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedlora.errors import HyperparameterError
from fedlora.seeds import derive_seed


def choose_attackers(clients: Sequence[str], share: float, *, seed: int) -> tuple[str, ...]:
    """This share of the clients, rounded down, drawn by the seed; in the order of `clients`.

    A function of the names and the seed. A smaller share's attackers are among those of a larger one.

    Raises:
        HyperparameterError: a share outside (0, 1), or one that rounds to nobody.

    Example:
        >>> choose_attackers([f"site-{k}" for k in range(1, 6)], 0.4, seed=0)
        ('site-1', 'site-2')
    """
    if not 0 < share < 1:
        raise HyperparameterError(f"the share of attackers must be above 0 and below 1; got {share}.")
    count = math.floor(share * len(clients) + 1e-9)
    if count == 0:
        raise HyperparameterError(
            f"a share of {share:g} of {len(clients)} clients is less than one client; one attacker is a share of "
            f"{1 / max(1, len(clients)):.3g}. Raise it, or name the attackers."
        )
    drawn = set(sorted(clients, key=lambda name: derive_seed(seed, "attacker", name))[:count])
    return tuple(name for name in clients if name in drawn)


def flip_labels(labels: Sequence[int], classes: int) -> tuple[int, ...]:
    """Class k of C becomes C - 1 - k. The middle one of an odd number of classes stays the same.

    Raises:
        HyperparameterError: fewer than two classes.

    Example:
        >>> flip_labels([0, 1, 2, 2], classes=3)
        (2, 1, 0, 0)
    """
    if classes < 2:
        raise HyperparameterError(f"labels of {classes} classes cannot be flipped: at least two are needed.")
    return tuple(classes - 1 - label for label in labels)
