"""Limits on what a file may claim: each with its default, its reason, and the option that raises it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.given_files import half_the_memory

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LARGEST = 2**50


@dataclass(frozen=True)
class Limits:
    """Limits on what an adapter's files may claim, and on the resources for working with them.

    header: bytes in the weights' header; 100,000 tensors with names of 200 letters take 30 MB.
    json: bytes in adapter_config.json, upload.json or an index; real ones have 1 kB, a pattern for each expert 2 MB.
    depth: nesting of lists and objects; a config has 4, a header 3.
    values: in all lists and objects together, including keys, each of which takes memory when parsed; a tensor has 12.
    tensors: the largest mixtures of experts, stored expert by expert, have 90,000.
    dimensions: of one tensor; a convolution over volumes has 5.
    modules: matrices, counting each expert of a tensor.
    experts: in one tensor; the largest models have 512.
    name: letters in a tensor's name; real ones have up to 120.
    questions: names listed in a config, times tensors that they are matched with.
    total: bytes in the weights file; checks read all of them, so time grows with this.
    pattern_seconds: processor time for matching a config's patterns; real ones take milliseconds.
    work: floating-point operations for all modules together; it grows with the cube of the ranks, and two cores do some
        ten billion a second. Twenty adapters of rank 64 for a model of 7 billion weights take 3e13.
    memory: bytes that one operation may allocate: half of the machine, since the kernel kills a process that takes all.

    Example:
        >>> Limits.parse(["tensors=200000", "total=80GiB"]).tensors
        200000
    """

    header: int = 32 * 2**20
    json: int = 8 * 2**20
    depth: int = 32
    values: int = 1_500_000
    tensors: int = 100_000
    dimensions: int = 16
    modules: int = 100_000
    experts: int = 10_000
    name: int = 512
    questions: int = 5_000_000
    total: int = 64 * 2**30
    pattern_seconds: int = 2
    work: int = 20 * 10**12
    memory: int = field(default_factory=half_the_memory)

    @classmethod
    def parse(
        cls, texts: Sequence[str] = (), *, max_bytes: int | None = None, max_tensors: int | None = None
    ) -> Limits:
        """Parse "NAME=VALUE" options; VALUE is a whole number, or a size such as 80GiB.

        max_bytes, max_tensors: other names for total and tensors.

        Raises:
            ConfigError: unknown limit, not a positive whole number, or two values for one limit.
        """
        given: dict[str, tuple[str, int]] = {}
        for option, name, value in (("--max-bytes", "total", max_bytes), ("--max-tensors", "tensors", max_tensors)):
            if value is not None:
                given[name] = (f"{option} {value}", _whole(str(value), option))
        known = [f.name for f in fields(cls)]
        for text in texts:
            name, _, value_text = text.partition("=")
            if name not in known:
                raise ConfigError(
                    f"--limit takes NAME=VALUE, where NAME is one of {', '.join(known)}; got {quoted(text, 80)}."
                )
            told, number = f"--limit {text}", _whole(value_text, f"--limit {name}")
            if given.setdefault(name, (told, number))[1] != number:
                raise ConfigError(f"{given[name][0]} and {told} contradict each other: give one of them.")
        return replace(cls(), **{name: number for name, (_, number) in given.items()})

    def check(self, name: str, found: int, what: str) -> None:
        """Raise `AdapterFormatError`, naming the limit and the option that raises it, if `found` exceeds it.
        what: the sentence up to "more than"."""
        most: int = getattr(self, name)
        if found > most:
            raise AdapterFormatError(f"{what}, more than the {most:,} allowed; --limit {name}={found} would allow it.")


def _whole(text: str, option: str) -> int:
    found = re.fullmatch(r"(\d{1,16})(|KiB|MiB|GiB|TiB)", text.replace("_", ""), re.ASCII)
    number = int(found[1]) * _UNITS[found[2]] if found else math.nan
    if not 1 <= number <= _LARGEST:
        raise ConfigError(
            f"{option} takes a whole number from 1 to {_LARGEST:,}, or a size like 80GiB; got {quoted(text, 80)}."
        )
    return int(number)
