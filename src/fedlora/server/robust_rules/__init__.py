"""Robust rules: which multiplier each client's change gets, from where the changes lie beside each other.

    Server(build("glora"), rule=MultiKrum(liars=2))

Each rule is a frozen dataclass and a pure function of inner products of changes (`geometry`, made by `server.changes`)
and weights. What a multiplier does to an upload: `core.multiplied`. What is said of a round: `server.judged`.
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
