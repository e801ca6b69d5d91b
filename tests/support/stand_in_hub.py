"""A stand-in for the library `datasets`, whose rows answer as its own do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.benchmark_files import Rows


class HubRows:
    """What `datasets.load_dataset(..., split=...)` gives: columns by name, and features with or without class names."""

    def __init__(self, rows: Rows, names: Mapping[str, Sequence[str]] | None = None) -> None:
        self._rows = rows
        self.column_names = list(rows[0])
        named = names or {}
        self.features = {
            column: SimpleNamespace(names=list(named[column])) if column in named else SimpleNamespace()
            for column in self.column_names
        }

    def __len__(self) -> int:
        return len(self._rows)

    def with_format(self, kind: None) -> HubRows:
        return self

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self._rows]


Asked = list[tuple[Any, ...]]


Hub = Callable[..., Asked]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Puts a stand-in `datasets` in place that answers with the given rows (by split), or raises; returns the asks. The
    fixture `hub`."""

    def put(answers: Mapping[str, HubRows] | Exception) -> Asked:
        asked: Asked = []

        def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> HubRows:
            asked.append((name, config, split, revision))
            if isinstance(answers, Exception):
                raise answers
            return answers[split]

        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return put
