"""A comparison: methods on one configuration over seeds, as an experiment of one axis, its runs named for people.

OUT/METHOD/seed-0                       with a search: OUT/METHOD/train.lr=0.003/seed-0
OUT/METHOD/search/train.lr=0.003/seed-1000

A run is found by its configuration's digest, wherever in OUT it lies; where it has to be made, it gets these names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import echo, files
from fedlora.errors import CheckpointError, ConfigError, FedLoRAError, counted
from fedlora.experiments.grid.plan import PlannedRun, check_number
from fedlora.experiments.grid.spec import Experiment, Profile, Tune
from fedlora.experiments.running.runner import failure_report
from fedlora.experiments.scores.digits import shown
from fedlora.experiments.stored.results import Result, summarise
from fedlora.runs.client_data import deal
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import data_facts
from fedlora.runs.resuming import stored_classes
from fedlora.runs.sections import MethodSection

PROFILE = "comparison"  # the one that a comparison's experiment has
AXIS = "method"
SEARCH_SEED = 1000
PICTURE = "comparison.png"  # in OUT
_FAILURES = "failures"
_DEPTHS = ("*", "*/*", "*/*/*", "*/*/*/*")


def comparison(
    base: RunConfig,
    methods: Mapping[str, MethodSection],
    seeds: Sequence[int],
    *,
    name: str,
    metric: str,
    reference: str | None = None,
    tune: Tune | None = None,
) -> Experiment:
    """The methods by label, on the configuration; with one process and one thread a run, so that more runs at a time
    change no bit, and no process stands in another's way.

    Args:
        methods: label -> its section. The bare name of the configuration's own method is the configuration's.
        metric: what is compared, as `Result.score` takes it.
        reference: the label that the others are compared with.
        tune: searched for each method. Its seeds are none of the compared ones.

    Raises:
        ConfigError: methods that are none or take no such settings, all of them in one line; a reference that is no
            label; a search on compared seeds, or without validation data; a metric that is none, or that no run of
            the configuration has.
    """
    methods = {label: base.method if label == base.method.name else section for label, section in methods.items()}
    wrong = {label: why for label, section in methods.items() if (why := _wrong(section)) is not None}
    if wrong:
        raise ConfigError("; ".join(f"{label}: {why}" for label, why in wrong.items()))
    if reference is not None and reference not in methods:
        raise ConfigError(f"the reference {reference!r} is none of the methods: {', '.join(methods)}.")
    if tune is not None and (shared := sorted(set(tune.seeds) & set(seeds))):
        raise ConfigError(f"seed {shared[0]} is both searched on and compared on; keep the two apart.")
    if tune is not None and len(set(tune.values)) > 1 and base.data.validation == 0:
        raise ConfigError("a search chooses on validation data, and data.validation = 0 leaves none.")
    one_thread = base.model_copy(update={"run": base.run.model_copy(update={"threads": 1, "workers": None})})
    folders: dict[str, str] = {}
    for label in methods:
        if (same := folders.setdefault(folder_name(label), label)) != label:
            raise ConfigError(f"the runs of {same!r} and {label!r} would share the folder {folder_name(label)!r}.")
    run = one_thread.model_dump(mode="json", exclude_defaults=True)
    axis = {
        label: {"method": {"name": section.name, **section.model_dump(mode="json", exclude_defaults=True)}}
        for label, section in methods.items()
    }
    found = Experiment(
        name=name, title=name, question="", metric=metric, reference=reference, run=run,
        axes={AXIS: axis}, tune=tune, profiles={PROFILE: Profile(seeds=list(seeds))},
    )  # fmt: skip
    check_number(found, PROFILE, metric)
    return found


@dataclass(frozen=True)
class ComparedRuns:
    """The folder of a comparison: keeps runs for `runner.run_all`. tuned_key: what is searched, for the names."""

    root: Path
    data_root: Path | None = None
    tuned_key: str | None = None

    def folder(self, run: PlannedRun) -> RunFolder:
        named = RunFolder(self.root / self._name(run))
        if _digest(named) == run.digest:
            return named
        return next((folder for folder in self.folders() if _digest(folder) == run.digest), named)

    def classes(self, run: PlannedRun) -> tuple[str, ...]:
        data = json.loads(run.config.canonical())["data"]
        alike = (folder for folder in self.folders() if _data(folder) == data)
        return next(filter(None, map(stored_classes, [self.folder(run), *alike])), ())

    def folders(self) -> Iterator[RunFolder]:
        """Every run that is there, finished or not."""
        for depth in _DEPTHS:
            for path in sorted(self.root.glob(f"{depth}/manifest.json")):
                yield RunFolder(path.parent)

    def check_place(self, methods: Collection[str]) -> None:
        """May a comparison of these labels be written here? Where nothing is, in an empty folder, where runs of one
        are, and where one was killed before its first run had a manifest.

        Raises:
            ConfigError: the folder holds other files, and no run.
        """
        if not self.root.is_dir() or next(self.folders(), None) is not None:
            return
        found = sorted(os.listdir(self.root))
        theirs = [name for name in found if name not in {_FAILURES, *map(folder_name, methods)}]
        if theirs:
            entries = counted(len(found), "entry", "entries")
            raise ConfigError(
                f"{echo.shown(self.root)} is not empty and holds no run: {entries}, the first that is not of a "
                f"comparison is {echo.quoted(theirs[0])}. Its {PICTURE} could be written over. Nothing "
                f"was written. Name a new or an empty directory with --out."
            )

    def finished(self, *, unclean: bool = False) -> dict[str, Result]:
        """Digest -> result of every finished run. `unclean` makes no difference: they are all of one folder."""
        done: dict[str, Result] = {}
        for folder in self.folders():
            digest = _digest(folder)
            if folder.finished() and digest is not None and (told := _summarised(folder)) is not None:
                done.setdefault(digest, Result(digest, told))
        return done

    def keep(self, run: PlannedRun, wall_seconds: float | None) -> None:
        """The run's folder is its result."""
        self._failure(run).unlink(missing_ok=True)

    def failed(self, run: PlannedRun, error: Exception) -> None:
        """A failure that is no refusal of ours is kept with its traceback; that of a refusal helps nobody."""
        if not isinstance(error, FedLoRAError):
            path = self._failure(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, failure_report(run, error))

    def _failure(self, run: PlannedRun) -> Path:
        return self.root / _FAILURES / f"{'_'.join(self._name(run).parts)}.json"

    def _name(self, run: PlannedRun) -> Path:
        search = ["search"] if run.searching else []
        value = [] if run.tuned is None else [f"{self.tuned_key}={shown(run.tuned)}"]
        return Path(folder_name(run.cell[AXIS]), *search, *value, f"seed-{run.seed}")


def check_data(runs: Sequence[PlannedRun], results: Mapping[str, Result], places: ComparedRuns) -> None:
    """Raises `ConfigError` where a finished one of the runs was of other data than there are now: what is still to be
    run could not be compared with it. One of each seed is looked at, for all of a seed read the same files."""
    seen: set[int] = set()
    for run in runs:
        if run.digest in results and run.seed not in seen:
            seen.add(run.seed)
            now = data_facts(deal(run.config, places.data_root, places.classes(run)))
            if other := _other(results[run.digest].raw["data"], now):
                raise ConfigError(
                    f"{run.label} is finished, and its {other} data are not those that there are now: a file has "
                    f"changed since, and the two cannot be compared. Put the old file back, or choose another --out."
                )


def check_alike(runs: Mapping[str, Mapping[int, Result]]) -> None:
    """Raises `ConfigError` where two runs had another model, or two methods other data on one seed. runs: label -> seed
    -> it."""
    first: dict[int, tuple[str, Result]] = {}
    one: tuple[str, int, Result] | None = None
    for label, by_seed in runs.items():
        for seed, result in by_seed.items():
            one = one or (label, seed, result)
            if one[2].raw["model_sha256"] != result.raw["model_sha256"]:
                raise ConfigError(
                    f"{one[0]}, seed {one[1]}, and {label}, seed {seed}, had another model: its files have changed "
                    f"between these runs, and they cannot be compared. Delete the folders of the older ones and go on "
                    f"with --resume, or choose another --out."
                )
            theirs, their = first.setdefault(seed, (label, result))
            other = _other(their.raw["data"], result.raw["data"])
            if other:
                raise ConfigError(
                    f"{theirs} and {label} had another {other} data on seed {seed}: a file has changed between these "
                    f"runs, and they cannot be compared. Delete the folders of the older ones and go on with --resume, "
                    f"or choose another --out."
                )


def _other(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What of the data differs, in a word."""
    return next((part for part in ("train", "validation", "test", "probes") if there[part] != here[part]), None)


def folder_name(label: str) -> str:
    """A label as the name of a folder."""
    return label.replace(" ", "_").replace(":", ".").replace("/", "-")


def _summarised(folder: RunFolder) -> dict[str, Any] | None:
    """A finished run's result; None where a part of it is gone, so that the run has to make it again."""
    try:
        return summarise(folder, 0.0) if folder.whole() else None
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the finished run in {folder.path} cannot be read ({why.rstrip('.')}). Delete that folder, and --resume "
            f"runs it again."
        ) from error


def _digest(folder: RunFolder) -> str | None:
    """Of the configuration of the run there; None where there is none, or it cannot be read."""
    try:
        manifest: Any = folder.read_json("manifest.json")
    except CheckpointError:
        return None
    found = manifest.get("config_digest") if isinstance(manifest, dict) else None
    return found if isinstance(found, str) else None


def _data(folder: RunFolder) -> Any:
    """Table [data] of the run there, as it is stored; None where it cannot be read."""
    try:
        return folder.read_json("config.json").get("data")
    except CheckpointError:
        return None


def _wrong(section: MethodSection) -> str | None:
    try:
        section.build()
    except FedLoRAError as error:
        return str(error)
    return None
