"""The runs of `fedlora compare`: the search, then what it decides; and what failed, for whom, why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedlora.cli.batches import cores, run_batch, worker_count
from fedlora.cli.screen import notes
from fedlora.experiments.comparison import AXIS, PROFILE, ComparedRuns
from fedlora.experiments.digits import shown
from fedlora.experiments.plan import PlannedRun, dropped_value
from fedlora.experiments.runner import Outcome, missing
from fedlora.experiments.spec import Experiment
from fedlora.runs.config import RunConfig


@dataclass(frozen=True)
class Failure:
    """label: of the method. seeds: for which it failed; empty where no seed can help. dropped: the value of a search,
    as "train.lr = 1e+30", that the method does without. by_machine: it says nothing of the value, and nothing is chosen
    without it."""

    label: str
    seeds: tuple[int, ...]
    why: str
    dropped: str | None = None
    by_machine: bool = False

    def words(self) -> str:
        which = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        if self.dropped is not None and self.by_machine:
            return (
                f"{self.label}: the search waits for {self.dropped}, which the machine could not run on {which}: "
                f"{self.why.rstrip('.')}. Mend that, and --resume goes on."
            )
        if self.dropped is not None:
            return f"{self.label}: {dropped_value(self.dropped, self.seeds, self.why)}"
        return f"{self.label} failed on {which}: {self.why}" if self.seeds else f"{self.label} not run: {self.why}"

    def reason(self) -> str:
        """Why, for one of several in a line."""
        value = "" if self.dropped is None else f"in the search, with {self.dropped}: "
        return f"{value}{self.why.rstrip('.')}"


@dataclass(frozen=True)
class Ran:
    """What came of the runs. given_up: digests of the search's runs that failed."""

    failures: Sequence[Failure]
    given_up: Collection[str]


def run_stages(experiment: Experiment, kept: ComparedRuns, workers: str) -> Ran:
    """The search, then what it decides. What cannot run with any seed, a method or a value of its search, is tried
    once; a value with a failed run is dropped, and the method goes on with the others. What the machine failed drops
    nothing: the search waits for it."""
    failed: list[Outcome] = []
    unfit: set[tuple[str, float | None]] = set()

    def wanted(run: PlannedRun) -> bool:
        return _part(run) not in unfit

    def heard(outcome: Outcome) -> None:
        if outcome.error is not None:
            failed.append(outcome)
            if outcome.unfit:
                unfit.add(_part(outcome.run))

    tried: set[str] = set()
    given_up: set[str] = set()
    for stage in ("searching", "comparing"):
        todo = [run for run in missing(experiment, PROFILE, kept, None, given_up) if run.digest not in tried]
        todo = [run for run in todo if wanted(run) and (run.searching or stage == "comparing")]
        todo.sort(key=lambda run: run.seed)  # seed by seed, so that what an interrupt leaves can be paired
        stage = stage if any(run.searching for run in todo) else "comparing"
        tried |= {run.digest for run in todo}
        run_batch(stage, todo, kept, worker_count(workers, todo), wanted, heard)
        given_up |= {o.run.digest for o in failed if o.run.searching and not o.by_machine}
    return Ran(_grouped(experiment, failed), given_up)


def _part(run: PlannedRun) -> tuple[str, float | None]:
    """What can be unfit: a method, or one value of its search."""
    return run.cell[AXIS], run.tuned if run.searching else None


def _grouped(experiment: Experiment, failed: Sequence[Outcome]) -> list[Failure]:
    """One for each method, value of its search and reason; one for a method whose values all fail for one reason that
    no seed can help."""
    tune = experiment.tune
    unfit: dict[tuple[str, str], set[float | None]] = {}
    for outcome in failed:
        if outcome.unfit:
            unfit.setdefault((outcome.run.cell[AXIS], str(outcome.error)), set()).add(_part(outcome.run)[1])
    whole = [key for key, values in unfit.items() if None in values or (tune and values >= {*tune.values})]
    none_left = {label for label, _ in whole}
    found = [Failure(label, (), why) for label, why in whole]
    seeds: dict[tuple[str, float | None, str, bool], list[int]] = {}
    for outcome in failed:
        label, value = _part(outcome.run)
        if label not in none_left:
            seeds.setdefault((label, value, str(outcome.error), outcome.by_machine), []).append(outcome.run.seed)
    for (label, value, why, machine), on in seeds.items():
        dropped = None if value is None or tune is None else f"{tune.key} = {shown(value)}"
        found.append(Failure(label, tuple(sorted(on)), why, dropped, machine))
    return found


def say_before(base: RunConfig, seeds: Sequence[int], by_default: bool, workers: str) -> None:
    """What a comparison does that its config does not say."""
    asked = {"run.threads": base.run.threads > 1, "run.workers": base.run.workers not in (None, 1)}
    threads = "".join(f" in place of {key}" for key, more in asked.items() if more)
    more = "" if workers != "1" or cores() == 1 else f"; --workers auto uses all {cores()} cores"
    notes.print(
        f"each run has one process and thread{threads}, so that --workers changes no number{more}", markup=False
    )
    if len(seeds) == 1 and by_default:
        notes.print("one seed: there will be no interval; add --seeds 0:8", style="yellow", markup=False)
