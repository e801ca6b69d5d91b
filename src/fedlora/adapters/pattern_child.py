"""The process in which strangers' patterns are compiled and matched; `patterns` runs this text in a Python of its own.

Arguments: seconds of processor time, seconds by the clock, bytes of memory, and the largest product of nested counts.
Standard input: a line of JSON with the questions, then one with each name. Standard output: lines of JSON with the
version of Python, the answers for each name, and "done"; or {"refused": ..., "question": ..., "pattern": ...}.
It imports nothing of fedlora, so that it starts in milliseconds and needs no installation.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
from re import _parser  # type: ignore[attr-defined]

OUT_OF_MEMORY, BROKEN = 3, 4  # exit codes
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)


def confine(processor: int, clock: int, memory: int) -> None:
    """This process ends itself at its limits, whatever it is doing and whoever waits for it."""
    faulthandler.dump_traceback_later(clock, exit=True)  # a thread that needs no lock: matching does not let go of it
    try:
        import resource
    except ImportError:  # Windows: by the clock alone
        return
    limits = {"RLIMIT_CPU": processor, "RLIMIT_AS": _held(resource.getpagesize()) + memory, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        which = getattr(resource, name, None)
        if which is None:
            continue
        hard = resource.getrlimit(which)[1]
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(which, (soft, hard))
        except (OSError, ValueError):  # macOS takes no limit of addresses; the others are left
            continue


def _held(page: int) -> int:
    """Bytes of addresses in use already; where the system does not tell, what a bare Python takes at most."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * page
    except OSError:
        return 512 * 2**20


def count(pattern: str) -> int:
    """The largest product of counts that are nested in each other: 6 for (a{2}b){3}. Written without recursion."""
    largest, waiting = 1, [(_parser.parse(pattern), 1)]
    while waiting:
        node, product = waiting.pop()
        largest = max(largest, product)
        if isinstance(node, _parser.SubPattern):
            waiting += [(one, product) for one in node.data]
        elif isinstance(node, list | tuple):
            if node and any(node[0] is repeat for repeat in _REPEATS):
                low, high, inner = node[1]
                waiting.append((inner, product * max(low if high == _parser.MAXREPEAT else high, 1)))
            else:
                waiting += [(one, product) for one in node if isinstance(one, list | tuple | _parser.SubPattern)]
    return largest


def refused(why: str, question: int, pattern: int) -> None:
    """Say which pattern is none, and end."""
    print(json.dumps({"refused": why, "question": question, "pattern": pattern}))
    raise SystemExit


def compiled(questions: list[dict[str, list[str]]], most: int) -> list[list[re.Pattern[str]]]:
    """All patterns, each looked at before it is compiled."""
    found: list[list[re.Pattern[str]]] = []
    for q, question in enumerate(questions):
        found.append([])
        for k, pattern in enumerate(question["patterns"]):
            try:
                product = count(pattern)
                if product > most:
                    refused(f"counts {product:,} repetitions, more than the {most:,} allowed", q, k)
                found[-1].append(re.compile(pattern))
            except (re.error, RecursionError, OverflowError, ValueError) as error:
                refused(f"is not a regular expression: {str(error)[:200]}", q, k)
    return found


def main(processor: int, clock: int, memory: int, most: int) -> None:
    confine(processor, clock, memory)
    print(sys.hexversion, flush=True)
    lines = sys.stdin.buffer
    questions = json.loads(lines.readline())
    patterns = compiled(questions, most)
    met: list[set[int]] = [set() for _ in questions]
    for line in lines:
        name = json.loads(line)
        asked = zip(questions, patterns, met, strict=True)
        print(json.dumps([answer(question["kind"], several, name, seen) for question, several, seen in asked]))
    print("done")


def answer(kind: str, patterns: list[re.Pattern[str]], name: str, seen: set[int]) -> int | str | None:
    """The number of the first pattern that matches; of a layer, what the first one that matches takes for its index.

    seen: patterns that a name has matched before. At the end of names the others are asked in any case, as peft does
    to warn of patterns that mean nothing.
    """
    found: int | str | None = None
    first = True
    for k, pattern in enumerate(patterns):
        if not first and k in seen:
            continue
        match = pattern.fullmatch(name) if kind == "whole" else pattern.match(name)
        if match is None:
            continue
        seen.add(k)
        if first:
            found, first = match.groupdict().get("idx") if kind == "layer" else k, False
        if kind != "end":
            break
    return found


if __name__ == "__main__":
    try:
        main(*(int(argument) for argument in sys.argv[1:]))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except Exception:
        sys.exit(BROKEN)
