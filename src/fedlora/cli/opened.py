"""Adapters that a command opened: sound, of one base model, small enough to compare. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fedlora.adapters import allocation
from fedlora.adapters.agreement import same_weights
from fedlora.adapters.collection import Collection
from fedlora.adapters.merging import open_adapters
from fedlora.adapters.reader import AdapterFile
from fedlora.analysis.inspection import overlap
from fedlora.applying.base_folder import BaseFiles
from fedlora.cli.options import limits_of
from fedlora.cli.screen import notes
from fedlora.core.echo import quoted
from fedlora.data.demo import HUB_NAMES, model_location
from fedlora.errors import AdapterFormatError, ConfigError


def opened(
    directories: Sequence[Path],
    allow_unknown: Sequence[str] | None = None,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    *,
    limit: list[str] | None = None,
    least: int = 1,
) -> list[AdapterFile]:
    """The adapters, checked but not read; what was warned of is told when all of them are sound."""
    files, said = open_adapters(directories, allow_unknown or (), limits_of(limit, max_bytes, max_tensors))
    tell(said)
    if len(files) < least:
        raise AdapterFormatError(f"at least {least} adapters are needed; got {len(files)}.")
    return files


def base_files(base: str) -> BaseFiles:
    """The base model that `--base` names: a directory, or a packaged model, as `fedlora train` takes them.

    Raises:
        ConfigError: what is no directory of safetensors weights. DataError: a package that is absent.
    """
    place = Path(model_location(base))
    if place.is_file():
        original = f" Fetch the original, {HUB_NAMES[base]}, from the hub." if base in HUB_NAMES else ""
        raise ConfigError(
            f"the base model {quoted(base)} is one file, {place.name}, and an update goes into a directory of "
            f"safetensors weights.{original}"
        )
    if not place.exists():
        raise ConfigError(
            f"there is no directory {quoted(base)}: --base names the base model's directory, or demo. "
            f"`hf download NAME --local-dir DIRECTORY` fetches one from the hub."
        )
    return BaseFiles(place)


def tell(remarks: Sequence[str]) -> None:
    for remark in remarks:
        notes.warn(f"note: {remark}")


def of_one_base(files: Sequence[AdapterFile]) -> list[AdapterFile]:
    files = list(Collection.of(files, same_weights=same_weights(files)).files)
    first: dict[str, tuple[tuple[int, ...], AdapterFile]] = {}
    for file in files:
        for path in file.layouts:
            B, A = file.pair(path)[:2]
            shape, other = first.setdefault(path, ((*B.shape[:1], *A.shape[1:]), file))
            if shape != (*B.shape[:1], *A.shape[1:]):
                raise AdapterFormatError(
                    f"module {quoted(path)} is an update of other shapes in {other.directory} and in {file.directory}: "
                    f"other models."
                )
    return files


def check_memory(files: Sequence[AdapterFile]) -> None:
    """Raises `AdapterFormatError` where two adapters' largest modules would not fit into memory together."""
    largest = [max((file.pair(path) for path in file.layouts), key=allocation.bytes_to_read) for file in files]
    largest = sorted(largest, key=allocation.bytes_to_read)[-2:]
    allocation.check(allocation.bytes_to_merge(largest), "comparing the largest modules", files[0].limits)


def mean_overlap(one: AdapterFile, other: AdapterFile) -> float:
    common = sorted(set(one.modules) & set(other.modules))
    return math.fsum(overlap(one.lora(m), other.lora(m)) for m in common) / len(common) if common else 0.0


def overlaps(files: Sequence[AdapterFile]) -> dict[str, list[list[float]]]:
    """Module -> adapter by adapter, how much their column spaces share; of the modules that all have."""
    common = [m for m in files[0].modules if all(m in file.ranks for file in files)]
    return {m: [[overlap(a.lora(m), b.lora(m)) for b in files] for a in files] for m in common}
