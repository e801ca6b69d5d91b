"""Which tests find a change: the cheapest case of each function that reaches it, then further cases of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutation.stored import function_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
NOTES = FOLDER / "passed"
ALONE = FOLDER / "alone.json"  # what is known of cases in forks by themselves
# No import hook but ours (shape annotations are off), and no order of workers
OPTIONS = ("-q", "--import-mode=importlib", "-p", "mutation.plugin", "-p", "no:cacheprovider", "-o", "timeout=300")
ENOUGH = 3  # functions that find a change: those that did not run by then are left out
BOTH = "not deployment and not deployment_all and not release"
TIERS = {"quick": f"{BOTH} and not exhaustive", "exhaustive": f"{BOTH} and exhaustive"}


def note(tier: str, tests: Sequence[str] = ()) -> None:
    """Runs all tests of a tier once, unchanged, and notes what each passes. tests: only these, beside what is noted."""
    if not tests:
        shutil.rmtree(NOTES / tier, ignore_errors=True)
        ALONE.unlink(missing_ok=True)
    (NOTES / tier).mkdir(parents=True, exist_ok=True)
    _pytest(["-n", "2", "--dist", "worksteal", "-m", TIERS[tier], *tests], MUTATION_NOTES=str(NOTES / tier))


def noted() -> dict[int, list[tuple[str, float]]]:
    """Number of a change -> the cases that reach it, with their seconds. Of both tiers: a case may have moved."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for path in sorted(NOTES.glob("*/*.jsonl")):
        for line in path.read_text().splitlines():
            case, seconds, numbers = json.loads(line)
            for number in numbers:
                found[number][case] = seconds
    return {number: list(cases.items()) for number, cases in found.items()}


def in_order(cases: Sequence[tuple[str, float]], package: str) -> list[str]:
    """The cheapest case of each function, the cheapest function first; then the second of each, and so on. All tests of
    the package itself are before the others."""
    by_function: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case, seconds in cases:
        by_function[function_of(case)].append((seconds, case))
    ranked = [
        (package not in function.partition("::")[0], k, each)
        for function, those in by_function.items()
        for k, each in enumerate(sorted(those))
    ]
    return [case for *_, (_, case) in sorted(ranked)]


def tried(
    numbers: Mapping[int, Sequence[str]], seconds: float, workers: int, which: str
) -> dict[int, tuple[str, list[str], int, float]]:
    """Number -> verdict, cases that fail, how many ran, seconds. numbers: with the cases to run, in this order, as far
    as pytest selects them by -m `which`.

    A case that fails without the change, too, when it runs in a fork by itself, counts for nothing, and no other of its
    function does: changes that they seemed to find are tried again without them.
    """
    out = FOLDER / "outcomes"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    alone: dict[str, bool] = json.loads(ALONE.read_text()) if ALONE.exists() else {}  # case -> does it fail by itself?
    done: dict[int, tuple[str, list[str], int, float]] = {}
    while left := {number: cases for number, cases in numbers.items() if number not in done}:
        useless = {function_of(case) for case, fails in alone.items() if fails}
        left = {k: [case for case in cases if function_of(case) not in useless] for k, cases in left.items()}
        _forks([_task(number, cases, seconds, ENOUGH, out) for number, cases in left.items()], workers, which)
        found = {number: _outcome(out / f"{number}.jsonl") for number in left}
        suspects = sorted({case for _, by, _, _ in found.values() for case in by} - alone.keys())
        controls = {case: f"control-{k}" for k, case in enumerate(suspects)}
        _forks([_task(name, [case], seconds, 1, out) for case, name in controls.items()], workers, which)
        alone |= {case: bool(_outcome(out / f"{name}.jsonl")[1]) for case, name in controls.items()}
        ALONE.write_text(json.dumps(alone))
        done |= {number: outcome for number, outcome in found.items() if not any(alone[case] for case in outcome[1])}
    return done


def _task(name: int | str, cases: Sequence[str], seconds: float, enough: int, out: Path) -> dict[str, object]:
    """For the plugin. name: a change's number, or that of a control, which changes nothing."""
    place = out / f"{name}.jsonl"
    place.unlink(missing_ok=True)
    number = name if isinstance(name, int) else None
    return {"number": number, "cases": list(cases), "seconds": seconds, "enough": enough, "out": str(place)}


def _forks(tasks: Sequence[Mapping[str, object]], workers: int, which: str) -> None:
    listed = FOLDER / "tasks.json"
    listed.write_text(json.dumps(tasks))
    named = {str(case).partition("::")[0] for task in tasks for case in task["cases"]}  # type: ignore[attr-defined]
    wanted = sorted(name for name in named if (ROOT / name).exists())
    if wanted:
        _pytest(["-s", "-m", which, *wanted], MUTATION_TASKS=str(listed), MUTATION_WORKERS=str(workers))


def _outcome(path: Path) -> tuple[str, list[str], int, float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    by = [name for word, name, _ in lines if word == "failed"]
    began = [name for word, name, _ in lines if word == "began"]
    word = lines[-1][0] if lines else "end"
    if word in ("began", "broke") and began and began[-1] not in by:
        by.append(began[-1])  # it ended the process, or hung it
    return (
        ("killed" if by else "time" if word == "time" else "survived" if began else "not reached"),
        by,
        len(began),
        max((at for _, _, at in lines), default=0.0),
    )


def _pytest(words: Sequence[str], **more: str) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, **more, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", *OPTIONS, *words], cwd=ROOT, env=environment, check=False
    )
    print(f"{time.monotonic() - began:.0f} s")
