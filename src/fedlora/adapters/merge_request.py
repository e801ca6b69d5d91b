"""A merge's request: the desired result, the source of its modules, and its destination."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from fedlora.adapters.beside import HeadRule
from fedlora.adapters.merge_report import Weighed
from fedlora.adapters.narrowing import parse_type
from fedlora.adapters.truncation import Combined, ModuleReport, RankRule, against_mean
from fedlora.adapters.writer import ADAPTER_FOLDER
from fedlora.core.folders import check_target, replacing_folder
from fedlora.core.lora import LoRA
from fedlora.errors import ConfigError

Progress = Callable[[Sequence[str], str], Iterable[str]]  # (steps, activity) -> the steps


@dataclass(frozen=True)
class Result:
    """The desired result, however it is made. Fields as in `merge`. least: the rank to which every module is padded
    with zero slots, at least."""

    rank: str | int = "exact"
    heads: str = "average"
    dtype: str | None = None
    max_error: float | None = None
    dry_run: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        RankRule.parse(self.rank)
        one_of("--heads", self.heads, get_args(HeadRule))
        if self.dtype is not None:
            parse_type(self.dtype)
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            raise ConfigError(f"--max-error must be a number from 0; got {self.max_error}.")

    @property
    def wide(self) -> torch.dtype:
        """The narrowest dtype to compute in."""
        return parse_type(self.dtype) if self.dtype else torch.float32


@dataclass(frozen=True)
class Source:
    """Where a result's modules come from. made: what the result is, in words, for the card; of: what errors are
    relative to. combined: module -> its update. mean: the exact mean to compare with, if the result is not that.
    weighed: the robust rule's part."""

    modules: Sequence[str]
    combined: Callable[[str], Combined]
    made: str
    of: str
    mean: Callable[[str], tuple[LoRA, ModuleReport]] | None = None
    weighed: Weighed | None = None

    def cut(self, module: str, rule: RankRule) -> tuple[LoRA, ModuleReport]:
        """The pair and its report."""
        found = self.combined(module)
        cut = found.cut(rule.keep(found.spectrum))
        return cut if self.mean is None else against_mean(*cut, self.mean(module))


@dataclass(frozen=True)
class Place:
    """A result's destination. force: replace what is there, if it is only an adapter. inputs: never replaced."""

    out: Path
    force: bool
    inputs: Sequence[str | os.PathLike[str]]

    def check(self) -> None:
        """Raise `ConfigError` if the result cannot or may not be written; call it before long work."""
        check_target(self.out, force=self.force, kind=ADAPTER_FOLDER, inputs=self.inputs)

    def building(self) -> AbstractContextManager[Path]:
        """A folder that becomes the result if the block succeeds."""
        return replacing_folder(self.out, force=self.force, kind=ADAPTER_FOLDER, inputs=self.inputs)


def one_of(option: str, value: object, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}; got {str(value)[:80]!r}.")
