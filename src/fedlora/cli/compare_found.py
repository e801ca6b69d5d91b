"""The numbers of a comparison, of the methods that have any: what its tables and its picture are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedlora.errors import ConfigError
from fedlora.experiments.comparison import AXIS, PROFILE
from fedlora.experiments.result import Result
from fedlora.experiments.scores import titled
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import (
    CellScore,
    Difference,
    Placing,
    orders,
    paired,
    placings,
    score_cells,
    smaller_is_better,
)


@dataclass(frozen=True)
class Found:
    """A comparison's numbers: of the methods that have any, with the runs behind them. which: the compared number.
    metric: what it is of, as "accuracy"."""

    experiment: Experiment
    which: str
    metric: str
    cells: Sequence[CellScore]
    beside: Mapping[str, Sequence[CellScore]]
    results: Mapping[str, Result]
    runs: Mapping[str, Mapping[int, Result]]
    given_up: Collection[str]
    reference: str
    differences: Sequence[Difference]
    placings: Sequence[Placing]
    orders: tuple[int, int]

    @property
    def title(self) -> str:
        return titled(self.which, self.metric)

    @property
    def seeds(self) -> Sequence[int]:
        return self.experiment.profile(PROFILE).seeds


def gather(
    experiment: Experiment,
    results: Mapping[str, Result],
    runs: Mapping[str, Mapping[int, Result]],
    given_up: Collection[str],
) -> Found:
    def cells(which: str) -> list[CellScore]:
        every = score_cells(experiment, PROFILE, results, which, given_up)
        return [cell for cell in every if cell.cell[AXIS] in runs]

    which = experiment.metric
    mine = cells(which)
    if not any(cell.scores for cell in mine):
        raise ConfigError(
            f"no run has the number {which!r}: each of them diverged or never got there. Compare another --metric."
        )
    reference = experiment.reference or next(iter(runs))
    metric = next(iter(next(iter(runs.values())).values())).metric
    small = smaller_is_better(which, metric)
    scored = [cell for cell in mine if cell.scores]
    several = len(scored) > 1
    beside = {name: cells(name) for name in ("validation, best", "test, best", "test, last") if name != which}
    return Found(
        experiment, which, metric, mine,
        {name: c for name, c in beside.items() if any(cell.scores for cell in c)}, results, runs, given_up,
        reference, paired(scored, AXIS, reference),
        placings(scored, AXIS, smaller_is_better=small) if several else [],
        orders(scored, smaller_is_better=small),
    )  # fmt: skip
