"""`fedlora methods`: its list. Kind of evidence: contract."""

from __future__ import annotations

import json

from fedlora import METHODS, build
from support.command_line import invoke


def test_methods_are_listed_with_papers_and_can_be_built_from_the_json(wide: None) -> None:
    """Every method of `METHODS`, with its paper; `build` takes its hyper-parameters as defaults."""
    said = " ".join(invoke("methods").stdout.split())
    listed = json.loads(invoke("methods", "--json").stdout)
    assert set(listed) == set(METHODS)
    for name, facts in listed.items():
        assert set(facts) == {"paper", "hyper-parameters"} and facts["paper"] == METHODS[name].paper
        assert build(name, **facts["hyper-parameters"]) == build(name)
        assert f"│ {name} │ {METHODS[name].paper} │" in said
    assert "energy=0.9" in said and listed["svd"]["hyper-parameters"]["energy"] == 0.9
