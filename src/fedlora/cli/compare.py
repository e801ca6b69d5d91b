"""`fedlora compare`: several methods on one configuration over several seeds, with intervals of their differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.batches import WorkersHelp, cores, run_batch, worker_count
from fedlora.cli.formats import Format, FormatOption, JsonAlias, Printed, Sheet, chosen, show
from fedlora.cli.method_names import parse_methods
from fedlora.cli.runs import Config, DataRoot, Sets
from fedlora.cli.scores import difference_sheet, records, score_sheet
from fedlora.cli.screen import can_write, complain, notes, plotted
from fedlora.errors import ConfigError
from fedlora.experiments.comparison import AXIS, PROFILE, SEARCH_SEED, ComparedRuns, comparison
from fedlora.experiments.plan import PlannedRun, at_the_edge, mains
from fedlora.experiments.results import Result
from fedlora.experiments.runner import Outcome, missing
from fedlora.experiments.spec import Experiment, Tune
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
from fedlora.runs.config import RunConfig, load_config

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
    tune_seeds: Annotated[str, typer.Option(help="seeds of the search, none of the compared")] = str(SEARCH_SEED),
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
    if seeds is not None and any(override.startswith("run.seed=") for override in set or []):
        raise ConfigError("--seeds and --set run.seed=... both say which seeds; give one.")
    compared = [base.run.seed] if seeds is None else parse_seeds(seeds, "--seeds")
    labels = parse_methods(methods)
    which = metric or default_metric(base)
    search = None if tune is None else parse_tune(tune, parse_seeds(tune_seeds, "--tune-seeds"))
    name = f"{config.stem}-compare"
    experiment = comparison(base, labels, compared, name=name, metric=which, reference=_plain(reference), tune=search)
    kept = ComparedRuns(out or Path("runs") / name, data_root, None if search is None else search.key)
    planned = missing(experiment, PROFILE, kept)  # also says at once what is no configuration
    can_write(kept.root)
    if not resume and next(kept.folders(), None) is not None:
        raise typer.Exit(
            complain(f"{kept.root} already holds a run; add --resume to go on with it, or choose another --out.")
        )
    if planned:
        _say_before(base, compared, seeds is None, workers)
    failures = _run(experiment, kept, workers)
    _print(experiment, kept, failures, form, resume)


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


def parse_tune(text: str, seeds: Sequence[int]) -> Tune:
    """A search from "KEY=VALUE,VALUE,...". Raises `ConfigError`."""
    key, _, values = text.partition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError as error:
        raise ConfigError(f"--tune takes KEY=NUMBERS, as train.lr=1e-3,3e-3,1e-2; got {text!r}.") from error
    if key.strip() in ("run.seed", "run.threads", "run.workers"):
        raise ConfigError(f"--tune {key.strip()}: that is no setting to search.")
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
    """label: of the method. seeds: for which it failed; empty where no seed can help."""

    label: str
    seeds: tuple[int, ...]
    why: str

    def words(self) -> str:
        if not self.seeds:
            return f"{self.label} not run: {self.why}"
        which = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        return f"{self.label} failed on {which}: {self.why}"


def _run(experiment: Experiment, kept: ComparedRuns, workers: str) -> list[_Failure]:
    """The search, then what it decides. A method that cannot run at all is tried once."""
    failed: list[Outcome] = []
    unfit: set[str] = set()

    def wanted(run: PlannedRun) -> bool:
        return run.cell[AXIS] not in unfit

    def heard(outcome: Outcome) -> None:
        if outcome.error is not None:
            failed.append(outcome)
            if outcome.unfit:
                unfit.add(outcome.run.cell[AXIS])

    tried: set[str] = set()
    for stage in ("searching", "comparing"):
        todo = [run for run in missing(experiment, PROFILE, kept) if run.digest not in tried and wanted(run)]
        todo.sort(key=lambda run: run.seed)  # seed by seed, so that what an interrupt leaves can be paired
        stage = stage if any(run.searching for run in todo) else "comparing"
        tried |= {run.digest for run in todo}
        run_batch(stage, todo, kept, worker_count(workers, todo), wanted, heard)
    return _grouped(failed, unfit)


def _grouped(failed: Sequence[Outcome], unfit: set[str]) -> list[_Failure]:
    """One for each method and reason."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for outcome in failed:
        label, why = outcome.run.cell[AXIS], str(outcome.error)
        if outcome.run.searching and label not in unfit:
            why = f"in the search, with {outcome.run.tuned:g}: {why}"
        if label in unfit and not outcome.unfit:
            continue
        seeds.setdefault((label, why), []).append(outcome.run.seed)
    return [
        _Failure(label, () if label in unfit else tuple(sorted(found)), why) for (label, why), found in seeds.items()
    ]


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
    """A comparison's numbers: of the methods that have any, with the runs behind them."""

    experiment: Experiment
    which: str
    cells: Sequence[CellScore]
    beside: Mapping[str, Sequence[CellScore]]
    runs: Mapping[str, Mapping[int, Result]]
    reference: str
    differences: Sequence[Difference]
    placings: Sequence[Placing]
    orders: tuple[int, int]
    small: bool

    @property
    def seeds(self) -> Sequence[int]:
        return self.experiment.profile(PROFILE).seeds


def _print(
    experiment: Experiment, kept: ComparedRuns, failures: Sequence[_Failure], form: Format, resume: bool
) -> None:
    results = kept.finished()
    runs: dict[str, dict[int, Result]] = {}
    for run in mains(experiment, PROFILE, results):
        if run.digest in results:
            runs.setdefault(run.cell[AXIS], {})[run.seed] = results[run.digest]
    if not runs:
        first = {f.label: f.why.rstrip(".") for f in reversed(failures)}  # one reason a method is enough
        why = "; ".join(f"{label}: {first[label]}" for label in dict.fromkeys(f.label for f in failures))
        raise typer.Exit(complain(f"no method could run: {why}"))
    found = _found(experiment, results, runs)
    sheets = [_scores(found), *_against(found), *_placings(found), _costs(found)]
    remarks = [*(f.words() for f in failures), *_remarks(found)]
    value = _value(found, failures)
    show(Printed(sheets, records(found.which, found.cells, found.differences, AXIS), value, remarks), form)
    if form in (Format.csv, Format.json):  # programs read the table: people read this
        for failure in failures:
            notes.print(failure.words(), style="yellow", markup=False, soft_wrap=True)
    plotted(_drawing(found, results, kept.root / "comparison.png"))


def _found(experiment: Experiment, results: Mapping[str, Result], runs: Mapping[str, Mapping[int, Result]]) -> _Found:
    def cells(which: str) -> list[CellScore]:
        return [cell for cell in score_cells(experiment, PROFILE, results, which) if cell.cell[AXIS] in runs]

    which = experiment.metric
    mine = cells(which)
    if not any(cell.scores for cell in mine):
        raise ConfigError(f"no run has the number {which!r}; see --metric, as 'test, last'.")
    reference = experiment.reference or next(iter(runs))
    small = smaller_is_better(which, next(iter(next(iter(runs.values())).values())).metric)
    scored = [cell for cell in mine if cell.scores]
    several = len(scored) > 1
    beside = {name: cells(name) for name in ("validation, best", "test, best", "test, last") if name != which}
    return _Found(
        experiment, which, mine, {name: c for name, c in beside.items() if any(cell.scores for cell in c)}, runs,
        reference, paired(scored, AXIS, reference),
        placings(scored, AXIS, smaller_is_better=small) if several else [],
        orders(scored, smaller_is_better=small), small,
    )  # fmt: skip


def _scores(found: _Found) -> Sheet:
    by = {found.which: found.cells, **found.beside}
    n = len(found.seeds)
    how = "one seed" if n == 1 else f"mean ± standard deviation over {n} seeds"
    return score_sheet(f"Same clients, data and start: {how}", by, [AXIS])


def _against(found: _Found) -> list[Sheet]:
    if not found.differences:
        return []
    title = f"{found.which}: difference to {found.reference}, paired by seed"
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
    return [Sheet(f"{found.which}: places by seed; {changes}", columns, rows)]


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
    if len(targets) > 1:
        said.append("Some rows measure the server's model and some the clients' own (target): do not compare these.")
    said += _search_remarks(found)
    return said


def _search_remarks(found: _Found) -> list[str]:
    tune = found.experiment.tune
    if tune is None or len(set(tune.values)) < 2:
        return []
    seeds = ", ".join(map(str, tune.seeds))
    said = [f"tuned: {tune.key}, for each method the best on validation, on seed {seeds}, which is not compared."]
    for cell in found.cells:
        edge = at_the_edge(found.experiment, PROFILE, cell.tuned)
        if edge is not None:
            said.append(f"{cell.cell[AXIS]}: {tune.key} = {cell.tuned:g} is the {edge} tried: widen the grid.")
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
        "metric": found.which, "seeds": list(found.seeds), "reference": found.reference, "methods": methods,
        "differences": [{**vars(d), "decided": d.decided} for d in found.differences],
        "places": {p.label: list(p.counts) for p in found.placings},
        "refused": {f.label: f.why for f in failures if not f.seeds},
        "failed": [{"method": f.label, "seeds": list(f.seeds), "why": f.why} for f in failures if f.seeds],
    }  # fmt: skip


_NOT_OF_THE_SUMMARY = {
    "digest", "config", "consensus", "history", "wall_seconds", "commit", "versions", "machine", "data", "categories",
    "ranks", "model_sha256",
}  # fmt: skip


def _summary(result: Result) -> dict[str, Any]:
    """The run's own summary.json, without its diagnostics."""
    return {key: value for key, value in result.raw.items() if key not in _NOT_OF_THE_SUMMARY}


def _drawing(found: _Found, results: Mapping[str, Result], path: Path) -> Callable[[], list[Path]]:
    def draw() -> list[Path]:
        from fedlora.experiments.plots import plot_comparison

        return [plot_comparison(found.experiment, PROFILE, results, found.differences, found.which, path)]

    return draw


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(label: str | None) -> str | None:
    """A label as `parse_methods` writes it."""
    return None if label is None else " ".join(label.split())
