"""A search as typed: `--tune KEY=VALUES`, with its own seeds."""

from __future__ import annotations

from collections.abc import Sequence

from fedlora.cli.grid_parts import parse_seeds
from fedlora.cli.options import numbers
from fedlora.errors import ConfigError
from fedlora.experiments.comparison import AXIS, SEARCH_SEED
from fedlora.experiments.spec import Tune
from fedlora.experiments.spec_checks import NOT_TO_SEARCH


def parse_search(tune: str | None, seeds: str | None) -> Tune | None:
    """The search, or None. Raises `ConfigError`, also for seeds of a search that does not exist."""
    if tune is None and seeds is not None:
        raise ConfigError(f"--tune-seeds {seeds} sets the seeds of a search; add --tune KEY=VALUES.")
    if tune is None:
        return None
    found = parse_tune(tune, parse_seeds(seeds or str(SEARCH_SEED), "--tune-seeds"))
    if seeds is not None and len(found.values) == 1:
        raise ConfigError(
            f"--tune-seeds {seeds} sets the seeds of a search, and --tune {tune} has only one value to try."
        )
    return found


def parse_tune(text: str, seeds: Sequence[int]) -> Tune:
    """A search from "KEY=VALUE,VALUE,...". Raises `ConfigError`."""
    key, _, values = text.partition("=")
    found = numbers(values, f"--tune {key.strip() or 'KEY'}=NUMBERS (as train.lr=1e-3,3e-3,1e-2)")
    if key.strip() in NOT_TO_SEARCH:
        raise ConfigError(f"--tune: {key.strip()} is not a setting that can be searched.")
    if len({*found}) < len(found):
        raise ConfigError(f"--tune {text} names a value twice.")
    return Tune(key=key.strip(), values=found, over=[AXIS], seeds=list(seeds))
