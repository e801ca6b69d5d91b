"""Robust rules: the multiplier of each client's change, from the changes' positions relative to each other.

    Server(build("glora"), rule=MultiKrum(liars=2))

Each rule is a frozen dataclass and a pure function of the changes' inner products (`geometry`, from `server.changes`)
and weights. `core.multiplied` applies multipliers to uploads; `server.judged` reports on a round.
"""

from fedlora.server.robust_rules.clipping import CentredClipping, Clip
from fedlora.server.robust_rules.geometric_median import GeometricMedian
from fedlora.server.robust_rules.geometry import Geometry, geometry_of
from fedlora.server.robust_rules.krum import Krum, MultiKrum
from fedlora.server.robust_rules.mixing import Mixing
from fedlora.server.robust_rules.rule import Liars, Rule, Weighed

__all__ = [
    "CentredClipping",
    "Clip",
    "GeometricMedian",
    "Geometry",
    "Krum",
    "Liars",
    "Mixing",
    "MultiKrum",
    "Rule",
    "Weighed",
    "geometry_of",
]
