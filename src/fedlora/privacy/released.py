"""What may leave the server of a private run. What is not on the list is not written: a new field is a decision.

    filtered("metrics.jsonl", line)      the fields that may leave, and no others
    unlisted("metrics.jsonl", line)      the fields that nobody has decided on: a test holds this empty

The list itself is `release_list`: each thing with its place, its fate and the reason. Fates:

    privatised   the mechanism's own output, paid for in the ledger
    released     public, or made of public and privatised things alone (post-processing)
    if-public    a measurement on held-out examples: released where these belong to no client of the population (say so
                 by public=True), else dropped
    secret       written for this server's own resume; never leaves it
    dropped      not written: it would say something about a client that no noise hides

Differential privacy says nothing about timing; what this list can drop of it, it drops. Where clients are drawn
secretly, times tell the draw, and no file of the list has one: neither in it nor as its time of change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlora.errors import HyperparameterError
from fedlora.privacy.release_list import RELEASES, Fate, Item

__all__ = ["Fate", "Item", "fate_of", "filtered", "items", "places", "unlisted"]

TIMELESS = 315_576_000.0  # noon of 1 January 1980, UTC: what a file says where its time of change would tell
_Path = tuple[str, ...]
_LIST: dict[str, dict[_Path, Item]] = {}
for _item in RELEASES:
    _LIST.setdefault(_item.place, {})[tuple(_item.name.split("."))] = _item


def places() -> list[str]:
    """Every place that the list knows."""
    return list(_LIST)


def items(place: str) -> list[Item]:
    """What the list says of a place. Raises `HyperparameterError` for one that it does not know."""
    return list(_of(place).values())


def fate_of(place: str, name: str) -> Fate | None:
    """Of one name, with dots between the tables that it is in; None: it is not on the list, and is not written.

    Raises:
        HyperparameterError: an unknown place.

    Example:
        >>> fate_of("metrics.jsonl", "losses"), fate_of("summary.json", "diagnostics.q")
        ('dropped', None)
        >>> fate_of("diagnostics", "captured"), fate_of("metrics.jsonl", "something new")
        ('dropped', None)
    """
    found = _match(_of(place), tuple(name.split(".")))
    return found.fate if found else None


def filtered(place: str, values: Mapping[str, Any], *, public: bool = False, blank: bool = False) -> dict[str, Any]:
    """The values that may leave: without what is dropped, secret or not on the list. Tables within are filtered too.

    Args:
        public: whether held-out examples that were measured on belong to no client of the population.
        blank: leave an empty value of its kind ({}, [], None) for what the list drops, for readers that ask for it.
            What is not on the list is left out all the same.

    Raises:
        HyperparameterError: an unknown place.

    Example:
        >>> line = {"round": 3, "losses": {"site-1": 0.5}, "metrics": {"accuracy": 0.9}, "something new": 1}
        >>> filtered("metrics.jsonl", line)
        {'round': 3}
        >>> filtered("metrics.jsonl", line, public=True, blank=True)
        {'round': 3, 'losses': {}, 'metrics': {'accuracy': 0.9}}
    """
    return _filtered(_of(place), (), values, public, blank)


def unlisted(place: str, values: Mapping[str, Any]) -> list[str]:
    """Names in `values` that the list does not know, with dots between tables.

    Example:
        >>> unlisted("metrics.jsonl", {"round": 3, "something new": 1})
        ['something new']
    """
    return [".".join(path) for path in _unlisted(_of(place), (), values)]


def _of(place: str) -> dict[_Path, Item]:
    if place not in _LIST:
        raise HyperparameterError(f"the list of releases has no place {place!r}; it has {', '.join(_LIST)}.")
    return _LIST[place]


def _filtered(
    listed: Mapping[_Path, Item], at: _Path, values: Mapping[str, Any], public: bool, blank: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = (*at, key)
        item = _match(listed, path)
        if item is None and _inside(listed, path):
            if isinstance(value, Mapping):
                found[key] = _filtered(listed, path, value, public, blank)
            elif value is None:
                found[key] = None
        elif item is not None and (item.fate in ("released", "privatised") or (item.fate == "if-public" and public)):
            found[key] = value
        elif item is not None and blank:
            found[key] = {} if isinstance(value, Mapping) else [] if isinstance(value, list | tuple) else None
    return found


def _unlisted(listed: Mapping[_Path, Item], at: _Path, values: Mapping[str, Any]) -> Iterator[_Path]:
    for key, value in values.items():
        path = (*at, key)
        if _match(listed, path) is not None:
            continue
        if _inside(listed, path) and (isinstance(value, Mapping) or value is None):
            yield from _unlisted(listed, path, value or {})
        else:
            yield path


def _match(listed: Mapping[_Path, Item], path: _Path) -> Item | None:
    """The item of a path; a star stands for any one name, and a name goes before a star. A name with a slash, as
    trackers have them, goes with what stands before the slash."""
    if path in listed:
        return listed[path]
    for names, item in listed.items():
        if len(names) == len(path) and _fits(names, path):
            return item
    head = path[-1].partition("/")[0]
    return listed.get((*path[:-1], head)) if head != path[-1] else None


def _inside(listed: Mapping[_Path, Item], path: _Path) -> bool:
    """Whether the list says something of what is in the table at this path."""
    return any(len(names) > len(path) and _fits(names[: len(path)], path) for names in listed)


def _fits(names: _Path, path: _Path) -> bool:
    return all(name in ("*", part) for name, part in zip(names, path, strict=True))
