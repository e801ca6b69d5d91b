"""Two tiers: `make test` takes some cases of a large product of parameters, `make exhaustive` the others.

    @pytest.mark.quick(24)      24 of the function's cases are in the quick tier, the others are exhaustive

The 24 are always the same: first cases that together have each value of each parameter, then those with the most pairs
of values that none before had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def divide(items: Sequence[pytest.Item]) -> None:
    """Marks as exhaustive what is left out of the quick tier."""
    of_function: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") is not None:
            of_function[item.nodeid.partition("[")[0]].append(item)
    for cases in of_function.values():
        count = int(cases[0].get_closest_marker("quick").args[0])
        stay = chosen([dict(_named(case.callspec.params)) for case in cases], count)
        for k, case in enumerate(cases):
            if k not in stay:
                case.add_marker(pytest.mark.exhaustive)


def chosen(cases: Sequence[Mapping[str, str]], count: int) -> set[int]:
    """Which cases stay. cases: parameter -> its value.

    Example:
        >>> sorted(chosen([{"a": a, "b": b} for a in "xy" for b in "uv"], 2))
        [0, 3]
    """
    values = [set(case.items()) for case in cases]
    pairs = [set(combinations(sorted(each), 2)) for each in values]
    found: set[int] = set()
    for parts in (values, pairs):
        seen = set().union(*(parts[k] for k in found)) if found else set()
        while len(found) < min(count, len(cases)):
            best = max((k for k in range(len(cases)) if k not in found), key=lambda k: (len(parts[k] - seen), -k))
            if not parts[best] - seen:
                break
            found.add(best)
            seen |= parts[best]
    left = [k for k in range(len(cases)) if k not in found]
    missing = min(count, len(cases)) - len(found)
    return found | {left[k * len(left) // missing] for k in range(missing)} if missing > 0 else found


def _named(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each parameter's value in words. A text "linear: rsLoRA" is two of them."""
    for name, value in params.items():
        words = value.split(": ") if isinstance(value, str) else [repr(value)]
        yield from ((f"{name} {k}", word) for k, word in enumerate(words))
