"""The changes that are tried, and which tests find them: tests/mutants.jsonl, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mutation.sites import Change, chosen, instead_of, there

PATH = Path(__file__).parents[2] / "tests" / "mutants.jsonl"


@dataclass(frozen=True)
class Tried:
    """What became of a change. verdict: 'killed', 'survived' all tests that reach it, 'time' ran out before they all
    had run, 'not reached' by any test, 'equivalent' where no test can find it, for which `why` says the reason, or ''
    where it was not tried yet. tier: the last one that tried it: 'quick', or
    'exhaustive' after nothing quick had found it. by: cases that fail with it, of several functions. reached:
    functions of tests that pass the place. ran: cases that did run. seconds: of all those."""

    change: Change
    verdict: str = ""
    why: str = ""
    tier: str = ""
    by: Sequence[str] = ()
    reached: int = 0
    ran: int = 0
    seconds: float = field(default=0.0, compare=False)


def read() -> list[Tried]:
    """As they are stored; the choice of `sites` where nothing is stored yet."""
    if not PATH.exists():
        return [Tried(change) for change in chosen()]
    found = []
    for line in PATH.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        keys = ("file", "function", "before", "after", "nth")
        change = Change(**{key: said.pop(key) for key in keys})
        found.append(Tried(change, **{**said, "by": tuple(said["by"])}))
    return found


def renew() -> None:
    """Changes whose code is gone make room for others of the package."""
    known = there()
    everything = read()
    gone = [k for k, each in enumerate(everything) if each.change.id not in known]
    for k in gone:
        everything[k] = Tried(instead_of(everything[k].change, [each.change for each in everything]))
    if gone:  # else another process may have stored what it found meanwhile
        write(everything)


def write(all_of_them: Iterable[Tried]) -> None:
    """Whole or not at all."""
    lines = []
    for tried in all_of_them:
        said = {**asdict(tried.change), **asdict(replace(tried, change=tried.change))}
        del said["change"]
        lines.append(json.dumps({**said, "seconds": round(tried.seconds, 1)}))
    beside = PATH.with_suffix(".new")
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside.replace(PATH)


def function_of(case: str) -> str:
    """The test function of a case."""
    return case.partition("[")[0]
