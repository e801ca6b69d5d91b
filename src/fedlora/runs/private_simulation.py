"""Private runs of an experiment: clients that are simulated on public data, so that nobody's budget is spent.

    [run.privacy]      clip, epsilon or noise_multiplier, delta, ...       and neither population nor ledger

A grid asks what epsilon costs, and each of its runs is a federation by itself: a population of its own, whose ledger
lies in the run's folder and holds that run's rounds alone. What is charged there says nothing of the data beyond the
simulation: all runs of a grid were trained on them. So the population has a name that says so, in the ledger's first
line, in the summary, in the stored result and on the card, and `fedlora run` refuses that name.
"""

from __future__ import annotations

from typing import Any

from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig
from fedlora.runs.privacy_section import SIMULATED

LEDGER = "simulated-ledger.jsonl"  # in the run's folder


def simulated(raw: dict[str, Any]) -> dict[str, Any]:
    """The tables of one run of an experiment: with [privacy], its population is the simulation.

    Raises:
        ConfigError: they name a population, a ledger or a budget of several runs.
    """
    privacy = raw.get("privacy")
    if not isinstance(privacy, dict):
        return raw
    if own := [f"privacy.{key}" for key in ("population", "ledger", "budget") if key in privacy]:
        raise ConfigError(
            f"{', '.join(own)}: an experiment's clients are simulated on public data, each run is a population of its "
            f"own, and its ledger lies in its folder. Leave it out; to train on real clients and charge them, use "
            f"fedlora run."
        )
    return {**raw, "privacy": {**privacy, "population": SIMULATED, "ledger": LEDGER}}


def with_ledger(config: RunConfig, path: str) -> RunConfig:
    """That run, charged to that file; one without [privacy] as it is."""
    if config.privacy is None:
        return config
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"ledger": path})})
