"""How much each adapter counts in a merge: one list of weights, and others for the modules that a file names.

    default = [0.5, 0.5]                 # optional: as --weights
    "*.q_proj" = [1.0, 0.0]              # module -> a weight for each adapter, in their order
    "model.layers.0.*" = [0.2, 0.8]

A key is a name as it stands, or a shell pattern (`*`, `?`, `[...]`) of the whole name; the first key that fits decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.given_files import read_toml

_LARGEST, _SMALLEST = 1e12, 1e-12  # of a weight, and of one beside the largest: beyond that somebody slipped
_MOST_KEYS = 10_000


@dataclass(frozen=True)
class Weighting:
    """A weight for each adapter, and for some modules others.

    Args:
        default: of all modules that no key fits. by_module: key -> weights; the first key that fits decides.
        sum: they are used as they are, and may be negative; else each list is divided by its sum.

    Raises:
        ConfigError: a weight that is no number, or lists of different lengths; without `sum` a negative one.

    Example:
        >>> weights = Weighting((1.0, 3.0), {"*.q": (1.0, 0.0)})
        >>> weights.of("layer.v"), weights.of("layer.q")
        ((0.25, 0.75), (1.0, 0.0))
    """

    default: tuple[float, ...]
    by_module: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sum: bool = False

    def __post_init__(self) -> None:
        for key, weights in {"": self.default, **self.by_module}.items():
            where = f" of {key[:80]!r}" if key else ""
            if len(weights) != len(self.default):
                raise ConfigError(f"there are {len(weights)} weights{where}, and {len(self.default)} adapters.")
            _check(weights, where, signed=self.sum)

    def of(self, module: str) -> tuple[float, ...]:
        """The weights of one module, or of one tensor beside the pairs, as they are used."""
        found = next((w for key, w in self.by_module.items() if fits(key, module)), self.default)
        return found if self.sum else _shares(found)

    def check_used(self, modules: Iterable[str]) -> None:
        """Raises `ConfigError` for a key that decides nothing: a typing error would else be silent."""
        used = {next((key for key in self.by_module if fits(key, module)), None) for module in modules}
        for key in self.by_module:
            if key not in used:
                raise ConfigError(
                    f"the weights of {key[:80]!r} would decide nothing: no module has that name, or an earlier key "
                    f"decides for all that do. `fedlora inspect` lists the modules."
                )


def fits(key: str, module: str) -> bool:
    """Whether a key means a module: its name, or a shell pattern of all of it."""
    return key == module or fnmatchcase(module, key)


def read_weight_map(path: Path) -> dict[str, tuple[float, ...]]:
    """A TOML file of key = list of weights. Raises `ConfigError`: unreadable, or another thing in it."""
    found = read_toml(path, "the weight map")
    if not found or len(found) > _MOST_KEYS:
        raise ConfigError(f"the weight map {path} has {len(found)} keys; it has from 1 to {_MOST_KEYS:,}.")
    for key, weights in found.items():
        numbers = isinstance(weights, list) and all(_is_number(w) for w in weights)
        if not numbers or not weights:
            raise ConfigError(
                f"the weight map {path} has lines KEY = [a weight for each adapter]; that of {key[:80]!r} is none "
                f"(a module's name has dots: write it in quotes)."
            )
    return {key: tuple(map(float, weights)) for key, weights in found.items()}


def weighting(
    count: int,
    weights: Sequence[float] | None = None,
    by_module: Mapping[str, Sequence[float]] | None = None,
    *,
    sum: bool = False,
) -> Weighting:
    """For `count` adapters. by_module may have a "default"; where nothing says other, all count 1.

    Raises:
        ConfigError: impossible weights, or two defaults.
    """
    keyed = {key: _numbers(value) for key, value in (by_module or {}).items()}
    default = keyed.pop("default", None)
    if default is not None and weights is not None:
        raise ConfigError("the weight map has a default, and there are weights for all modules too; give one of them.")
    chosen = default if default is not None else _numbers(weights) if weights is not None else (1.0,) * count
    if len(chosen) != count:
        raise ConfigError(f"there are {len(chosen)} weights for {count} adapters.")
    return Weighting(chosen, keyed, sum)


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    wrong = [value for value in values if not _is_number(value)]
    if wrong:
        raise ConfigError(f"weights are numbers; got {str(wrong[0])[:80]!r}.")
    try:
        return tuple(map(float, values))
    except OverflowError as error:  # a whole number beyond every float
        raise ConfigError(f"weights are from {_SMALLEST:g} to {_LARGEST:g} in size, or 0.") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(weights: Sequence[float], where: str, *, signed: bool) -> None:
    if not all(math.isfinite(w) for w in weights):
        raise ConfigError(f"weights{where} are finite numbers; got {list(weights)}.")
    if not signed and any(w < 0 for w in weights):
        raise ConfigError(
            f"weights{where} are not negative in a mean; got {list(weights)}. --sum (sum=True) takes them as they are."
        )
    sizes = [abs(w) for w in weights if w]
    if not sizes and not (signed and where):
        raise ConfigError(f"weights{where} are not all zero; got {list(weights)}.")
    if sizes and (max(sizes) > _LARGEST or min(sizes) < _SMALLEST):
        raise ConfigError(f"weights{where} are from {_SMALLEST:g} to {_LARGEST:g} in size, or 0; got {list(weights)}.")
    if sizes and min(sizes) < _SMALLEST * max(sizes):
        raise ConfigError(
            f"weights{where} are too far apart: {min(sizes):g} beside {max(sizes):g} would count as nothing. "
            f"Leave that adapter out, or say 0."
        )


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    total = math.fsum(weights)
    return tuple(w / total for w in weights)
