"""Runs whose training is written down. Kind of evidence: none; what tests compare uploads and ranks with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from fedlora import Adapter
from fedlora.core.trainer import Trained
from fedlora.training.loop import LocalTrainer


@dataclass(frozen=True, eq=False)
class Call:
    """One client's round, which counts from 1: the complete adapter as it came, and what training made of it."""

    client: str
    round: int
    received: Adapter
    trained: Trained


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Every call of the real `LocalTrainer.train` inside, in order."""
    train, calls = LocalTrainer.train, []  # type: ignore[var-annotated]

    def recorded(self: LocalTrainer, download: Any, adapter: Adapter, position: int) -> Trained:
        trained = train(self, download, adapter, position)
        calls.append(Call(download.client.id, download.round + 1, adapter, trained))
        return trained

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalTrainer, "train", recorded)
        yield calls
