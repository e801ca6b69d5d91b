"""Do two adapters name the same base model? By name and revision; the user must declare any other.

org/Name/              org/Name    a trailing slash
ORG/name               org/Name    hub names are unique regardless of case
org/Name-bnb-4bit      org/Name    the same weights, quantised
no revision            main        the default
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fedlora.core.text import shown
from fedlora.errors import AdapterFormatError

_QUANTISED = "-bnb-4bit"


@dataclass(frozen=True)
class Base:
    """A base model as an adapter's config names it."""

    name: str | None
    revision: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Base:
        """From a checked adapter_config.json."""
        return cls(config.get("base_model_name_or_path"), config.get("revision"))

    def __str__(self) -> str:
        at = f" at revision {shown(self.revision)}" if self.revision else ""
        return f"{shown(self.name) if self.name else 'not named'}{at}"


def check_same_base(bases: Iterable[Base], *, declared: bool = False) -> list[str]:
    """Notes on names that were treated as one model. declared: the user said (`--same-base`) that all mean one model.

    Raises:
        AdapterFormatError: two of them name different models, as far as we can tell, or two revisions of one.
    """
    notes = []
    for a, b in combinations(dict.fromkeys(bases), 2):
        if _revision(a) and _revision(b) and _revision(a) != _revision(b):
            raise AdapterFormatError(
                f"the adapters belong to different base models, so they do not add up: {a} and {b}: two revisions."
            )
        if not (declared or is_same_base(a, b)):
            raise AdapterFormatError(
                f"the adapters belong to different base models, so they do not add up: {a} and {b}. "
                f"If both are the same model with the same weights, name it alike in both configs, or merge "
                f"with --same-base (same_base=True)."
            )
        if a.name != b.name:
            notes.append(f"{a} and {b} are treated as one base model{' (--same-base)' if declared else ''}")
    return notes


def is_same_base(a: Base, b: Base) -> bool:
    """Whether two names mean the same weights."""
    return _revision(a) == _revision(b) and (
        a.name == b.name or bool(a.name and b.name and _plain(a.name) == _plain(b.name))
    )


def public_name(bases: Iterable[Base]) -> str | None:
    """The name to publish: the first that is not a local path, otherwise the first."""
    names = [base.name for base in bases if base.name]
    return next((name for name in names if not is_path(name)), names[0] if names else None)


def is_path(name: str) -> bool:
    """Whether a base model's name looks like a path on some machine."""
    return bool(re.match(r"[/~.\\]|[A-Za-z]:[\\/]", name)) or "\\" in name or name.strip("/").count("/") > 1


def _revision(base: Base) -> str | None:
    return None if base.revision in (None, "", "main") else base.revision


def _plain(name: str) -> str:
    name = name.rstrip("/")
    return name if is_path(name) else name.casefold().removesuffix(_QUANTISED)
