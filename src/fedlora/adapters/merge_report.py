"""What a merge or a resize says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedlora.adapters.truncation import ModuleReport


@dataclass(frozen=True)
class ClientReport:
    """The adapter that a client goes on from. client: its folder's name; ranks: the least and the largest of its
    modules; modules: how many it has; error: how far off the global update it is, relative, over all modules."""

    client: str
    ranks: tuple[int, int]
    modules: int
    error: float


@dataclass(frozen=True)
class Weighed:
    """What a robust rule made of a merge. rule: with its keys. counts: what each adapter's change counts for, in their
    order, after the rule. why: of each, why it was left out or held back, "" where it was not. apart: how far the mean
    that the rule weighs is from the plain one, relative to that; None where a server's state is part of both."""

    rule: str
    counts: tuple[float, ...]
    why: tuple[str, ...]
    apart: float | None = None


@dataclass(frozen=True)
class MergeReport:
    """What a merge or a resize did.

    out: the folder; written: False after a dry run. weights: each adapter's, as used; module_weights: of modules, and
    of tensors beside the pairs, where they are others. beside: the tensors beside the pairs that the result has. rank:
    r of the result; one_rank: whether every module has it. dtype: that it is written in. error: relative, of what was
    cut; rounding: relative, of writing in `dtype` (0 where that is no narrower than the computation); both over all
    modules. beside_rounding: the same of the tensor beside the pairs that it moves most, relative to its own size: it
    is a whole weight, and what training changed of it is not known here. modules: one by one. lacking: modules that
    some adapter lacks. dropped: what `--heads` left out, by kind. bytes, bytes_before: of the result's tensors, and of
    the adapters'. clients: of the adapters that go back to clients (`--readout`). weighed: by a robust rule
    (`--defence`); `weights` are those before it, and `error` is of the mean that it weighs.

    Example:
        >>> report = resize("adapter", "of-rank-2", rank=2, dry_run=True)
        >>> report.rank, report.dtype, report.written, [module.module for module in report.modules]
        (2, 'float32', False, ['q', 'v'])
    """

    out: str
    written: bool
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    module_weights: Mapping[str, tuple[float, ...]]
    beside: tuple[str, ...]
    rank: int
    one_rank: bool
    dtype: str
    error: float
    rounding: float
    beside_rounding: float
    modules: tuple[ModuleReport, ...]
    lacking: tuple[str, ...]
    dropped: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]
    bytes: int
    bytes_before: int
    clients: tuple[ClientReport, ...] = ()
    weighed: Weighed | None = None
