"""Every public name of `fedlora.privacy` has a docstring, its examples run, and importing it needs torch alone. Kinds
of evidence: structural, end to end.
"""

from __future__ import annotations

import doctest
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlora.privacy as privacy
from fedlora.core.lora import LoRA
from fedlora.privacy.geometry import bases_of
from fedlora.privacy.releases import filtered
from fedlora.privacy.sampling import poisson_sample

LIBRARIES = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("opendp", "dp_accounting")), reason="fedlora[privacy]"
)
WITHOUT_EXAMPLE = {"Budget", "Event", "Recomputed", "Spending", "epsilon_of"}


@LIBRARIES
@pytest.mark.exhaustive
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of names, in one folder: `recompute` reads the ledger that `Ledger` made."""
    monkeypatch.chdir(tmp_path)
    ran = set()
    public = {name: getattr(privacy, name) for name in privacy.__all__}
    public |= {"bases_of": bases_of, "filtered": filtered, "poisson_sample": poisson_sample}
    values: dict[str, Any] = {**public, "torch": torch, "Path": Path, "LoRA": LoRA}
    for name in sorted(public):
        for test in doctest.DocTestFinder(recurse=False).find(public[name], name, globs=dict(values)):
            said: list[str] = []
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
            assert result.failed == 0, "".join(said)
            ran |= {name} if result.attempted else set()
    assert ran == set(public) - WITHOUT_EXAMPLE
