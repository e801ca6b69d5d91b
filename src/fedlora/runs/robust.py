"""[robust]: a run's or federation's robust rule, by name, with its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictFloat, StrictInt, model_validator

from fedlora.errors import ConfigError, HyperparameterError
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping, Rule
from fedlora.training.settings import Section

RuleName = Literal["none", "norm-clipping", "geometric-median", "krum", "multi-krum", "centered-clipping"]
_RULES: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {  # rule -> its class, and its keys beside nnm
    "norm-clipping": (NormClipping, ("threshold",)),
    "geometric-median": (GeometricMedian, ()),
    "krum": (Krum, ("byzantine",)),
    "multi-krum": (MultiKrum, ("byzantine",)),
    "centered-clipping": (CenteredClipping, ("tau", "iterations")),
}
Norm = Annotated[float, Field(gt=0)] | Literal["median"]


class RobustSection(Section):
    """Limits byzantine clients: a rule weighs the clients' changes by how far they are from each other.

    docs/how-to/robust-rules.md has the theory.

    rule: its name. byzantine: how many clients per round it must tolerate, a number or a share below 0.5; krum,
    multi-krum and nnm need it. nnm: first replace each change by the mean of its nearest ones. threshold: of
    norm-clipping, a norm or "median" (the default). tau: likewise of centered-clipping. iterations: of
    centered-clipping (default 3).
    """

    rule: RuleName = "none"
    byzantine: StrictInt | StrictFloat | None = None
    nnm: bool = False
    threshold: Norm | None = None
    tau: Norm | None = None
    iterations: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> RobustSection:
        own = () if self.rule == "none" else ("nnm", *_RULES[self.rule][1], *(["byzantine"] if self.nnm else []))
        if odd := [key for key in type(self).model_fields if key not in ("rule", *own) and getattr(self, key)]:
            kinds = [rule for rule, (_, keys) in _RULES.items() if odd[0] in keys] or [*_RULES]
            kinds += ["nnm"] if odd[0] == "byzantine" else []
            raise ValueError(f"robust.{odd[0]} is for {', '.join(kinds)}, but robust.rule = {self.rule!r}")
        if self.rule == "none":
            return self
        if self.byzantine is None and "byzantine" in own:
            who = "robust.nnm" if self.nnm else f"robust.rule = {self.rule!r}"
            raise ValueError(f"{who} needs robust.byzantine: how many clients per round, a number (2) or a share (0.2)")
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
        given = {key: value for key in keys if (value := getattr(self, key)) not in (None, "median")}
        rule: Rule = kind(**{"f" if key == "byzantine" else key: value for key, value in given.items()})
        return NNM(rule, self.byzantine or 0) if self.nnm else rule


def check_rule(rule: Rule, clients: int) -> None:
    """Raises `ConfigError` if a round of that many clients is too small for the rule."""
    if clients < (least := rule.least(clients)):
        raise ConfigError(
            f"robust.rule: {rule} needs {least} clients, but a round has {clients}. Use more clients, fewer byzantine "
            f"ones, or another rule."
        )
