"""The available attacks: what each does, what its strength means, and what it must know. docs/how-to/attacks.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from fedlora.errors import HyperparameterError

Kind = Literal[
    "sign-flip", "scale", "alie", "inner-product", "label-flip", "free-rider", "subspace-insertion", "gauge"
]  # fmt: skip


@dataclass(frozen=True)
class About:
    """One kind of attack. strength: the number's name, "" if there is none; default: its value, None if a formula gives
    it. pairs: it needs rounds in which both factors travel."""

    strength: str = ""
    default: float | None = None
    pairs: bool = False


# c_i: what honest training would have added.
KINDS: Mapping[Kind, About] = MappingProxyType({
    "sign-flip": About("s", 1.0),  # -s c_i
    "scale": About("s", 10.0),  # s c_i; Bagdasaryan et al. 2020, model replacement
    "alie": About("z", None),  # mean - z sd of the honest changes; Baruch et al. 2019, and their z_max
    "inner-product": About("e", 1.0),  # -e times the mean of the honest changes; Xie et al. 2020
    "label-flip": About(),  # trains honestly on labels C - 1 - k of C classes; Fang et al. 2020
    "free-rider": About(),  # its readout unchanged, or noise of an honest size; Lin et al. 2019
    "subspace-insertion": About("size", 0.05, pairs=True),  # in honest changes, in new directions
    "gauge": About("condition", 1e6, pairs=True),  # the same update as (B Q, Q^-1 A), Q of that condition
})  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One attack. strength: as in `KINDS`, None for its default. noise: whether a free rider hides behind noise.

    Raises:
        HyperparameterError: no such attack, an invalid strength, or a strength for a kind without one.

    Example:
        >>> Attack("sign-flip").words
        'sign-flip (s = 1)'
    """

    kind: Kind
    strength: float | None = None
    noise: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HyperparameterError(f"an attack must be one of {', '.join(KINDS)}; got {self.kind!r}.")
        name, strength, least = self.about.strength, self.strength, 1.0 if self.kind == "gauge" else 0.0
        if strength is not None and not name:
            raise HyperparameterError(f"the attack {self.kind} has no strength; got {strength}. Leave it out.")
        if strength is not None and not (least <= strength < math.inf and strength > 0):
            raise HyperparameterError(
                f"the strength of {self.kind} ({name}) is a finite number > 0, of a gauge >= 1; got {strength}."
            )
        if self.noise and self.kind != "free-rider":
            raise HyperparameterError(f"noise is for a free-rider; the attack is {self.kind}.")

    @property
    def about(self) -> About:
        """Its entry in `KINDS`."""
        return KINDS[self.kind]

    @property
    def words(self) -> str:
        """The attack with its strength, for a report."""
        value = self.about.default if self.strength is None else self.strength
        detail = f"{self.about.strength} = {'z_max' if value is None else f'{value:g}'}" if self.about.strength else ""
        detail = "noise" if self.noise else detail
        return f"{self.kind} ({detail})" if detail else self.kind
