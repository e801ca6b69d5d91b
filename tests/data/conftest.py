"""Libraries that are not there."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a library as one that is not installed: None in sys.modules is how Python spells it."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)
