"""A table as pages and commands show it, and its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims
from fedlora.experiments.decisions import Answers
from fedlora.experiments.grid import Grid
from fedlora.experiments.seed_plan import SeedPlan


@dataclass(frozen=True)
class Table:
    """caption: one paragraph. below: notes, a paragraph each. names: the number of columns that are labels; the others
    are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    below: Sequence[str] = ()
    names: int = 1


@dataclass(frozen=True)
class Source:
    """The sources of a table. plan, answers, claims: the experiment's; None and empty if it has no plan. words: the
    words after the kind in a page's block."""

    grid: Grid
    words: str = ""
    plan: SeedPlan | None = None
    answers: Sequence[Answers] = ()
    claims: Claims | None = None

    @property
    def family(self) -> Answers:
        """The family that the words name. Raises `ConfigError` for an unknown name."""
        known = {one.name: one for one in self.answers}
        if self.words not in known:
            raise ConfigError(f"{self.grid.experiment.name} is asked by {', '.join(known)}; got {self.words!r}.")
        return known[self.words]
