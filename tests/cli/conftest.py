"""What tests of the command line share."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures cost more than audits: most tests go without."""
    import fedlora.cli.audit

    monkeypatch.setattr(fedlora.cli.audit, "plotted", lambda draw: None)
