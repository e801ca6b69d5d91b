"""One round by hand, from upload folders to the merged adapter and one for each client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.agreement import base_weights
from fedlora.adapters.collection import Collection
from fedlora.adapters.labels import labels_of
from fedlora.adapters.merge_report import ClientReport, MergeReport, Weighed
from fedlora.adapters.merge_request import Parts, Place, Progress, Result, Source
from fedlora.adapters.merge_result import write_result
from fedlora.adapters.reader import WEIGHTS_FILE
from fedlora.adapters.truncation import Combined, ModuleReport, RankRule, combine
from fedlora.adapters.untrusted_files import StrangersFile
from fedlora.adapters.uploads import read_facts
from fedlora.core.echo import shown
from fedlora.core.lora import LoRA, stack
from fedlora.core.messages import Missing
from fedlora.core.method import Method
from fedlora.errors import ConfigError
from fedlora.methods import build
from fedlora.offline.readouts import hand_out, readout_ranks
from fedlora.offline.server import ByHand
from fedlora.server.judged import Judged
from fedlora.server.robust_rules import Rule

Against = Callable[[str], tuple[LoRA, ModuleReport]]


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
    """Write a method's server update like any merge, and the adapters its clients continue from.

    Returns (the report, the state's round if there is a state). The state appears last, so that a round whose result
    nobody saw can be played again.

    Args:
        label: the method as typed. state: the folder of the server's state; with a state the update includes more than
            these adapters. readout: "same" or a file of ranks: also write an adapter for each client, below `out`.
        rule: a robust rule, which weights the clients' changes; the report's remarks say what it did.

    Raises:
        ConfigError: with a rule, tensors other than pairs would be averaged without it.
    """
    if rule is not None:
        _check_heads(given, wanted.heads)
    facts = [read_facts(file.directory, file.limits) for file in given.files]
    clients = [one.client for one in facts]
    hand = _server_of(given, method, label, state, wanted.heads, missing, rule)
    hand.check_apart(place.out)
    ranks, more = readout_ranks(readout, clients, given.files, hand.clients) if readout is not None else ({}, [])
    after = hand.aggregate(
        given, clients, given.weights, [one.round for one in facts], [one.start for one in facts],
        [_weights_digest(file.directory) for file in given.files],
    )  # fmt: skip
    judged = after.tally.judged if after.tally is not None else None
    more = [*more, *(_weighed(judged) if judged is not None else [])]
    label = f"{label}, weighed by {judged.rule}" if judged is not None else label
    updates = hand.whole()
    kept = state is not None
    of, against, weighed = _measure(given, clients, method, missing, rule, judged, updates, kept, wanted.wide)
    source = Source(
        [module for module in given.modules if module in updates] + [m for m in updates if m not in set(given.modules)],
        lambda module: combine(module, [updates[module]], [1.0], wanted.wide),
        f"The server update of {label}", of, against, weighed,
    )  # fmt: skip
    with ExitStack() as last:

        def also(building: Path | None, parts: Parts) -> tuple[Sequence[ClientReport], Sequence[str]]:
            found = hand_out(hand, ranks, building, parts, updates, label, wanted.max_error)
            if building is not None:
                hand.handed_out([_weights_digest(file.parent) for file in sorted(building.rglob(WEIGHTS_FILE))])
                last.enter_context(hand.saving())
            return found

        report = write_result(given, place, wanted, source, missing, [*said, *more], progress, also)
    return report, after.round if kept else None


def _server_of(
    given: Collection, method: Method[Any], label: str, state: Path | None, heads: str, missing: Missing,
    rule: Rule | None,
) -> ByHand:  # fmt: skip
    """The server of these adapters: with the names of their base model, its weights, and the classes, as they say."""
    handed_on = next(file.base for file in given.files if file.base_model == given.spec().base_model)
    weights = next((found for file in given.files if (found := base_weights(file))), {})
    named = (labels_of(file.directory, file.limits) for file in given.files if heads != "drop")
    return ByHand(
        method, label, state, base=handed_on, missing=missing, rule=rule,
        also_called=[file.base for file in given.files], weights=weights,
        classes=next((found for found in named if found), ()),
    )  # fmt: skip


def _check_heads(given: Collection, heads: str) -> None:
    """Raise `ConfigError` if tensors other than pairs would be averaged without the rule."""
    beside = sorted({name for file in given.files for name in file.heads})
    if beside and heads == "average":
        raise ConfigError(
            f"--defence looks only at pairs, but {len(beside)} tensors beside them (such as {shown(beside[0])}) would "
            f"be averaged with the plain weights, liars included. Add --heads drop, or --heads first to take those of "
            f"the first adapter; rounds of a server (fedlora run, fedlora flower) judge heads with the pairs."
        )


def _weights_digest(folder: Path) -> str:
    return StrangersFile(folder / WEIGHTS_FILE).sha256()


def _measure(
    given: Collection, clients: Sequence[str], method: Method[Any], missing: Missing, rule: Rule | None,
    judged: Judged | None, updates: Mapping[str, LoRA], kept: bool, wide: torch.dtype,
) -> tuple[str, Against | None, Weighed | None]:  # fmt: skip
    """(what the result's error is relative to, in words; the reference, or None if the result is it; what the rule
    did). With a rule, the reference is the rule's exact weighted mean, not the plain one that includes liars. kept:
    there is a server state, so the update includes more than these adapters."""
    weighed = None
    if judged is not None:
        stood = [judged.clients[name] for name in clients]
        weighed = Weighed(judged.rule, tuple(one.after for one in stood), tuple(one.why for one in stood))
    if kept:
        return "the server's update", None, weighed

    def plain(module: str) -> tuple[LoRA, ModuleReport]:
        return given.merged(module, RankRule("exact"), missing, wide)

    if weighed is None or rule is None:
        return "the mean of the adapters", plain, weighed
    robust, exact = updates, build("svd", energy=1.0)
    if method != exact:
        beside = ByHand(
            exact, "exact", None, base=given.files[0].base, missing=missing, rule=replace(rule, factor_averages=False)
        )
        beside.aggregate(given, clients, given.weights, [None for _ in clients])
        robust = beside.whole()
    of = f"the mean that {weighed.rule} weighs"
    weighed = replace(weighed, apart=_apart(robust, plain))
    return (
        of,
        None if robust is updates else lambda module: _whole(combine(module, [robust[module]], [1.0], wide)),
        weighed,
    )


def _whole(found: Combined) -> tuple[LoRA, ModuleReport]:
    return found.cut(found.product.rank)


def _apart(updates: Mapping[str, LoRA], plain: Against) -> float:
    """The relative distance of these updates from the plain mean, over all modules."""
    off, size = [], []
    for module, lora in updates.items():
        mean, report = plain(module)
        off.append(stack([lora.map(torch.Tensor.double), mean.map(torch.Tensor.double)], [1.0, -1.0]).norm())
        size.append(report.norm)
    return math.hypot(*off) / math.hypot(*size) if any(size) else (math.inf if any(off) else 0.0)


def _weighed(judged: Judged) -> list[str]:
    """A line for each client that a robust rule left out or scaled down, or one line if there is none."""
    lines = [
        f"{judged.rule}: the change of {name} counts {one.after:.1%} instead of {one.before:.1%}"
        + (f": {one.why}" if one.why else f" (norm {one.norm:.4g}, {one.distance:.4g} from the robust change)")
        for name, one in judged.clients.items()
        if one.after < one.before * (1 - 1e-9)
    ]
    return lines or [f"{judged.rule}: all changes count as they came"]
