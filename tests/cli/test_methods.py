"""`fedlora methods`: a table and JSON. Kind of evidence: contract."""

from __future__ import annotations

import json

from fedlora import METHODS, build
from support.command_line import invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]


def test_methods_lists_every_method_with_its_paper_and_hyper_parameters(wide: None) -> None:
    said = " ".join(invoke("methods").stdout.split())
    for name, cls in METHODS.items():
        assert f"│ {name} │ {cls.paper} │" in said
    assert "rho=1.0" in said and "gamma=0.5" in said and "energy=0.9" in said


def test_methods_as_json_can_be_built_from() -> None:
    """Every method of `METHODS`, with its paper; `build` takes its hyper-parameters as defaults."""
    listed = json.loads(invoke("methods", "--json").stdout)
    assert set(listed) == set(METHODS)
    for name, facts in listed.items():
        assert set(facts) == {"paper", "hyper-parameters"} and facts["paper"] == METHODS[name].paper
        assert build(name, **facts["hyper-parameters"]) == build(name)
    assert listed["svd"]["hyper-parameters"]["energy"] == 0.9
