"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["released", "privatised", "secret", "dropped"]


@dataclass(frozen=True)
class Item:
    """One thing that a run could let out, at its place.

    fate: released (public or made of public things and privatised ones), privatised (the mechanism's output), secret
    (written for a resume only; stays on the server, never shown), dropped (never written).
    """

    place: str  # "metrics.jsonl", "summary.json", "manifest.json", "card", "folder", "download", "screen", ...
    name: str
    fate: Fate
    reason: str


def fate_of(place: str, name: str) -> Fate | None:
    """None: it is not on the list, and must not be written."""
    raise NotImplementedError


def filtered(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that may leave. What is dropped, secret or not on the list is left out; nested tables by the names
    "outer.inner", where "outer.*" is on the list."""
    raise NotImplementedError


def unlisted(place: str, values: Mapping[str, Any]) -> list[str]:
    """Names that are not on the list: for the test that catches a new field."""
    raise NotImplementedError
