"""One round by hand, from uploads as folders to the merged adapter and one for each client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.collection import Collection
from fedlora.adapters.merging import ClientReport, MergeReport, Parts, Place, Progress, Result, Source, write_result
from fedlora.adapters.narrowing import parse_type
from fedlora.adapters.truncation import RankRule, combine
from fedlora.adapters.uploads import read_facts, read_round
from fedlora.core.messages import Missing
from fedlora.core.method import Method
from fedlora.offline.readouts import hand_out, readout_ranks
from fedlora.offline.server import ByHand
from fedlora.server.judged import Judged
from fedlora.server.robust_rules import Rule


def merge_round(
    given: Collection,
    place: Place,
    method: Method[Any],
    label: str,
    wanted: Result,
    *,
    missing: Missing,
    state: Path | None = None,
    readout: str | None = None,
    rule: Rule | None = None,
    said: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[MergeReport, int | None]:
    """The server update of a method, written like any merge, and what its clients go on from.

    The state appears last: a round whose result nobody saw may be played again.

    Args:
        label: the method as it was typed. state: where the server's is kept; with it the update is of more than these
            adapters. readout: "same" or a file of ranks: also an adapter for each client, below `out`.
        rule: a robust rule, which weighs the clients' changes; what it did is in the report's remarks.

    Returns:
        the report, and the round that the state is of, where there is one.
    """
    clients = [read_facts(file.directory, file.limits)[0] for file in given.files]
    ranks, more = readout_ranks(readout, clients, given.files) if readout is not None else ({}, [])
    hand = ByHand(method, label, state, base=given.files[0].base, missing=missing, rule=rule)
    hand.check_apart(place.out)
    after = hand.aggregate(
        given, clients, given.weights, [read_round(file.directory, file.limits) for file in given.files]
    )
    judged = after.tally.judged if after.tally is not None else None
    more = [*more, *(_weighed(judged) if judged is not None else [])]
    label = f"{label}, weighed by {judged.rule}" if judged is not None else label
    updates = hand.whole()
    exact, wide = RankRule("exact"), parse_type(wanted.dtype) if wanted.dtype else torch.float32
    source = Source(
        [module for module in given.modules if module in updates] + [m for m in updates if m not in set(given.modules)],
        lambda module: combine(module, [updates[module]], [1.0], wide),
        f"The server update of {label}",
        "the mean of the adapters" if state is None else "the server's update",
        None if state is not None else lambda module: given.merged(module, exact, missing, wide),
    )
    with ExitStack() as last:

        def also(building: Path | None, parts: Parts) -> tuple[Sequence[ClientReport], Sequence[str]]:
            found = hand_out(hand, ranks, building, parts, updates, label, wanted.max_error)
            if building is not None:
                last.enter_context(hand.saving())
            return found

        report = write_result(given, place, wanted, source, missing, [*said, *more], progress, also)
    return report, after.round if state is not None else None


def _weighed(judged: Judged) -> list[str]:
    """A line for each client that a robust rule left out or held back, and one where there is none."""
    lines = [
        f"{judged.rule}: the change of {name} counts {one.after:.1%} instead of {one.before:.1%}"
        + (f": {one.why}" if one.why else f" (norm {one.norm:.4g}, {one.distance:.4g} from the robust change)")
        for name, one in judged.clients.items()
        if one.after < one.before * (1 - 1e-9)
    ]
    return lines or [f"{judged.rule}: all changes count as they came"]
