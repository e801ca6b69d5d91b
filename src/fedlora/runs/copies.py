"""Copies of one text on two sides of a run: what is held out and trained on as well, or chosen by and tested on."""

from __future__ import annotations

from collections.abc import Iterable

from fedlora.data import TextData
from fedlora.data.splits import inputs
from fedlora.runs.client_data import Dealt


def straddling(dealt: Dealt) -> dict[str, dict[str, int]]:
    """Held-out set -> how many examples it has ("examples"), and how many of them are copies of a training text ("in
    training") or of a validation text ("in validation"). Sets without copies are left out.

    Shares are drawn so that there are none; files of one's own, and a benchmark's official splits, may hold some.
    """
    trained, chosen_by = _texts(dealt.parts.values()), _texts(dealt.validation.values())
    held = {"validation": dealt.validation, "test": dealt.test, **dealt.probes}
    if dealt.own_test and not any(len(part) for part in dealt.test.values()):
        held["test"] = dealt.own_test
    found = {}
    for name, sets in held.items():
        texts = [one for part in sets.values() for one in inputs(part)]
        counts = {"in training": sum(one in trained for one in texts)}
        if name != "validation":
            counts["in validation"] = sum(one in chosen_by for one in texts)
        if any(counts.values()):
            found[name] = {"examples": len(texts), **counts}
    return found


def _texts(parts: Iterable[TextData]) -> set[tuple[str, str]]:
    return {one for part in parts for one in inputs(part)}
