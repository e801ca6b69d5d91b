"""Attacks given by formulas: the change a hostile client claims, from the honest ones.

Each returns a `Change` to add to the client's own readout. mean and sd are over the round's honest clients, equally
weighted, and for each part over those that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist, median

from fedlora.attacks.spaces import Change, ChangeSpace
from fedlora.core.sent import Sent


def little(space: ChangeSpace, honest: Sequence[Change], z: float) -> Change:
    """mean - z sd: as far from the mean as an honest client may plausibly be, with all liars on one side.

    Source: Baruch, Baruch and Goldberg, "A Little Is Enough", NeurIPS 2019, algorithm 3; sign as in the public code.
    """
    return space.plus(space.mean(honest), space.spread(honest), -z)


def largest_z(clients: int, attackers: int) -> float:
    """z_max: the largest z at which enough honest clients lie farther out than the liars, if changes are normal.

    The liars need s = floor(n / 2 + 1) - m supporters among the n - m honest clients, and z_max = max {z : phi(z) <
    (n - m - s) / (n - m)}. At least 0, and finite even if the liars are so many that they need nobody (s < 1 counts as
    1). Small federations with few liars leave almost nothing: n = 15 and m = 3 give 0.21.

    Source: as for `little`, algorithm 3, lines 1 and 2.

    Example:
        >>> round(largest_z(50, 24), 3)  # s = 2, phi(z) = 24 / 26
        1.426
    """
    honest = clients - attackers
    supporters = max(1, clients // 2 + 1 - attackers)
    share = (honest - supporters) / honest if honest else 0.0
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def disguised(space: ChangeSpace, sent: Sent, honest: Sequence[Change], *seed: str | int) -> Change:
    """Noise in which every part has the median honest client's size."""
    random, sizes = space.noise(sent, *seed), [space.sizes(change) for change in honest]
    parts = {}
    for key, part in random.parts.items():
        wanted = [size[key] for size in sizes if key in size]
        now = space.size(part)
        factor = median(wanted) / now if wanted and now else 0.0
        parts[key] = space.weighted([part], [factor])
    return Change(parts)
