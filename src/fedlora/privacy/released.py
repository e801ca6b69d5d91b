"""Decides what may leave a private run's server. Anything not on the list is not written: a new field is a decision.

    filtered("metrics.jsonl", line)      only the fields that may leave
    unlisted("metrics.jsonl", line)      fields that nobody has decided on: a test keeps this empty

`release_list` is the list itself: each thing with its place, fate and reason. Fates:

    privatised   the mechanism's own output, paid for in the ledger
    released     public, or made only from public and privatised things (post-processing)
    if-public    a measurement on held-out examples: released if these belong to no client of the population (say so
                 by public=True), otherwise dropped
    secret       written for this server's own resume; never leaves it
    dropped      not written: it would reveal something about a client that no noise hides

Differential privacy does not cover timing; the list drops what it can of it. If clients are drawn secretly, times
reveal the draw, and no file on the list has one: neither in its content nor as its modification time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlora.errors import HyperparameterError
from fedlora.privacy.release_list import RELEASES, Fate, Item

__all__ = ["Fate", "Item", "fate_of", "filtered", "items", "places", "unlisted"]

TIMELESS = 315_576_000.0  # noon of 1 January 1980, UTC: the modification time where the real one would reveal a draw
_Path = tuple[str, ...]
_LIST: dict[str, dict[_Path, Item]] = {}
for _item in RELEASES:
    _LIST.setdefault(_item.place, {})[tuple(_item.name.split("."))] = _item


def places() -> list[str]:
    """Every place on the list."""
    return list(_LIST)


def items(place: str) -> list[Item]:
    """The list's entries for a place. Raises `HyperparameterError` for an unknown place."""
    return list(_of(place).values())


def fate_of(place: str, name: str) -> Fate | None:
    """The fate of one name, with dots between nested tables; None: it is not on the list, and is not written.

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
    """The values that may leave: without dropped, secret and unlisted ones. Nested tables are filtered too.

    Args:
        public: whether the held-out examples belong to no client of the population.
        blank: keep an empty value of the same kind ({}, [], None) for dropped ones, for readers that expect it.
            Unlisted values are left out all the same.

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
    """Names in `values` that are not on the list, with dots between tables.

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
    """A path's item; a star matches any one name, and an exact name outranks a star. A name with a slash, as trackers
    use, takes the item of the part before the slash."""
    if path in listed:
        return listed[path]
    for names, item in listed.items():
        if len(names) == len(path) and _fits(names, path):
            return item
    head = path[-1].partition("/")[0]
    return listed.get((*path[:-1], head)) if head != path[-1] else None


def _inside(listed: Mapping[_Path, Item], path: _Path) -> bool:
    """Whether the list has entries inside the table at this path."""
    return any(len(names) > len(path) and _fits(names[: len(path)], path) for names in listed)


def _fits(names: _Path, path: _Path) -> bool:
    return all(name in ("*", part) for name, part in zip(names, path, strict=True))
