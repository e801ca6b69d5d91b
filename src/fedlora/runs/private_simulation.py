"""Private runs in experiments: clients are simulated on public data, so that nobody's budget is spent.

    [run.privacy]      clip, epsilon or noise_multiplier, delta, ...       but neither population nor ledger

A grid measures what epsilon costs, and each of its runs is a federation of its own: its own population, whose ledger
lies in the run's folder and holds only that run's rounds. Outside the simulation these charges say nothing about the
data, since all runs of a grid trained on them. The population's name says so, in the ledger's first line, the summary,
the stored result and the card, and `fedlora run` refuses that name.
"""

from __future__ import annotations

from typing import Any

from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig
from fedlora.runs.privacy_section import SIMULATED

LEDGER = "simulated-ledger.jsonl"  # in the run's folder


def simulated(raw: dict[str, Any]) -> dict[str, Any]:
    """The tables of an experiment's run: if it has [privacy], its population is the simulation.

    Raises:
        ConfigError: the tables name a population, a ledger or a budget.
    """
    privacy = raw.get("privacy")
    if not isinstance(privacy, dict):
        return raw
    if own := [f"privacy.{key}" for key in ("population", "ledger", "budget") if key in privacy]:
        raise ConfigError(
            f"{', '.join(own)}: an experiment's clients are simulated on public data, each run is its own population, "
            f"and its ledger lies in its folder. Leave it out; to train on real clients and charge them, use "
            f"fedlora run."
        )
    return {**raw, "privacy": {**privacy, "population": SIMULATED, "ledger": LEDGER}}


def with_ledger(config: RunConfig, path: str) -> RunConfig:
    """The run, charged to that file; a run without [privacy] stays as it is."""
    if config.privacy is None:
        return config
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"ledger": path})})
