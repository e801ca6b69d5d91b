"""Finished runs that no table shows: no commit describes their code. How many, why, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fedlora.experiments.grid.plan import mains, searches
from fedlora.experiments.grid.spec import Experiment
from fedlora.experiments.stored.results import Result


def left_out(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    unclean: Mapping[str, Result],
    folder: Path,
    failed: Mapping[str, str],
) -> list[str]:
    """A line where runs of the profile, of its search or its table, have no result but an unclean one.

    unclean: results of code that no commit describes, of `folder`. results: all the others.
    """
    aside = {digest: result for digest, result in unclean.items() if digest not in results}
    if not aside:
        return []
    runs = [*searches(experiment, profile), *mains(experiment, profile, {**aside, **results}, failed)]
    gone = [aside[digest] for digest in dict.fromkeys(run.digest for run in runs) if digest in aside]
    if not gone:
        return []
    counts = Counter("was installed without git" if result.raw["commit"] is None else
                     "was changed after its commit" for result in gone)  # fmt: skip
    why = " and ".join(f"{count} of code that {what}" for what, count in counts.items())
    many = len(gone) > 1
    return [
        f"{experiment.name}, profile {profile}: {len(gone)} finished run{'s are' if many else ' is'} left out, because "
        f"no commit says which code made {'them' if many else 'it'}: {why}. {'They stand' if many else 'It stands'} in "
        f"{folder}. To have such runs counted, make them from a git checkout without changes (git clone, pip install "
        f"-e), in a new work folder: fedlora experiment run {experiment.name} --profile {profile} --work NEW."
    ]
