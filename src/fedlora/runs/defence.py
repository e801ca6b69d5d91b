"""[defence]: a run's or federation's robust rule, by name, with its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, cast

from pydantic import Field, StrictFloat, StrictInt, ValidationInfo, field_validator, model_validator

from fedlora.core.method import Method
from fedlora.core.multiplied import TakesMultipliers
from fedlora.errors import ConfigError, HyperparameterError
from fedlora.server.robust_rules import CentredClipping, Clip, GeometricMedian, Krum, Mixing, MultiKrum, Rule
from fedlora.training.settings import Section

RuleName = Literal["none", "clip", "geometric-median", "krum", "multi-krum", "centred-clipping"]
_RULES: Mapping[str, type[Any]] = {
    rule.name: rule for rule in (Clip, GeometricMedian, Krum, MultiKrum, CentredClipping)
}
_OWN: Mapping[str, tuple[str, ...]] = {  # rule -> its keys, except `liars` and `mixing`
    "none": (),
    **{name: tuple(f.name for f in fields(rule) if f.name != "liars") for name, rule in _RULES.items()},
}
_NEEDS_LIARS = {  # rules for which `liars` is required
    name for name, rule in _RULES.items() for f in fields(rule) if f.name == "liars" and f.default is MISSING
}
Norm = Annotated[float, Field(gt=0)] | Literal["median"]


class DefenceSection(Section):
    """Limits clients that lie: a rule weights the clients' changes by how far they are from each other.

    docs/how-to/robust-rules.md has the theory.

    rule: the rule's name, or "none". liars: how many clients per round it must tolerate, as a number or a share (below
    0.5); krum, multi-krum and mixing need it; with the other rules it is optional, and they then refuse rounds of too
    few clients. mixing: first replace each change by the mean of its nearest ones. threshold: for clip, a norm or
    "median" (the default). tau: for centred-clipping, a norm or "median" (the default). iterations: for
    centred-clipping their number (default 3), for geometric-median the most (default 1000). tolerance: for
    geometric-median (default 1e-10). factor_averages: allow methods that average factors, for which the rule bounds
    nothing; without it they are refused.
    """

    rule: RuleName = "none"
    liars: StrictInt | StrictFloat | None = None
    mixing: bool = False
    threshold: Norm | None = None
    tau: Norm | None = None
    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    iterations: Annotated[int, Field(ge=1)] | None = None
    factor_averages: bool = False

    @field_validator("liars", "threshold", "tau", mode="before")
    @classmethod
    def _in_words(cls, value: object, of: ValidationInfo) -> object:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if of.field_name == "liars":
            if value is not None and not number:
                raise ValueError("how many clients per round may lie, a number (2) or a share (0.2)")
        elif not (value in (None, "median") or (number and cast("float", value) > 0)):
            raise ValueError("a norm above 0, or 'median'")
        return value

    @model_validator(mode="after")
    def _whole(self) -> DefenceSection:
        if self.rule == "none":
            return self
        if self.liars is None and (self.mixing or self.rule in _NEEDS_LIARS):
            who = "defence.mixing" if self.mixing else f"defence.rule = {self.rule!r}"
            raise ValueError(
                f"{who} needs defence.liars: how many clients per round may lie, a number (2) or a share (0.2); it has "
                f"no sensible default"
            )
        try:
            self.build()
        except HyperparameterError as error:
            raise ValueError(str(error)) from error
        return self

    def idle(self) -> Iterator[tuple[str, str]]:
        """Every key that has no effect with the rule, set or not, and why."""
        for key in DefenceSection.model_fields:
            of = " and ".join(rule for rule, keys in _OWN.items() if key in keys)
            if of and key not in _OWN[self.rule]:
                yield f"defence.{key}", f"it is for {of}, but defence.rule = {self.rule!r}"
        if self.rule == "none":
            for key in ("liars", "mixing"):
                yield f"defence.{key}", "it is for a robust rule, but defence.rule = 'none'. Name one ('multi-krum')"

    def build(self) -> Rule | None:
        """The rule; None for "none"."""
        if self.rule == "none":
            return None
        own = {key: value for key in _OWN[self.rule] if (value := getattr(self, key)) is not None}
        made: Rule = _RULES[self.rule](**own, **({} if self.liars is None else {"liars": self.liars}))
        if not self.mixing or self.liars is None:
            return made
        return Mixing(made, self.liars, factor_averages=self.factor_averages)


def check_rule(rule: Rule, method: Method[Any], ranks: Sequence[Mapping[str, int]], p: Sequence[float]) -> str | None:
    """Check that the rule can weight a round of clients with these weights.

    Args:
        ranks: module -> r, for every client. p: the largest weight that each client of a round can have.

    Returns:
        A warning if the liars could hold more than a third of the total weight, so that a little more is too much.

    Raises:
        ConfigError: no round could be weighted.
    """
    clients = len(p)
    if few := rule.overcome(p):
        raise ConfigError(
            f"defence.rule: {few}, but a round has {clients}. Use more clients, fewer liars, "
            f'server.weighting = "uniform", or another rule.'
        )
    _check_ranks(method, ranks, clients)
    if (held := rule.liars_hold(p)) <= 1 / 3 + 1e-9:
        return None
    return (
        f"{rule.name}: {rule.declared(clients)} of {clients} clients can hold {held:.0%} of what it counts. Above one "
        f"third their influence grows fast, and at one half they decide"
    )


def _check_ranks(method: Method[Any], ranks: Sequence[Mapping[str, int]], clients: int) -> None:
    """Raise `ConfigError` if a round has more columns than the method's options can represent."""
    if isinstance(method, TakesMultipliers):
        held = [
            sorted((2 * r[name] for r in ranks if name in r), reverse=True) for name in {m for r in ranks for m in r}
        ]
        try:
            method.require_multipliers(max((sum(widths[:clients]) for widths in held), default=None))
        except HyperparameterError as error:
            raise ConfigError(f"defence.rule: {error}") from error


__all__ = ["DefenceSection", "RuleName", "check_rule"]
