"""The search's choice, a function of the lines of results; and what an experiment has and lacks, given these lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from fedlora.experiments.grid import Grid, Planned, Stage
from fedlora.experiments.scores import Line
from fedlora.training.metrics import find_metric


@dataclass(frozen=True)
class Choice:
    """The result of a search. value: the best on validation; None if every value failed or diverged. level: the values
    that share the best score; the smallest is taken. edge: "largest" or "smallest" if it is one of these alone: the
    best may lie beyond."""

    value: float | None
    level: Sequence[float]
    edge: str | None = None


def choose(grid: Grid, lines: Mapping[str, Line]) -> dict[tuple[str, ...], Choice]:
    """By validation, for the labels whose searched runs all have a line: the best mean over their cells and seeds. A
    run that failed or diverged has no score, and counts as the worst."""
    if len(grid.values) == 1:
        return {grid.key(cell): Choice(grid.values[0], grid.values) for cell in grid.cells}
    found = {}
    for over, by_value in grid.search.items():
        each = {value: [lines.get(run.digest) for run in runs] for value, runs in by_value.items()}
        if any(line is None for mine in each.values() for line in mine):
            continue
        metric = next((line["metric"] for mine in each.values() for line in mine if line and "metric" in line), "loss")
        sign = 1 if find_metric(metric).larger_is_better else -1
        means = {value: fmean(sign * _score(line, sign) for line in mine) for value, mine in each.items()}
        best = max(means.values())
        if best == -math.inf:
            found[over] = Choice(None, [])
            continue
        level = [value for value, mean in means.items() if math.isclose(mean, best, rel_tol=1e-9, abs_tol=1e-12)]
        ends = {grid.values[0]: "smallest", grid.values[-1]: "largest"}
        found[over] = Choice(min(level), level, ends.get(level[0]) if len(level) == 1 else None)
    return found


def _score(line: Line | None, sign: int) -> float:
    value = None if line is None or "metric" not in line else line["validation"]["best"].get(line["metric"])
    return -math.inf * sign if value is None else float(value)


@dataclass(frozen=True)
class Progress:
    """An experiment at a profile with lines of results, by digest."""

    grid: Grid
    lines: Mapping[str, Line]

    @cached_property
    def choices(self) -> dict[tuple[str, ...], Choice]:
        return choose(self.grid, self.lines)

    @cached_property
    def runs(self) -> list[Planned]:
        """The runs that count, of cells whose search is done."""
        return self.grid.runs({over: choice.value for over, choice in self.choices.items()})

    @property
    def count(self) -> int:
        """The number of runs that count, whether or not their search is done."""
        return len(self.grid.cells) * len(self.grid.seeds)

    @cached_property
    def used(self) -> list[tuple[Planned, Line]]:
        """The runs that count, with their lines."""
        return [(run, line) for run in self.runs if (line := self.lines.get(run.digest)) is not None]

    @property
    def whole(self) -> bool:
        """Whether every planned run has a result."""
        return sum("failed" not in line for _, line in self.used) == self.count

    def missing(self, stage: Stage) -> list[Planned]:
        """The runs of a stage that have no line, each once (two labels may be of one configuration), seed by seed:
        whatever interrupts them leaves whole pairs."""
        each = self.grid.searches if stage == "search" else self.runs
        found: dict[str, Planned] = {}
        for run in (run for run in each if run.digest not in self.lines):
            found.setdefault(run.digest, run)
        return sorted(found.values(), key=lambda run: run.seed)

    def chosen(self) -> list[str]:
        """What the search chose, a line for each of its labels."""
        tune, each = self.grid.experiment.tune, self.choices.items()
        key = "" if tune is None else tune.key
        return [f"{', '.join(over) or 'all'}: {key} = {one.value}" for over, one in each] or ["No choice yet."]

    def notes(self) -> list[str]:
        """What is missing and why, and what a search does not tell apart."""
        tune, found = self.grid.experiment.tune, []
        if self.grid.search and tune is not None:
            whys: dict[str, list[str]] = {}
            for over, choice in self.choices.items():
                if choice.value is None:
                    why = "no value of the search has a score on validation: all of them failed or diverged"
                elif len(choice.level) > 1:
                    why = f"{', '.join(f'{x:g}' for x in choice.level)} tie on validation, and the smallest was taken"
                elif choice.edge is not None:
                    why = f"{choice.value:g}, the {choice.edge} tried, was chosen: the best may lie beyond"
                else:
                    continue
                whys.setdefault(why, []).append(", ".join(over) or "all")
            found += [f"{tune.key}: {why}: {'; '.join(labels)}." for why, labels in whys.items()]
            searched = [(run, self.lines.get(run.digest) or {}) for run in self.grid.searches]
            found += [
                f"in the search, {run.label} failed: {line['failed']}" for run, line in searched if "failed" in line
            ]
        found += [f"{run.label} failed: {line['failed']}" for run, line in self.used if "failed" in line]
        if not self.whole:
            done = sum("failed" not in line for _, line in self.used)
            found.append(f"Incomplete: {done} of {self.count} planned runs have a result.")
        return found
