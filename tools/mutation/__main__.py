"""`make mutants`: python -m mutation COMMAND, in the project's folder, with tools/ on PYTHONPATH.

note        put others in place of changes whose code is gone, run a tier's tests once and note which places they pass;
            as long as these tests take, alone on the machine
try         what was not tried yet, or, with the exhaustive tier, what nothing quick has found; --part 1/4: a quarter of
            it; stops after each batch without loss
check       only the cases that are stored, as far as they are in the tier that found it: does each change that was
            killed still die? minutes
table       what CONTRIBUTING.md shows
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mutation import killing, stored
from mutation.sites import SHARES, there
from mutation.stored import Tried

BATCH = 40  # changes that one process tries; what it found is stored after each


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["note", "try", "check", "table"])
    parser.add_argument("tests", nargs="*", help="of note: only these files and folders")
    parser.add_argument("--tier", choices=list(killing.TIERS), default="quick", help="of note and try")
    parser.add_argument("--again", action="store_true", help="of try: also what no quick test had killed")
    parser.add_argument("--part", default="1/1", help="of try: i/n")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the tests of one change")
    parser.add_argument("--workers", type=int, default=2)
    said = parser.parse_intermixed_args()
    if said.command == "note":
        stored.renew()
        killing.note(said.tier, said.tests)
    elif said.command == "try":
        part, parts = map(int, said.part.split("/"))
        _try(said.tier, (part, parts), said.seconds, said.workers, again=said.again)
    elif said.command == "check":
        return _check(said.seconds, said.workers)
    print(table(stored.read()))
    return 0


def _try(tier: str, part: tuple[int, int], seconds: float, workers: int, *, again: bool) -> None:
    reached = killing.noted()
    everything = stored.read()
    alive = [k for k, each in enumerate(everything) if each.verdict not in ("killed", "equivalent")]
    left_by = {"quick": [k for k in alive if again or not everything[k].verdict]}
    left_by["exhaustive"] = [k for k in alive if everything[k].tier == "quick" and k in reached]
    todo = [k for k in left_by[tier] if k % part[1] == part[0] - 1]
    for begin in range(0, len(todo), BATCH):
        began, batch = time.monotonic(), todo[begin : begin + BATCH]
        orders = {k: killing.in_order(reached[k], everything[k].change.package) for k in batch if k in reached}
        found = killing.tried(orders, seconds, workers, killing.TIERS[tier])
        everything = stored.read()
        for k in batch:
            verdict, by, ran, spent = found.get(k, ("not reached", [], 0, 0.0))
            functions = len({stored.function_of(case) for case in orders.get(k, ())})
            if verdict == "not reached" and everything[k].verdict:
                verdict = everything[k].verdict
            everything[k] = replace(
                everything[k], verdict=verdict, tier=tier, by=tuple(by), reached=functions, ran=ran, seconds=spent
            )
        stored.write(everything)
        left = len(todo) - begin - len(batch)
        print(f"{len(batch)} tried in {time.monotonic() - began:.0f} s, {left} left", flush=True)


def _check(seconds: float, workers: int) -> int:
    """Names each change whose stored cases do not find it any more. 1 where there is one."""
    everything = stored.read()
    killed = {k: each.by for k, each in enumerate(everything) if each.verdict == "killed"}
    known = there()
    gone = [k for k in killed if everything[k].change.id not in known]
    found = {}
    for tier, which in killing.TIERS.items():  # a case that moved to the other tier finds nothing here
        cases = {k: by for k, by in killed.items() if k not in gone and everything[k].tier == tier}
        found |= killing.tried(cases, seconds, workers, which)
    lost = [k for k, (verdict, *_) in found.items() if verdict != "killed"]
    print(
        f"{len(killed)} were killed; the code of {len(gone)} is gone, {len(lost)} are not killed by the stored cases:"
    )
    for k in lost:
        change = everything[k].change
        print(f"  {change.file}, {change.function}: {change.before} -> {change.after}")
        print(*(f"    was killed by {case}" for case in everything[k].by), sep="\n")
    return 1 if lost else 0


def table(everything: Sequence[Tried]) -> str:
    """Package, changes, what all tests find and what `make test` finds, and the others."""
    words = ("equivalent", "survived", "time", "not reached", "")
    rows = [
        "| package | changes | killed by any test | by `make test` | equivalent | survived | time over | not reached "
        "| not tried |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in (*SHARES, ""):
        those = [each for each in everything if each.change.file.startswith(f"fedlora/{name}")]
        found = Counter(each.verdict for each in those)
        quick = sum(each.verdict == "killed" and each.tier == "quick" for each in those)
        numbers = (found.total(), found["killed"], quick, *(found[word] for word in words))
        rows.append(f"| {name or 'all'} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
