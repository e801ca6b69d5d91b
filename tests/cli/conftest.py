"""What tests of the command line share."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures cost more than audits: most tests go without."""
    from support.command_line import undraw

    undraw(monkeypatch)
