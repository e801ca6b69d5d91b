"""Results: one small JSON for each finished run, named by its configuration's digest, so that experiments share runs.

Nothing in it depends on where it was made but for "machine", "parts" and "seconds": no paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedlora.core import files
from fedlora.errors import CheckpointError
from fedlora.experiments.scores.numbers import Number, parse_number
from fedlora.experiments.stored.checked_results import check_result
from fedlora.experiments.stored.parts import is_clean, machine_of, noted
from fedlora.experiments.stored.stored_json import read_table, shown
from fedlora.runs.folder import RunFolder, plain
from fedlora.training.metrics import find_metric, is_better

PADDED = "padded-average"  # the method whose error every run measures on its own uploads
MERGERS = "mergers.json"  # in a run's folder: what `mergers` made of its uploads
# One line of a run's log in short: what curves and spreads need.
_KEPT = ("round", "metrics", "losses", "server_rank", "padded_error")


@dataclass(frozen=True)
class Result:
    """A finished run. raw: the whole file."""

    digest: str
    raw: Mapping[str, Any]

    @property
    def metric(self) -> str:
        name: str = self.raw["metric"]
        return name

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """What computed it: "commit" and "machine" of each part of the training and of its mergers, or of the one
        merger that it is. Of trainings and mergers that noted none there is the commit that the training began with."""
        made = [self.raw["of"]] if "of" in self.raw else self.raw.get("mergers", {}).values()
        trained = self.raw.get("parts") or [{"commit": self.raw["commit"], "machine": self.raw["machine"]}]
        return [*trained, *(facts for facts in made if "commit" in facts)]

    def commits(self, digits: int) -> list[str]:
        """Of all its parts, each once, cut to so many digits; "unknown" for code outside a checkout."""
        return list(dict.fromkeys(_commit_words(part["commit"], digits) for part in self.parts))

    @property
    def clean(self) -> bool:
        """Whether every part of it comes of a commit without changes."""
        return all(is_clean(part["commit"]) for part in self.parts)

    @property
    def validation_best(self) -> float:
        """NaN where no round had a number: it diverged at once."""
        score = self.raw["validation"]["best"].get(self.metric)
        return math.nan if score is None else float(score)

    def merged(self, label: str, merger: Mapping[str, Any]) -> Result | None:
        """The result of one merger of the run's uploads, as if it were a run; None where none of these settings was
        made. They decide, whatever label it was made under."""
        facts = self.raw.get("mergers", {}).get(label)
        if facts is None or facts["merger"] != merger:
            made: Mapping[str, Any] = self.raw.get("mergers", {})  # an experiment beside this one names it otherwise
            facts = next((each for each in made.values() if each["merger"] == merger), None)
        if facts is None:
            return None
        shown = {part: {"best": facts.get(part, {}), "last": facts.get(part, {})} for part in ("validation", "test")}
        mine = {"history": [], "probes": {"best": {}, "last": {}}, "clients_at_end": {}, "of": facts}
        return Result(self.digest, {**self.raw, **shown, **mine})

    def with_mergers_of(self, other: Result) -> Result:
        """With what another one of this run has of mergers, and this one lacks."""
        mine, theirs = self.raw.get("mergers", {}), other.raw.get("mergers", {})
        new = {
            label if label not in mine else f"{label} (changed)": facts
            for label, facts in theirs.items()
            if self.merged(label, facts["merger"]) is None
        }
        return Result(self.digest, {**self.raw, "mergers": {**new, **mine}}) if new else self

    def score(self, which: str) -> float | None:
        """A number by its name: "test, last", "test, best" (by validation), "unseen, last", "clients, last" (the mean
        of their own readouts), "validation, mean of last 3", "validation, largest drop", "validation, jitter" (the
        standard deviation of its change from one evaluation to the next), "rounds to 0.92" (the first evaluated round
        whose validation reaches it), "server, error". None where the run has no such number: it diverged, never got
        there, or was evaluated too seldom. Raises `ConfigError` for a name that `numbers.KNOWN` lacks.
        """
        number = parse_number(which)
        if number.where == "rounds":
            return self.rounds_to(number.amount)
        if number.where == "validation":
            found = self._of_validation(number)
        elif number.where == "server":
            found = self._of_server(number.what)
        elif number.where == "clients":
            each = [scores.get(self.metric) for scores in self.raw["clients_at_end"].values()]
            found = math.nan if not each or None in each else sum(each) / len(each)
        else:
            found = self._held_out(number.where, number.what).get(self.metric, math.nan)
        return None if found is None or math.isnan(found) else float(found)

    def _of_validation(self, number: Number) -> float:
        """NaN where there is no such number."""
        if number.what == "best":
            return self.validation_best
        found = [line["metrics"][self.metric] for line in self.raw["history"] if line["metrics"]]
        history: list[float] = [
            math.nan if score is None else float(score) for score in found
        ]  # no JSON number: it diverged
        if len(history) < number.evaluations():
            return math.nan
        if number.what == "last":
            return history[-1]
        if number.what == "mean of last":
            return fmean(history[-int(number.amount) :])
        changes = [b - a for a, b in pairwise(history)]
        if any(map(math.isnan, changes)):
            return math.nan
        if number.what == "jitter":
            return stdev(changes)
        up = find_metric(self.metric).larger_is_better
        return max([0.0, *(-change if up else change for change in changes)])  # a rise, where less is better

    def _of_server(self, what: str) -> float:
        """Relative numbers of the last round's update: how far it is from the exact mean, how far it moves when clients
        change their coordinates, and how far zero-padded factor averages of the same uploads would have been off. NaN
        where it was not measured."""
        facts: Mapping[str, Any] = self.raw.get("of", {})  # of a merger
        if what == "error":
            own = self.raw.get("padded_error") if self.raw.get("method") == PADDED else None
            found = facts.get("error") if facts else own
        elif what == "gauge drift":
            method = facts["merger"].get("name") if facts else self.raw.get("method")
            found = (self.raw.get("gauge_drift") or {}).get(method)
        else:
            found = self.raw.get("padded_error")
        return math.nan if found is None else float(found)

    def _held_out(self, where: str, what: str) -> Mapping[str, Any]:
        """The scores on the test set or on a further one; empty where it was not measured."""
        found: Mapping[str, Any] = self.raw["test"] if where == "test" else self.raw["probes"]
        found = found.get(what, {})
        return found if where == "test" else found.get(where, {})

    def by_group(self, which: str) -> dict[str, float]:
        """Held-out set -> its own score, of "test, last", "unseen, last" and so on, where there are several sets."""
        number = parse_number(which)
        scores = self._held_out(number.where, number.what)
        return {
            name.removeprefix("group/"): math.nan if x is None else x  # it diverged
            for name, x in scores.items()
            if name.startswith("group/")
        }

    def rounds_to(self, target: float) -> int | None:
        """The first evaluated round whose validation metric reaches the target; None where none does (censored)."""
        for line in self.raw["history"]:
            if line["metrics"] and not is_better(self.metric, target, line["metrics"][self.metric]):
                return int(line["round"])
        return None


def summarise(folder: RunFolder, wall_seconds: float) -> dict[str, Any]:
    """A finished run's folder as one result."""
    summary, manifest = folder.read_json("summary.json"), folder.read_json("manifest.json")
    lines = folder.metrics()
    diagnostics = summary.pop("diagnostics")
    means = {
        key: sum(values) / len(values)
        for key in ("union_rank", "server_rank", "captured", "base_rank")
        if (values := [f[key] for f in diagnostics.values() if isinstance(f.get(key), int | float)])
    }
    return dict(
        plain(
            {
                "digest": manifest["config_digest"],
                "config": folder.read_json("config.json"),
                **summary,
                "consensus": means,
                "history": [{key: line[key] for key in _KEPT} for line in lines],
                "wall_seconds": round(wall_seconds, 1),
                "versions": manifest["versions"] | {"python": manifest["python"]},
                **_made_by(folder, manifest),
                "data": {
                    part: manifest["data"][part] for part in ("train", "validation", "test", "probes", "label_counts")
                },
                "categories": manifest["data"]["categories"],
                "ranks": manifest["clients"],
                "model_sha256": manifest["model"]["sha256"],
                **({"mergers": folder.read_json(MERGERS)} if (folder.path / MERGERS).is_file() else {}),
            }
        )
    )


def _made_by(folder: RunFolder, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The commit that it began with, which is clean where that of every part is; the machine; and the parts."""
    parts = noted(folder)
    if not parts:
        return {"commit": manifest["commit"], "machine": machine_of(manifest)}
    first = parts[0]["commit"]
    commit = first and {**first, "clean": all(is_clean(part["commit"]) for part in parts)}
    return {"commit": commit, "machine": parts[-1]["machine"] or machine_of(manifest), "parts": parts}


def write_result(directory: Path, result: Mapping[str, Any]) -> Path:
    """DIGEST.json, whole or not at all. Raises `CheckpointError` for what `read_results` would refuse."""
    path = directory / f"{result['digest']}.json"
    told = _rounded(plain(result))
    try:
        check_result(json.loads(json.dumps(told)))
    except ValueError as error:
        raise CheckpointError(f"the result {path} is not written: {error}.") from error
    directory.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(told, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def read_results(directory: Path, *, mixed: bool = False) -> dict[str, Result]:
    """Digest -> result of every file there. Raises `CheckpointError` for one that is damaged, misnamed or changed
    (`checked_results`), and, unless `mixed`, for one of a changed checkout among clean ones."""
    results = {}
    for path in sorted(directory.glob("*.json")):
        try:
            raw = read_table(path)
            if raw.get("digest") != path.stem:
                raise ValueError(f"it holds the result of {shown(raw.get('digest'))}")
            check_result(raw)
        except (OSError, ValueError) as error:
            why = error.strerror or error if isinstance(error, OSError) else error
            raise CheckpointError(
                f"the result {path} cannot be used: {why}. Restore the file from where it was made (git), or move it "
                f"away: then its run is missing, and `fedlora experiment run` makes it again."
            ) from error
        results[path.stem] = Result(path.stem, raw)
    odd = [digest for digest, result in results.items() if not result.clean]
    if 0 < len(odd) < len(results) and not mixed:
        raise CheckpointError(
            f"the result {directory / odd[0]}.json is of a changed checkout, which no commit describes, and lies among "
            f"clean ones. Move it away, best to runs/experiments/unclean, and run it again."
        )
    return results


def unclean_lines(results: Iterable[Result]) -> list[str]:
    """A line where some are of a changed checkout."""
    each = list(results)
    changed = sum(not result.clean for result in each)
    return [f"{changed} of {len(each)} results are of changed checkouts, which no commit describes."] if changed else []


def _commit_words(commit: Mapping[str, Any] | None, digits: int) -> str:
    if commit is None:
        return "unknown"
    return str(commit["id"])[:digits] + ("" if is_clean(commit) else " with changes")


def _rounded(value: Any) -> Any:
    """Six digits are more than a result has, and keep the files small. What a run or a merger is known by stays."""
    if isinstance(value, Mapping):
        return {key: item if key in ("config", "merger") else _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
