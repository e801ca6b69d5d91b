"""[robust]: a run's or federation's robust rule, by name, with its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, StrictFloat, StrictInt, ValidationInfo, field_validator, model_validator

from fedlora.errors import ConfigError, HyperparameterError
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping, Rule
from fedlora.training.settings import Section

RuleName = Literal["none", "norm-clipping", "geometric-median", "krum", "multi-krum", "centered-clipping"]
_RULES: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {  # rule -> its class, and its keys beside byzantine and nnm
    "norm-clipping": (NormClipping, ("threshold",)),
    "geometric-median": (GeometricMedian, ("tolerance", "iterations")),
    "krum": (Krum, ()),
    "multi-krum": (MultiKrum, ()),
    "centered-clipping": (CenteredClipping, ("tau", "iterations")),
}
_NEED_BYZANTINE = ("krum", "multi-krum")
Norm = Annotated[float, Field(gt=0)] | Literal["median"]


class RobustSection(Section):
    """Limits byzantine clients: a rule weighs the clients' changes by how far they are from each other.

    docs/how-to/robust-rules.md has the theory.

    rule: the rule's name, or "none". byzantine: how many clients per round it must tolerate, as a number or a share
    (below 0.5); krum, multi-krum and nnm need it; with the other rules it is optional, and they then refuse rounds of
    too few clients. nnm: first replace each change by the mean of its nearest ones. threshold: for norm-clipping, a
    norm or "median" (the default). tau: for centered-clipping, a norm or "median" (the default). iterations: for
    centered-clipping their number (default 3), for geometric-median the most (default 1000). tolerance: for
    geometric-median, the largest change of a coefficient at which it stops (default 1e-10).
    """

    rule: RuleName = "none"
    byzantine: StrictInt | StrictFloat | None = None
    nnm: bool = False
    threshold: Norm | None = None
    tau: Norm | None = None
    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    iterations: Annotated[int, Field(ge=1)] | None = None

    @field_validator("byzantine", "threshold", "tau", mode="before")
    @classmethod
    def _in_words(cls, value: object, of: ValidationInfo) -> object:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if of.field_name == "byzantine":
            if value is not None and not number:
                raise ValueError("how many clients per round may be byzantine, a number (2) or a share (0.2)")
        elif not (value in (None, "median") or (number and cast("float", value) > 0)):
            raise ValueError("a norm above 0, or 'median'")
        return value

    @model_validator(mode="after")
    def _whole(self) -> RobustSection:
        own = () if self.rule == "none" else ("byzantine", "nnm", *_RULES[self.rule][1])
        if odd := [key for key in type(self).model_fields if key not in ("rule", *own) and getattr(self, key)]:
            kinds = [rule for rule, (_, keys) in _RULES.items() if odd[0] in keys] or [*_RULES]
            raise ValueError(f"robust.{odd[0]} is for {', '.join(kinds)}, but robust.rule = {self.rule!r}")
        if self.rule == "none":
            return self
        if self.byzantine is None and (self.nnm or self.rule in _NEED_BYZANTINE):
            who = "robust.nnm" if self.nnm else f"robust.rule = {self.rule!r}"
            raise ValueError(
                f"{who} needs robust.byzantine: how many clients per round may be byzantine, a number (2) or a share "
                f"(0.2); it has no sensible default"
            )
        try:
            self.build()
        except HyperparameterError as error:
            raise ValueError(str(error)) from error
        return self

    def build(self) -> Rule | None:
        """The rule; None for "none"."""
        if self.rule == "none":
            return None
        kind, keys = _RULES[self.rule]
        own = {key: value for key in keys if (value := getattr(self, key)) not in (None, "median")}
        f = self.byzantine or 0
        rule: Rule = kind(**own, f=f)
        return NNM(rule, f) if self.nnm else rule


def check_rule(rule: Rule, clients: int) -> None:
    """Raises `ConfigError` if a round of that many clients is too small for the rule."""
    if clients < (least := rule.least(clients)):
        raise ConfigError(
            f"robust.rule: {rule} needs {least} clients, but a round has {clients}. Use more clients, fewer byzantine "
            f"clients, or another rule."
        )


__all__ = ["RobustSection", "RuleName", "check_rule"]
