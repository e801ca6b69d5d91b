"""The available attacks: what each does, what its strength means, and what it must know."""

from __future__ import annotations

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
    """One kind of attack. does: in words, c_i being what honest training would have added. source: who described it.
    strength: the number's meaning, "" if there is none; default: its value, None if a formula gives it. colludes: it
    uses what others send. pairs: it needs rounds in which both factors travel."""

    does: str
    source: str
    strength: str = ""
    default: float | None = None
    colludes: bool = False
    pairs: bool = False


KINDS: Mapping[Kind, About] = MappingProxyType({
    "sign-flip": About("-s c_i, its own change reversed", "folklore", "s", 1.0),
    "scale": About("s c_i, its own change enlarged", "Bagdasaryan et al. 2020, model replacement", "s", 10.0),
    "alie": About("mean - z sd of the honest changes, entry by entry", "Baruch et al. 2019",
                  "z; without it the paper's z_max", None, colludes=True),
    "inner-product": About("-e times the mean of the honest changes", "Xie et al. 2020", "e", 1.0, colludes=True),
    "label-flip": About("trains honestly on reversed labels, class k of C as C - 1 - k", "Fang et al. 2020"),
    "free-rider": About("its readout unchanged; or noise of the size of an honest change", "Lin et al. 2019",
                        colludes=True),
    "subspace-insertion": About("a tiny change in directions that no honest client has", "fedlora",
                                "its size, in honest changes", 0.05, colludes=True, pairs=True),
    "gauge": About("the same update as (B Q, Q^-1 A)", "fedlora", "the condition of Q", 1e6, pairs=True),
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
        about, least = self.about, 1.0 if self.kind == "gauge" else 0.0
        if self.strength is not None and not about.strength:
            raise HyperparameterError(f"the attack {self.kind} has no strength; got {self.strength}. Leave it out.")
        if self.strength is not None and not (least <= self.strength < float("inf") and self.strength > 0):
            raise HyperparameterError(
                f"the strength of {self.kind} ({about.strength}) must be a finite number > 0, for a gauge >= 1; got "
                f"{self.strength}."
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
        about, value = self.about, self.about.default if self.strength is None else self.strength
        said = []
        if about.strength and value is None:
            said.append("z = z_max")
        elif about.strength:
            name = {"its size, in honest changes": "size", "the condition of Q": "condition"}.get(about.strength)
            said.append(f"{name or about.strength[0]} = {value:g}")
        said += ["noise"] * self.noise
        return self.kind + (f" ({', '.join(said)})" if said else "")
