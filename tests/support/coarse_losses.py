"""Epsilon on a grid ten times coarser than users have: tenths of a second instead of seconds, and still from above.

Imported once in each process of tests. Where the last digits are the test, it asks for `fine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedlora.privacy import accounting

_USERS = {"_FINEST": accounting._FINEST, "_CELLS": accounting._CELLS}
accounting._FINEST, accounting._CELLS = 10 * accounting._FINEST, accounting._CELLS // 10


@contextmanager
def fine() -> Iterator[None]:
    """As users have it."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in _USERS.items():
            patched.setattr(accounting, name, value)
        accounting._composed.cache_clear()
        yield
    accounting._composed.cache_clear()
