"""The reports of a merge or a resize."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleReport:
    """One module's result. stacked: the sum of the inputs' ranks. full: the rank of their sum. error: relative, from
    truncation, plus a bound on the sum's own error if terms nearly cancel. norm: of the sum. rounding: relative, from
    writing it in the result's type."""

    module: str
    stacked: int
    full: int
    kept: int
    error: float
    norm: float
    singular_values: tuple[float, ...]
    rounding: float = 0.0


@dataclass(frozen=True)
class Weighed:
    """What a robust rule did in a merge. rule: with its options. counts: each adapter's weight after the rule, in
    order. why: why each was left out or scaled down, "" if it was not. apart: relative distance between the rule's mean
    and the plain mean."""

    rule: str
    counts: tuple[float, ...]
    why: tuple[str, ...]
    apart: float


@dataclass(frozen=True)
class MergeReport:
    """What a merge or a resize did.

    out: the folder; written: False after a dry run. weights: each adapter's, as used. beside: the result's tensors of
    saved modules. rank: the result's r, which every module has. dtype: the result's. error: relative truncation error;
    rounding: relative error from writing in `dtype`; both over all modules. beside_rounding: the largest such error
    among the saved modules, each relative to its own size: these are whole weights, and how much training changed them
    is unknown here. modules: one by one. lacking: modules that some adapter lacks. dropped: heads that `--heads` left
    out. bytes, bytes_before: size of the result's tensors and of the adapters'. weighed: the robust rule's part
    (`--robust`); `weights` are those before it, and `error` refers to the rule's mean.

    Example:
        >>> report = resize("adapter", "of-rank-2", rank=2, dry_run=True)
        >>> report.rank, report.dtype, report.written, [module.module for module in report.modules]
        (2, 'float32', False, ['q', 'v'])
    """

    out: str
    written: bool
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    beside: tuple[str, ...]
    rank: int
    dtype: str
    error: float
    rounding: float
    beside_rounding: float
    modules: tuple[ModuleReport, ...]
    lacking: tuple[str, ...]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]
    bytes: int
    bytes_before: int
    weighed: Weighed | None = None
