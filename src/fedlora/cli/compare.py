"""`fedlora compare`: several methods on one configuration over several seeds, with intervals of their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.batches import WorkersHelp, cores, run_batch, worker_count
from fedlora.cli.formats import Format, FormatOption, JsonAlias, Printed, Sheet, chosen, show
from fedlora.cli.method_names import parse_methods
from fedlora.cli.runs import Config, DataRoot, Sets
from fedlora.cli.scores import difference_sheet, direction, records, score_sheet
from fedlora.cli.screen import can_write, complain, notes, plotted
from fedlora.errors import ConfigError
from fedlora.experiments.comparison import AXIS, PROFILE, SEARCH_SEED, ComparedRuns, check_alike, check_data, comparison
from fedlora.experiments.digits import shown
from fedlora.experiments.numbers import titled
from fedlora.experiments.plan import PlannedRun, at_the_edge, dead_end, mains, searches
from fedlora.experiments.results import Result
from fedlora.experiments.runner import Outcome, missing
from fedlora.experiments.spec import NOT_TO_SEARCH, Experiment, Tune
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
from fedlora.runs.config import RunConfig, load_config, overridden
from fedlora.runs.sections import MethodSection

_PLACES = 5  # so many places have a column of their own on 80 characters


def compare(
    config: Config,
    methods: Annotated[
        str, typer.Option(help="names, separated by commas, as 'glora, glora gamma=1'; all")
    ] = "glora,flexlora,padded-average",
    seeds: Annotated[
        str | None, typer.Option(help="as 0:8 (eight of them), 0,3,5 or 7 (default: the config's one)")
    ] = None,
    workers: Annotated[str, WorkersHelp] = "1",
    tune: Annotated[
        str | None, typer.Option(metavar="KEY=VALUES", help="search for each method first, as train.lr=1e-3,3e-3,1e-2")
    ] = None,
    tune_seeds: Annotated[
        str | None, typer.Option(help=f"seeds of the search, none of the compared (default: {SEARCH_SEED})")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="what the others are compared with (default: the first)")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="what is compared (default: 'test, best', at the best validation round)")
    ] = None,
    set: Sets = None,
    out: Annotated[Path | None, typer.Option(help="folder of the runs (default: runs/<config name>-compare)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the comparison in the folder")] = False,
    data_root: DataRoot = None,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
) -> None:
    """Run several methods on the same clients, data and seeds: means and paired intervals."""
    form = chosen(format, json)
    worker_count(workers, [])  # what is no number is said before anything else
    base = load_config(config, set or [])
    compared = [base.run.seed] if seeds is None else parse_seeds(seeds, "--seeds")
    labels = parse_methods(methods)
    which = metric or default_metric(base)
    search = _search(tune, tune_seeds)
    _no_contradiction(set or [], seeds, search, base, labels)
    name = f"{config.stem}-compare"
    experiment = comparison(base, labels, compared, name=name, metric=which, reference=_plain(reference), tune=search)
    kept = ComparedRuns(out or Path("runs") / name, data_root, None if search is None else search.key)
    planned = missing(experiment, PROFILE, kept)  # also says at once what is no configuration
    can_write(kept.root)
    if not resume and next(kept.folders(), None) is not None:
        raise typer.Exit(
            complain(f"{kept.root} already holds a run; add --resume to go on with it, or choose another --out.")
        )
    if planned and resume:
        done = kept.finished()
        check_data([*searches(experiment, PROFILE), *mains(experiment, PROFILE, done)], done, data_root)
    if planned:
        _say_before(base, compared, seeds is None, workers)
    _print(experiment, kept, _run(experiment, kept, workers), form)


def parse_seeds(text: str, option: str) -> list[int]:
    """Seeds from "0:8" (half-open, as Python has it), "0,3,5" or "7". Raises `ConfigError`."""
    try:
        if ":" in text:
            first, end = (int(part) for part in text.split(":"))
            found = list(range(first, end))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes seeds as 0:8, 0,3,5 or 7; got {text!r}.") from error
    if not found or len({*found}) < len(found):
        what = "names no seed" if not found else "names a seed twice"
        raise ConfigError(f"{option} {text} {what}; it takes seeds as 0:8 (0 to 7), 0,3,5 or 7.")
    return found


def _search(tune: str | None, seeds: str | None) -> Tune | None:
    """Raises `ConfigError` also for seeds of a search that there is none of."""
    if tune is None and seeds is not None:
        raise ConfigError(f"--tune-seeds {seeds} is of a search, and there is none; add --tune KEY=VALUES.")
    if tune is None:
        return None
    found = parse_tune(tune, parse_seeds(seeds or str(SEARCH_SEED), "--tune-seeds"))
    if seeds is not None and len(found.values) == 1:
        raise ConfigError(f"--tune-seeds {seeds} is of a search, and --tune {tune} has one value: nothing is searched.")
    return found


def _no_contradiction(
    overrides: Sequence[str], seeds: str | None, tune: Tune | None, base: RunConfig, labels: Mapping[str, MethodSection]
) -> None:
    """Raises `ConfigError` where --set says what another option says, or says it to nobody."""
    said = overridden(overrides)
    if seeds is not None and "seed" in said.get("run", {}):
        raise ConfigError("--seeds and --set run.seed=... both say which seeds; give one.")
    if tune is not None:
        value: Any = said
        for part in tune.key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            raise ConfigError(f"--tune and --set {tune.key}=... both say what {tune.key} is; give one.")
    if "method" in said and base.method.name not in labels:
        raise ConfigError(
            f"--set method.... is of the config's method, {base.method.name}, which is none of --methods "
            f"{', '.join(labels)}; write settings behind a name, as 'svd energy=0.9'."
        )


def parse_tune(text: str, seeds: Sequence[int]) -> Tune:
    """A search from "KEY=VALUE,VALUE,...". Raises `ConfigError`."""
    key, _, values = text.partition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError as error:
        raise ConfigError(f"--tune takes KEY=NUMBERS, as train.lr=1e-3,3e-3,1e-2; got {text!r}.") from error
    if key.strip() in NOT_TO_SEARCH:
        raise ConfigError(f"--tune {key.strip()}: that is no setting to search.")
    if not all(map(math.isfinite, numbers)) or len({*numbers}) < len(numbers):
        what = "names a value twice" if all(map(math.isfinite, numbers)) else "names what is no finite number"
        raise ConfigError(f"--tune {text} {what}; it takes KEY=NUMBERS, as train.lr=1e-3,3e-3,1e-2.")
    return Tune(key=key.strip(), values=numbers, over=[AXIS], seeds=list(seeds))


def default_metric(base: RunConfig) -> str:
    """The test set at the round that is best on validation; without validation data at the last; without a test set
    validation. Raises `ConfigError` where there is neither."""
    if base.data.task is not None:
        return "test, best"
    if base.data.test != 0:
        return "test, best" if base.data.validation != 0 else "test, last"
    if base.data.validation == 0:
        raise ConfigError("data.validation and data.test are both 0: there is nothing to compare methods by.")
    return "validation, best"


# ------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class _Failure:
    """label: of the method. seeds: for which it failed; empty where no seed can help. dropped: the value of a search,
    as "train.lr = 1e+30", that the method does without."""

    label: str
    seeds: tuple[int, ...]
    why: str
    dropped: str | None = None

    def words(self) -> str:
        which = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        if self.dropped is not None:
            return f"{self.label}: {self.dropped} is dropped from the search, for it failed on {which}: {self.why}"
        return f"{self.label} failed on {which}: {self.why}" if self.seeds else f"{self.label} not run: {self.why}"


@dataclass(frozen=True)
class _Ran:
    """What came of the runs. given_up: digests of the search's runs that failed."""

    failures: Sequence[_Failure]
    given_up: Collection[str]


def _run(experiment: Experiment, kept: ComparedRuns, workers: str) -> _Ran:
    """The search, then what it decides. What cannot run with any seed, a method or a value of its search, is tried
    once; a value with a failed run is dropped, and the method goes on with the others."""
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
        given_up |= {outcome.run.digest for outcome in failed if outcome.run.searching}
    return _Ran(_grouped(experiment, failed), given_up)


def _part(run: PlannedRun) -> tuple[str, float | None]:
    """What can be unfit: a method, or one value of its search."""
    return run.cell[AXIS], run.tuned if run.searching else None


def _grouped(experiment: Experiment, failed: Sequence[Outcome]) -> list[_Failure]:
    """One for each method, value of its search and reason; one for a method whose values all fail for one reason that
    no seed can help."""
    tune = experiment.tune
    unfit: dict[tuple[str, str], set[float | None]] = {}
    for outcome in failed:
        if outcome.unfit:
            unfit.setdefault((outcome.run.cell[AXIS], str(outcome.error)), set()).add(_part(outcome.run)[1])
    whole = [key for key, values in unfit.items() if None in values or (tune and values >= {*tune.values})]
    none_left = {label for label, _ in whole}
    found = [_Failure(label, (), why) for label, why in whole]
    seeds: dict[tuple[str, float | None, str], list[int]] = {}
    for outcome in failed:
        label, value = _part(outcome.run)
        if label not in none_left:
            seeds.setdefault((label, value, str(outcome.error)), []).append(outcome.run.seed)
    for (label, value, why), on in seeds.items():
        dropped = None if value is None or tune is None else f"{tune.key} = {shown(value)}"
        found.append(_Failure(label, tuple(sorted(on)), why, dropped))
    return found


def _say_before(base: RunConfig, seeds: Sequence[int], by_default: bool, workers: str) -> None:
    """What a comparison does that its config does not say."""
    asked = {"run.threads": base.run.threads > 1, "run.workers": base.run.workers not in (None, 1)}
    threads = "".join(f" in place of {key}" for key, more in asked.items() if more)
    more = "" if workers != "1" or cores() == 1 else f"; --workers auto uses all {cores()} cores"
    notes.print(
        f"each run has one process and thread{threads}, so that --workers changes no number{more}", markup=False
    )
    if len(seeds) == 1 and by_default:
        notes.print("one seed: there will be no interval; add --seeds 0:8", style="yellow", markup=False)


# ------------------------------------------------------------------------------------------------------- showing


@dataclass(frozen=True)
class _Found:
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


def _print(experiment: Experiment, kept: ComparedRuns, ran: _Ran, form: Format) -> None:
    results, failures = kept.finished(), ran.failures
    runs: dict[str, dict[int, Result]] = {}
    for run in mains(experiment, PROFILE, results, ran.given_up):
        if run.digest in results:
            runs.setdefault(run.cell[AXIS], {})[run.seed] = results[run.digest]
    cells = list(experiment.cells(PROFILE))
    ends = {cell[AXIS]: dead_end(experiment, PROFILE, cell, results, ran.given_up) for cell in cells}
    refused = {f.label for f in failures if not f.seeds}
    failures = [*failures, *(_Failure(label, (), why) for label, why in ends.items() if why and label not in refused)]
    if not runs:
        first = {f.label: f for f in reversed(failures)}  # one reason a method is enough
        labels = dict.fromkeys(f.label for f in failures)
        why = "; ".join(f"{label}: {_reason(first[label])}" for label in labels)
        raise typer.Exit(complain(f"no method could run: {why}"))
    check_alike(runs)
    found = _found(experiment, results, runs, ran.given_up)
    sheets = [_scores(found), *_against(found), *_placings(found), _costs(found)]
    remarks = [*(f.words() for f in failures), *_remarks(found)]
    value = _value(found, failures)
    show(Printed(sheets, records(found.which, found.cells, found.differences, AXIS), value, remarks), form)
    if form in (Format.csv, Format.json):  # programs read the table: people read this
        for failure in failures:
            notes.print(failure.words(), style="yellow", markup=False, soft_wrap=True)
    plotted(_drawing(found, kept.root / "comparison.png"))


def _reason(failure: _Failure) -> str:
    value = "" if failure.dropped is None else f"in the search, with {failure.dropped}: "
    return f"{value}{failure.why.rstrip('.')}"


def _found(
    experiment: Experiment,
    results: Mapping[str, Result],
    runs: Mapping[str, Mapping[int, Result]],
    given_up: Collection[str],
) -> _Found:
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
    return _Found(
        experiment, which, metric, mine,
        {name: c for name, c in beside.items() if any(cell.scores for cell in c)}, results, runs, given_up,
        reference, paired(scored, AXIS, reference),
        placings(scored, AXIS, smaller_is_better=small) if several else [],
        orders(scored, smaller_is_better=small),
    )  # fmt: skip


def _scores(found: _Found) -> Sheet:
    by = {found.which: found.cells, **found.beside}
    n = len(found.seeds)
    how = "one seed" if n == 1 else f"mean ± standard deviation over {n} seeds"
    metric = found.metric.replace("_", "-")
    return score_sheet(f"{metric}: {how}; same clients, data and start", by, [AXIS])


def _against(found: _Found) -> list[Sheet]:
    if not found.differences:
        return []
    title = f"{found.title}: difference to {found.reference}, paired by seed"
    return [difference_sheet(title, found.differences)]


def _placings(found: _Found) -> list[Sheet]:
    if not found.placings or len(found.seeds) == 1:
        return []
    count = len(found.placings)
    own = min(count, _PLACES)
    heads = [f"{k}{('st', 'nd', 'rd')[k - 1] if k < 4 else 'th'}" for k in range(1, own + 1)]
    rows = []
    for p in found.placings:
        rest = [str(sum(p.counts[own:]))] if count > own else []
        rows.append([p.label, *(str(n) for n in p.counts[:own]), *rest, f"{p.mean:.2f}"])
    different, seeds = found.orders
    changes = "the same order on every seed" if different == 1 else f"{different} different orders on {seeds} seeds"
    columns = ["place", *heads, *(["lower"] if count > own else []), "mean place"]
    return [Sheet(f"{found.title}: places by seed; {changes}", columns, rows)]


def _costs(found: _Found) -> Sheet:
    """What it took, in the mean over seeds."""
    rows = []
    for label, by_seed in found.runs.items():
        raws = [result.raw for result in by_seed.values()]
        up = _mean([raw["bytes"]["up_adapter"] + raw["bytes"]["up_heads"] for raw in raws]) / 1e6
        total = _mean([raw["bytes"]["total"] for raw in raws]) / 1e6
        drifts = [d for raw in raws if (d := (raw["gauge_drift"] or {}).get(raw["method"])) is not None]
        aggregate = _mean([raw["seconds"].get("aggregate", 0.0) for raw in raws])
        rows.append(
            [label, raws[0]["target"], f"{up:.1f}", f"{total - up:.1f}", f"{aggregate:.2f}",
             f"{max(drifts):.1e}" if drifts else ""]
        )  # fmt: skip
    columns = [AXIS, "target", "MB up", "MB down", "aggregate s", "gauge"]
    return Sheet("What a run costs, and its gauge check", columns, rows, 2)


def _remarks(found: _Found) -> list[str]:
    said = []
    targets = {raw.raw["target"] for by_seed in found.runs.values() for raw in by_seed.values()}
    if len(found.seeds) == 1:
        said.append("One seed: no interval and no verdict. Add --seeds 0:8.")
    elif found.reference not in found.runs:
        said.append(f"No differences: the reference {found.reference} has no finished run.")
    elif found.differences:
        k = len(found.differences)
        said.append(
            "Undecided: the 95 % interval (Student's t over the paired differences) holds zero; these seeds do not "
            "tell the two methods apart."
        )
        if k > 1:
            said.append(
                f"Each interval is of one comparison. With {k} of them the chance that one or more leave out zero "
                f"where there is no difference is up to {min(100, 5 * k)} %."
            )
    if found.placings and len(found.seeds) > 1 and _shared(found):
        said.append(
            "Places: methods of the same score, to one in a million, share the better place, and it counts for each of "
            "them; the next one is left empty. An order with a shared place is an order of its own."
        )
    said += [f"{cell.cell[AXIS]}: {why}" for cell in found.cells if (why := _without(found, cell)) is not None]
    said += direction(found.which, found.cells)
    if len(targets) > 1:
        said.append("Some rows measure the server's model and some the clients' own (target): do not compare these.")
    said += _search_remarks(found)
    return said


def _shared(found: _Found) -> bool:
    """Whether on any seed two share a place: each place is then not taken once on each seed."""
    seeds = sum(found.placings[0].counts)
    return any(sum(taken) != seeds for taken in zip(*(p.counts for p in found.placings), strict=True))


def _without(found: _Found, cell: CellScore) -> str | None:
    """Which finished runs lack the compared number."""
    lack = [str(seed) for seed in found.runs[cell.cell[AXIS]] if seed not in cell.scores]
    if not lack:
        return None
    seeds = f"seed{'s' if len(lack) > 1 else ''} {', '.join(lack)}"
    return f"no number {found.which!r} on {seeds}: the run diverged, or never got there. It counts in no mean."


def _search_remarks(found: _Found) -> list[str]:
    tune = found.experiment.tune
    if tune is None or len(set(tune.values)) < 2:
        return []
    seeds = ", ".join(map(str, tune.seeds))
    said = [f"tuned: {tune.key}, for each method the best on validation, on seed {seeds}, which is not compared."]
    for cell in found.cells:
        edge = at_the_edge(found.experiment, PROFILE, cell.tuned)
        if edge is not None and cell.tuned is not None:
            said.append(f"{cell.cell[AXIS]}: {tune.key} = {shown(cell.tuned)} is the {edge} tried: widen the grid.")
    return said


def _value(found: _Found, failures: Sequence[_Failure]) -> dict[str, Any]:
    """For JSON: everything, each run's summary too."""
    methods = {
        str(cell.cell[AXIS]): {
            "scores": dict(cell.scores), "n": len(cell.scores), "mean": cell.mean, "sd": cell.spread,
            "tuned": cell.tuned,
            "runs": {seed: _summary(result) for seed, result in found.runs[cell.cell[AXIS]].items()},
        }
        for cell in found.cells
    }  # fmt: skip
    return {
        "metric": found.which, "score": found.metric,
        "smaller_is_better": smaller_is_better(found.which, found.metric),
        "seeds": list(found.seeds), "reference": found.reference, "methods": methods,
        "differences": [_difference(d) for d in found.differences],
        "places": {p.label: list(p.counts) for p in found.placings},
        "refused": {f.label: f.why for f in failures if not f.seeds},
        "failed": [
            {"method": f.label, "seeds": list(f.seeds), "why": f.why}
            for f in failures if f.seeds and f.dropped is None
        ],
        "dropped": [f.words() for f in failures if f.dropped is not None],
    }  # fmt: skip


_NOT_OF_THE_SUMMARY = {
    "digest", "config", "consensus", "history", "wall_seconds", "commit", "versions", "machine", "data", "categories",
    "ranks", "model_sha256",
}  # fmt: skip


def _summary(result: Result) -> dict[str, Any]:
    """The run's own summary.json, without its diagnostics."""
    return {key: value for key, value in result.raw.items() if key not in _NOT_OF_THE_SUMMARY}


def _drawing(found: _Found, path: Path) -> Callable[[], list[Path]]:
    def draw() -> list[Path]:
        from fedlora.experiments.plots import plot_comparison

        return [plot_comparison(found.runs, found.differences, found.which, path)]

    return draw


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(label: str | None) -> str | None:
    """A label as `parse_methods` writes it."""
    return None if label is None else " ".join(label.split())


def _difference(d: Difference) -> dict[str, Any]:
    """As JSON has it. Gaps that are all alike have no interval."""
    low, high = d.interval or (None, None)
    return {**vars(d), "low": low, "high": high, "decided": d.decided}
