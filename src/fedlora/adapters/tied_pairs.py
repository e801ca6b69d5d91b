"""Checks pairs of modules that `ensure_weight_tying` makes one weight: a file has both, one transposed.

peft loads both into the same parameters, so the copy it loads last counts for both. If the copies differ, a file means
one thing to peft and another to everybody else.
"""

from __future__ import annotations

import math

from fedlora.core.lora import LoRA, stack
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError
from fedlora.linalg import unit_roundoff

_ROUNDING = 32  # units of the coarsest type: a merge may write the two copies in different coordinates


def check_tied(one: str, first: tuple[LoRA, float], other: str, second: tuple[LoRA, float]) -> None:
    """first, second: the pairs of the modules `one` and `other`, each with the scale of its product.

    Raises:
        AdapterFormatError: the two updates are neither equal nor each other's transpose, up to rounding.
    """
    ((B, A), s), ((D, C), t) = (first[0].factors, first[1]), (second[0].factors, second[1])
    rounding = max(unit_roundoff(factor.dtype) for factor in (B, A, D, C))
    own = LoRA(B.double(), A.double())
    apart, size = math.inf, s * own.norm()
    for pair in ((D, C), (C.mT, D.mT)):
        if (len(B), A.shape[1]) == (len(pair[0]), pair[1].shape[1]):
            tied = LoRA(pair[0].double(), pair[1].double())
            apart = min(apart, stack([own, tied], [s, -t]).norm())
    if apart > _ROUNDING * rounding * size:
        raise AdapterFormatError(
            f"ensure_weight_tying makes {quoted(one)} and {quoted(other)} one weight, but their updates differ by "
            f"{apart / size if size else math.inf:.2g} of their size: peft keeps one of the two for both. Save the "
            f"adapter again with peft; if its base model does not tie them, set ensure_weight_tying to false in its "
            f"adapter_config.json."
        )
