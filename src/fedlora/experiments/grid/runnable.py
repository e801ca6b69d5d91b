"""What a configuration alone shows to be impossible, before hours are told or spent on it."""

from __future__ import annotations

from collections.abc import Iterable

from fedlora.errors import ConfigError, FedLoRAError
from fedlora.experiments.grid.plan import PlannedRun
from fedlora.experiments.grid.run_times import clients_of


def check_runnable(runs: Iterable[PlannedRun]) -> None:
    """Raises `ConfigError`, with the run, for a method or a rule that there is not, or that refuses its settings, and
    for ranks that are not those of as many clients. What only data or model show is found when a run begins."""
    known: set[str] = set()
    for run in runs:
        config = run.config
        told = config.model_dump_json(include={"method", "server", "defence", "clients", "data"})
        if told in known:
            continue
        known.add(told)
        try:
            config.server.build(config.method.build(), config.run.seed, config.defence.build())
            count = clients_of(config.model_dump())
            if count:
                config.clients.assigned([str(k) for k in range(count)], config.run.seed)
        except FedLoRAError as error:
            raise ConfigError(f"{run.label} cannot be run: {error}") from error
