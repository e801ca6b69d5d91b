"""A comparison: methods on one configuration over seeds, as an experiment with one axis and readable folder names.

OUT/METHOD/seed-0                       with a search: OUT/METHOD/train.lr=0.003/seed-0
OUT/METHOD/search/train.lr=0.003/seed-1000
OUT/results.jsonl                       the finished runs (`fedlora.results`)
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files, text
from fedlora.errors import CheckpointError, ConfigError, FedLoRAError, counted
from fedlora.experiments.digits import shown
from fedlora.experiments.grid import Grid
from fedlora.experiments.places import Places, failure_report
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import Result
from fedlora.experiments.runnable import check_number
from fedlora.experiments.spec import Experiment, Profile, Tune
from fedlora.experiments.spec_checks import check_set_once
from fedlora.experiments.store import gather, rewrite, summarise
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import differing
from fedlora.runs.resuming import changes, check_finished, stored_classes
from fedlora.runs.sections import MethodSection

PROFILE = "comparison"  # the only profile of a comparison's experiment
AXIS = "method"
SEARCH_SEED = 1000
PICTURE = "comparison.png"  # in OUT
RESULTS = "results"  # .jsonl, in OUT
_FAILURES = "failures"
_DEPTHS = ("*/*", "*/*/*", "*/*/*/*")  # METHOD/seed-0, METHOD/VALUE/seed-0, METHOD/search/VALUE/seed-0


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
    """The methods by label, on the configuration. Each run has one process and one thread, so that parallel runs change
    no bit and do not slow each other down.

    Args:
        methods: label -> its section. The bare name of the configuration's own method means the configuration's.
        metric: the compared number, as `Result.score` takes it.
        reference: the label that the others are compared with.
        tune: the search for each method. Its seeds must not be compared seeds.

    Raises:
        ConfigError: unknown methods or settings, all in one line; a reference that is not a label; a search on compared
            seeds, or without validation data; an unknown metric, or one that no run of the configuration has;
            [privacy].
    """
    if base.privacy is not None:
        raise ConfigError(
            "[privacy] and compare do not go together: every run of it, searches included, would be charged to the "
            "clients' ledger, and the first would leave nothing for the others. Compare on public data without the "
            "table; then fedlora run."
        )
    methods = {label: base.method if label == base.method.name else section for label, section in methods.items()}
    wrong = {label: why for label, section in methods.items() if (why := _wrong(section)) is not None}
    if wrong:
        raise ConfigError("; ".join(f"{label}: {why}" for label, why in wrong.items()))
    if reference is not None and reference not in methods:
        raise ConfigError(f"the reference {reference!r} is not one of the methods: {', '.join(methods)}.")
    if tune is not None and (shared := sorted(set(tune.seeds) & set(seeds))):
        raise ConfigError(f"seed {shared[0]} is both searched on and compared on; keep the two apart.")
    if tune is not None and len(set(tune.values)) > 1 and base.data.validation == 0:
        raise ConfigError("a search chooses on validation data, and data.validation = 0 leaves none.")
    one_thread = base.model_copy(update={"run": base.run.model_copy(update={"threads": 1, "workers": None})})
    folders: dict[str, str] = {}
    for label in methods:
        if (same := folders.setdefault(folder_name(label), label)) != label:
            raise ConfigError(f"the runs of {same!r} and {label!r} would share the folder {folder_name(label)!r}.")
    run = one_thread.model_dump(mode="json", exclude_defaults=True, exclude={"method"})  # the axis has it
    axis = {
        label: {"method": {"name": section.name, **section.model_dump(mode="json", exclude_defaults=True)}}
        for label, section in methods.items()
    }
    if tune is not None and base.method.name in axis:  # a search starts from the configuration's own value
        axis[base.method.name]["method"].pop(tune.key.removeprefix("method."), None)
    found = Experiment(
        name=name, title=name, question="", metric=metric, reference=reference, run=run,
        axes={AXIS: axis}, tune=tune, profiles={PROFILE: Profile(seeds=list(seeds))},
    )  # fmt: skip
    check_set_once(found)
    check_number(Grid(found, PROFILE))
    return found


def default_metric(base: RunConfig) -> str:
    """The test set at the best validation round; without validation data, at the last; without a test set, validation.
    Raises `ConfigError` if there is neither."""
    if base.data.task is not None:
        return "test, best"
    if base.data.test != 0 or base.clients.own_test is not None:
        return "test, best" if base.data.validation != 0 else "test, last"
    if base.data.validation == 0:
        raise ConfigError("data.validation and data.test are both 0: there is nothing to compare methods by.")
    return "validation, best"


@dataclass(frozen=True)
class ComparedRuns(Places):
    """The folder of a comparison, OUT: its runs by name, their results in one file.
    tuned_key: the searched key, for the names."""

    tuned_key: str | None = None

    @classmethod
    def at(cls, root: Path, data_root: Path | None = None, tuned_key: str | None = None) -> ComparedRuns:
        return cls(root, root, data_root, tuned_key)

    def folder(self, run: PlannedRun) -> RunFolder:
        """The folder with its name, or any folder with a run of its digest, because names change with --tune."""
        named = RunFolder(self.work / self._name(run))
        if _digest(named) == run.digest:
            return named
        return next((folder for folder in self.folders() if _digest(folder) == run.digest), named)

    def classes(self, run: PlannedRun) -> tuple[str, ...]:
        """The run's stored classes, or those of another run on the same data, because the two are compared."""
        data = json.loads(run.config.canonical())["data"]
        alike = (folder for folder in self.folders() if _data(folder) == data)
        return next(filter(None, map(stored_classes, [self.folder(run), *alike])), ())

    def folders(self) -> Iterator[RunFolder]:
        """Every existing run, finished or not."""
        for depth in _DEPTHS:
            for path in sorted(self.work.glob(f"{depth}/manifest.json")):
                yield RunFolder(path.parent)

    def check_place(self, methods: Collection[str]) -> None:
        """Check that a comparison of these labels may be written here: there is nothing, an empty folder, a
        comparison's runs, or what remains if it was killed before its first run had a manifest.

        Raises:
            ConfigError: the folder holds other files, and no run.
        """
        if not self.work.is_dir() or next(self.folders(), None) is not None:
            return
        found = sorted(os.listdir(self.work))
        theirs = [name for name in found if name not in {_FAILURES, *map(folder_name, methods)}]
        if theirs:
            entries = counted(len(found), "entry", "entries")
            raise ConfigError(
                f"{text.shown(self.work)} is not empty and holds no run: {entries}, the first that is not of a "
                f"comparison is {text.quoted(theirs[0])}. Its {PICTURE} could be written over. Nothing "
                f"was written. Name a new or an empty directory with --out."
            )

    def finished(self) -> Mapping[str, Result]:
        """Digest -> result of every finished run, from its folder."""
        found: dict[str, Result] = {}
        for folder in self.folders():
            if folder.finished() and (told := _summarised(folder)) is not None:
                found.setdefault(told.digest, told)
        return found

    def done(self, run: PlannedRun) -> bool:
        folder = self.folder(run)
        with suppress(CheckpointError):  # a damaged run is not done; running it reports the damage
            return _digest(folder) == run.digest and folder.finished()
        return False

    def keep(self, run: PlannedRun, wall_seconds: float | None) -> None:
        gather(self.results, RESULTS, self.summary(run, wall_seconds))
        self.failure(run).unlink(missing_ok=True)

    def restore(self) -> None:
        """Rewrite the results file from the finished runs: some may be missing or damaged after a kill, and others may
        have changed or gone."""
        if found := self.finished():
            rewrite(self.results, RESULTS, found)

    def failed(self, run: PlannedRun, error: Exception) -> None:
        """Keep a failure with its traceback, except fedlora's own refusals, whose traceback helps nobody."""
        if not isinstance(error, FedLoRAError):
            files.write(self.failure(run), failure_report(run, error))

    def failure(self, run: PlannedRun) -> Path:
        return self.work / _FAILURES / f"{'_'.join(self._name(run).parts)}.json"

    def _name(self, run: PlannedRun) -> Path:
        search = ["search"] if run.searching else []
        value = [] if run.tuned is None else [f"{self.tuned_key}={shown(run.tuned)}"]
        return Path(folder_name(run.cell[AXIS]), *search, *value, f"seed-{run.seed}")


def check_read(runs: Sequence[PlannedRun], places: ComparedRuns) -> list[str]:
    """Check that existing runs, finished or not, belong to this configuration and read the current files, as new runs
    will. This includes finished runs that were not requested, because one frame shows all results in the folder.
    Returns in words which files are gone, so that they cannot be checked. Raises `CheckpointError` for a difference,
    and names it."""
    gone: list[str] = []
    asked = set()
    for run in runs:
        folder = places.folder(run)
        asked.add(folder.path)
        if _digest(folder) == run.digest:
            gone += check_finished(folder, run.config)
        elif folder.exists():
            changes(folder, run.config)
    for folder in places.folders():
        if folder.path not in asked and folder.finished():
            config = RunConfig.model_validate(folder.read_json("config.json"))
            gone += check_finished(folder, config)
    return gone


def check_alike(runs: Sequence[PlannedRun], places: ComparedRuns) -> None:
    """Raises `ConfigError` if two of these finished runs, including the search's, read different things: another model,
    or other data for one seed."""
    first: dict[Any, tuple[str, Any]] = {}
    for run in runs:
        manifest, config = places.folder(run).read_json("manifest.json"), run.config
        dealt = config.model_dump_json(include={"data", "clients", "attack"})
        for table, shared in (("model", ""), ("data", f"{config.run.seed} {dealt}")):
            facts = {table: manifest.get(table, {})}
            label, theirs = first.setdefault((table, shared), (run.label, facts))
            if other := differing(theirs, facts):
                words = ", ".join(word for each in other.values() for word in each)
                raise ConfigError(
                    f"{label} and {run.label} did not read the same: {words}. It changed between these runs, so they "
                    f"cannot be compared. Delete the folders of the older ones and continue with --resume, or choose "
                    f"another --out."
                )


def folder_name(label: str) -> str:
    """A label as a folder's name."""
    return label.replace(" ", "_").replace(":", ".").replace("/", "-")


def _summarised(folder: RunFolder) -> Result | None:
    """A finished run's result; None if part of it is gone, so that the run must make it again."""
    try:
        if _digest(folder) is None:
            return None
        return summarise(folder, RunConfig.model_validate(folder.read_json("config.json")))
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the finished run in {folder.path} cannot be read ({why.rstrip('.')}). Delete that folder, and --resume "
            f"runs it again."
        ) from error


def _digest(folder: RunFolder) -> str | None:
    """The digest of the configuration of the run there; None if there is none, or it cannot be read."""
    try:
        manifest: Any = folder.read_json("manifest.json")
    except CheckpointError:
        return None
    found = manifest.get("config_digest") if isinstance(manifest, dict) else None
    return found if isinstance(found, str) else None


def _data(folder: RunFolder) -> Any:
    """Table [data] of the run there, as stored; None if it cannot be read."""
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
