"""[defence]: a run's or federation's robust rule, by name, with its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictFloat, StrictInt, model_validator

from fedlora.errors import ConfigError, HyperparameterError
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping, Rule
from fedlora.training.settings import Section

RuleName = Literal["none", "clip", "geometric-median", "krum", "multi-krum", "centred-clipping"]
_RULES: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {  # rule -> its class, and its keys beside liars and mixing
    "clip": (NormClipping, ("threshold",)),
    "geometric-median": (GeometricMedian, ("tolerance", "iterations")),
    "krum": (Krum, ()),
    "multi-krum": (MultiKrum, ()),
    "centred-clipping": (CenteredClipping, ("tau", "iterations")),
}
_NEED_LIARS = ("krum", "multi-krum")
Norm = Annotated[float, Field(gt=0)] | Literal["median"]


class DefenceSection(Section):
    """Limits clients that lie: a rule weighs the clients' changes by how far they are from each other.

    docs/how-to/robust-rules.md has the theory.

    rule: its name. liars: how many clients per round it must tolerate, a number or a share below 0.5; krum, multi-krum
    and mixing need it. mixing: first replace each change by the mean of its nearest ones. threshold: of clip, a norm or
    "median" (the default). tau: likewise of centred-clipping. iterations: of centred-clipping (default 3); the most of
    geometric-median (default 1000). tolerance: of geometric-median, where it stops (default 1e-10).
    """

    rule: RuleName = "none"
    liars: StrictInt | StrictFloat | None = None
    mixing: bool = False
    threshold: Norm | None = None
    tau: Norm | None = None
    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    iterations: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> DefenceSection:
        own = () if self.rule == "none" else ("liars", "mixing", *_RULES[self.rule][1])
        if odd := [key for key in type(self).model_fields if key not in ("rule", *own) and getattr(self, key)]:
            kinds = [rule for rule, (_, keys) in _RULES.items() if odd[0] in keys] or [*_RULES]
            raise ValueError(f"defence.{odd[0]} is for {', '.join(kinds)}, but defence.rule = {self.rule!r}")
        if self.rule == "none":
            return self
        if self.liars is None and (self.mixing or self.rule in _NEED_LIARS):
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

    def build(self) -> Rule | None:
        """The rule; None for "none"."""
        if self.rule == "none":
            return None
        kind, keys = _RULES[self.rule]
        own = {key: value for key in keys if (value := getattr(self, key)) not in (None, "median")}
        f = self.liars or 0
        rule: Rule = kind(**own, f=f)
        return NNM(rule, f) if self.mixing else rule


def check_rule(rule: Rule, clients: int) -> None:
    """Raises `ConfigError` if a round of that many clients is too small for the rule."""
    if clients < (least := rule.least(clients)):
        raise ConfigError(
            f"defence.rule: {rule} needs {least} clients, but a round has {clients}. Use more clients, fewer liars, or "
            f"another rule."
        )
