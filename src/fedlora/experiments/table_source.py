"""A table as pages and commands show it, and what it is made of."""

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
    """caption: one paragraph. below: what it rests on, a paragraph each. names: so many columns are labels, the others
    numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    below: Sequence[str] = ()
    names: int = 1


@dataclass(frozen=True)
class Source:
    """What a table is made of. plan, answers, claims: of the experiment; None and empty where it has no plan. words:
    what stands behind the kind in a page's block."""

    grid: Grid
    words: str = ""
    plan: SeedPlan | None = None
    answers: Sequence[Answers] = ()
    claims: Claims | None = None

    @property
    def family(self) -> Answers:
        """The one that the words name. Raises `ConfigError` for a name that is none."""
        known = {one.name: one for one in self.answers}
        if self.words not in known:
            raise ConfigError(f"{self.grid.experiment.name} is asked by {', '.join(known)}; got {self.words!r}.")
        return known[self.words]
