"""A federation's events in words, for `serve`, `up` and a ServerApp's log.

One line per round that names every site, and one line for each site that did not train.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.core.text import shown
from fedlora.flower.rounds.events import AttemptFailed, Awaited, Began, Done, Ended, Event, Fated, PolicyChanged
from fedlora.flower.rounds.progress import fates_of, spent_of
from fedlora.privacy.accounting import epsilon_up
from fedlora.server.judged import in_words

_UNEXPLAINED = ("trained", "abstained", "not drawn", None)  # sites whose missing measurement needs its own words
_QUIET = ("trained", "offline", "not drawn")  # reported with the round, without their own lines


def lines_of(event: Event, rounds: int | None = None) -> list[str]:
    """The lines to print for an event; none for most. rounds: the requested number."""
    if isinstance(event, Done):
        said = round_line(event.line, event.round, rounds)
        return [said, *_beside(event), *measurement_lines(event.line, f"round {event.round}")]
    if isinstance(event, Fated) and event.fate not in _QUIET:
        return [f"round {event.round}: {event.client}: {event.fate}: {event.why}"]
    if isinstance(event, Began) and not event.asked:
        others = ", ".join(f"{name} ({one.get('fate', '')})" for name, one in event.not_asked.items())
        return [f"round {event.round}: nobody can be asked: {others or 'the policy has no clients'}"]
    if isinstance(event, Awaited):
        who, left = ", ".join(shown(name) for name in event.clients), time_of(max(event.left, 0.0))
        return [
            f"round {event.round}: no answer for {event.seconds:.0f} s: {who} ({event.doing}); waited for {left} more"
        ]
    if isinstance(event, AttemptFailed):
        return [f"round {event.round}, attempt {event.attempt}, did not count: {event.why}"]
    if isinstance(event, PolicyChanged):
        return [f"from round {event.round} on: {change}" for change in _changes(event)]
    if isinstance(event, Ended) and event.why == "complete" and rounds is not None and event.round < rounds:
        return [f"round {event.round} was the last one of this start; run.rounds is {rounds} by now"]
    if isinstance(event, Ended) and event.why == "quorum":
        return [f"round {event.round + 1} has too few usable uploads: it is stopped for now"]
    if isinstance(event, Ended):
        return [f"the rounds ended after round {event.round}: {event.why}"]
    return []


def round_line(line: Mapping[str, Any], round: int, rounds: int | None) -> str:
    """A finished round on one line: everyone by name, with its loss if it trained and its fate otherwise."""
    loss, seconds = line.get("loss"), line.get("seconds")
    head = f"round {round}" + (f" of {rounds}" if rounds else "")
    if (spent := spent_of(line)) is not None:
        head += f"  epsilon {epsilon_up(spent[0])} of {epsilon_up(spent[1])}"
    head += f"  loss {_number(loss, 3)}" if loss is not None else "  no loss"
    head += f"  {seconds:.0f} s" if isinstance(seconds, int | float) else ""
    head += _score(line)
    fates, losses = fates_of(line), line.get("losses") or {}
    return head + "".join(
        f"  {shown(name)} {_number(losses[name], 2)}" if fate == "trained" and _is_number(losses.get(name))
        else f"  {shown(name)} {fate}"
        for name, fate in sorted(fates.items())
    )  # fmt: skip


def _score(line: Mapping[str, Any]) -> str:
    """A round's first score: the server's, or otherwise the sites' mean. `loss` before it is the training loss."""
    for key, where in (("metrics", ""), ("site_mean", " at sites")):
        scores = {k: v for k, v in (line.get(key) or {}).items() if k not in ("loss", "examples") and _is_number(v)}
        if scores:
            name, value = next(iter(scores.items()))
            return f"  {shown(name)} {_number(value, 3)}{where}"
    return ""


def nodes_line(online: Sequence[str], expected: Sequence[str], needs: str, heard: float | None = None) -> str:
    """Who is online and who is missing. needs: a round's requirement, in words. heard: seconds since the oldest
    heartbeat: a node that died since then still counts as online."""
    missing = [name for name in expected if name not in online]
    there = f"online: {', '.join(online) if online else 'nobody'}"
    if online and heard is not None:
        there += f", each heard within the last {max(heard, 1):.0f} s"
    if not missing:
        return f"{there} (all {len(expected)})"
    return f"{there}; missing: {', '.join(missing)} ({needs})"


def time_of(seconds: float) -> str:
    """A time span in a readable unit.

    Example:
        >>> time_of(4), time_of(200), time_of(8000), time_of(400_000)
        ('4 s', '3 min', '2 h', '5 days')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def measurement_lines(line: Mapping[str, Any], when: str) -> list[str]:
    """A note on each site that was not measured, unless its fate in the round explains that."""
    fates = fates_of(line)
    silent = {k: why for k, why in (line.get("site_unmeasured") or {}).items() if fates.get(k) in _UNEXPLAINED}
    return [f"{when}: {shown(name)}: not measured: {why}" for name, why in silent.items()]


def _beside(event: Done) -> list[str]:
    """A robust rule's effect."""
    said = in_words(event.line["defence"]) if event.line.get("defence") else ""
    return [f"round {event.round}: {said}"] if said else []


def log_to_stdout() -> None:
    """Print fedlora's log if nobody else does, because Flower gives a ServerApp a handler only for its own logger."""
    package = logging.getLogger("fedlora")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    if package.getEffectiveLevel() > logging.INFO:
        package.setLevel(logging.INFO)


def _changes(event: PolicyChanged) -> list[str]:
    found = [f"{name} may take part, at rank {shown(rank)}" for name, rank in event.added.items()]
    found += [f"{name} may take part no longer" for name in event.removed]
    found += [f"{name} has rank {shown(new)} in place of {shown(old)}" for name, (old, new) in event.changed.items()]
    stays = "policy.toml is not taken: until this run ends, the one before stays; the next run needs a sound one"
    return found + ([f"{stays}: {event.why}"] if event.why else [])


def _number(value: float, digits: int) -> str:
    """The number in a few columns, whatever its size.

    Example:
        >>> _number(0.66412, 3), _number(431.5, 3), _number(-1e300, 3)
        ('0.664', '431.500', '-1e+300')
    """
    return f"{value:.{digits}f}" if abs(value) < 10_000 else f"{value:.3g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
