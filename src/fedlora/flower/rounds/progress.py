"""A federation's progress, from its events. Pure; `serve`, `status` and the metrics all read it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from fedlora.flower.rounds.events import AttemptFailed, Began, Done, Ended, Event, Fated

_KEPT = 100  # finished rounds whose lines are kept


@dataclass(frozen=True)
class Progress:
    """The rounds until now.

    round: the number of finished ones. lines: round -> its line of rounds.jsonl, for the last hundred. playing: the
    current attempt, with `fates` of those who have answered. ended: why no more rounds are played, otherwise "".
    fate_counts: (client, fate) -> how often, attempts that did not count included (except for "trained" and "not drawn"
    in these). uploaded: client -> bytes. began, heard: when the first and the last event were written.
    """

    round: int = 0
    lines: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    playing: Began | None = None
    fates: Mapping[str, Fated] = field(default_factory=dict)
    ended: str = ""
    fate_counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    uploaded: Mapping[str, int] = field(default_factory=dict)
    began: str = ""
    heard: str = ""


def after(progress: Progress, event: Event) -> Progress:
    """The progress after one more event. A round that is played again after a crash counts once."""
    progress = replace(progress, began=progress.began or event.at, heard=event.at)
    if isinstance(event, Began):
        back = min(progress.round, event.round - 1)
        return replace(progress, playing=event, fates={}, ended="", round=back)
    if isinstance(event, Fated):
        uploaded = dict(progress.uploaded)
        before = progress.fates.get(event.client)  # which this one replaces
        counted = (before.bytes or 0) if before is not None else 0
        uploaded[event.client] = uploaded.get(event.client, 0) + (event.bytes or 0) - counted
        return replace(progress, fates={**progress.fates, event.client: event}, uploaded=uploaded)
    if isinstance(event, AttemptFailed):
        not_asked = progress.playing.not_asked if progress.playing is not None else {}
        found = {name: one["fate"] for name, one in not_asked.items() if one["fate"] != "not drawn"}
        found |= {name: fated.fate for name, fated in progress.fates.items()}
        missed = [(name, str(fate)) for name, fate in found.items() if fate != "trained"]
        return replace(progress, fate_counts=Counter(progress.fate_counts) + Counter(missed))
    if isinstance(event, Done):
        kept = {n: line for n, line in progress.lines.items() if event.round - _KEPT < n < event.round}
        lines = {**kept, event.round: event.line}
        now = fates_of(event.line)
        if progress.playing is not None:  # of others the line has the fate in an earlier attempt, which is counted
            others = progress.playing.not_asked
            now = {name: fate for name, fate in now.items() if name not in others or fate == others[name]["fate"]}
        new = [] if event.round in progress.lines else now.items()
        counts = Counter(progress.fate_counts) + Counter(new)
        return replace(progress, round=event.round, lines=lines, playing=None, fate_counts=counts)
    if isinstance(event, Ended):
        return replace(progress, ended=event.why, playing=None)
    return progress


def progress_of(events: Iterable[Event]) -> Progress:
    """The progress after all of a federation's events.

    Example:
        >>> progress_of([Done(1, {"loss": 0.5}), Done(2, {"loss": 0.4}), Ended(2, "complete")])
        Progress(round=2, ...)
    """
    return reduce(after, events, Progress())


def fates_of(line: Mapping[str, Any]) -> dict[str, str]:
    """client -> fate, from a line of rounds.jsonl."""
    return {client: str(one["fate"]) for client, one in (line.get("fates") or {}).items()}


def spent_of(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """Epsilon of a private round and those before it, and of all planned ones; None for other rounds."""
    privacy = line.get("privacy")  # null: infinity
    if privacy is None:
        return None
    so_far, planned = (math.inf if privacy[name] is None else privacy[name] for name in ("epsilon", "epsilon_planned"))
    return so_far, planned
