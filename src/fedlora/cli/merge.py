"""`fedlora merge | resize`: merge PEFT adapters, with or without a federated method, or change an adapter's rank."""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedlora.cli.measures import byte_size
from fedlora.cli.options import (
    Adapters,
    AsJson,
    DType,
    Force,
    MaxBytes,
    OneAdapter,
    numbers,
)
from fedlora.cli.screen import Table, cell, console, print_json, tell_remarks, tracked
from fedlora.core.text import shown
from fedlora.errors import ConfigError, counted
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.adapters.merge_report import MergeReport
    from fedlora.core.method import Method

Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="directory to write; needed without --dry-run", show_default=False)
]
MaxError = Annotated[float | None, typer.Option(help="refuse to write beyond this relative error")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="compute and report everything, write nothing")]


def merge(
    adapters: Adapters,
    out: Out = None,
    weights: Annotated[str | None, typer.Option(help="one per adapter, separated by commas (default: equal)")] = None,
    weights_from: Annotated[str | None, typer.Option(help="num_examples: from each upload.json")] = None,
    sum: Annotated[
        bool, typer.Option("--sum", help="a sum, not a mean: weights as they are, also negative (default: all 1)")
    ] = False,
    method: Annotated[str, typer.Option(help="svd, or a federated method, as 'glora rho=0.5'")] = "svd",
    rank: Annotated[str, typer.Option(help="a number, exact, or energy=0.99")] = "exact",
    missing: Annotated[
        str | None,
        typer.Option(help="how to count a module that an adapter lacks: zero or renormalise (default: zero)"),
    ] = None,
    heads: Annotated[
        str,
        typer.Option(help="whole trained modules: average, first or drop"),
    ] = "average",
    dtype: DType = None,
    max_error: MaxError = None,
    same_base: Annotated[
        bool, typer.Option("--same-base", help="treat the adapters' base models as one, whatever their names")
    ] = False,
    robust: Annotated[
        str | None,
        typer.Option(
            help="a robust rule with its keys, such as 'multi-krum byzantine=1' (docs/how-to/robust-rules.md)"
        ),
    ] = None,
    dry_run: DryRun = False,
    force: Force = False,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Merge adapters into one: the exact weighted mean of their updates; with --rank its best approximation."""
    from fedlora.adapters import merging
    from fedlora.adapters.collection import collected
    from fedlora.cli.merge_method import merge_round
    from fedlora.cli.method_names import parse_robust

    target = _target(out, dry_run)
    counts = numbers(weights, "--weights") if weights is not None else None
    rule = parse_robust(robust) if robust is not None else None
    if method == "svd" and rule is None:
        report = merging.merge(
            adapters, target, rank=rank, weights=counts, weights_from=cast("Any", weights_from), sum=sum,
            missing=cast("Any", missing), heads=cast("Any", heads), dtype=dtype, max_error=max_error,
            same_base=same_base, dry_run=dry_run, force=force, max_bytes=max_bytes, progress=tracked,
        )  # fmt: skip
    else:
        if sum:
            raise ConfigError("--sum is for merges without --method and --robust.")
        wanted = merging.Wanted(target, rank, heads, dtype, max_error, dry_run, force)
        wanted.check(adapters)
        given = collected(
            adapters, counts, weights_from, missing, heads=heads, same_base=same_base, max_bytes=max_bytes
        )
        chosen, label = _method(method)
        report = merge_round(given, chosen, label, wanted, rule=rule, progress=tracked)
    _show(report if out else replace(report, out=""), json, "Merged", _of_what(method, ruled=rule is not None))


def resize(
    adapter: OneAdapter,
    rank: Annotated[str, typer.Option(help="a number, exact, or energy=0.99", show_default=False)],
    out: Out = None,
    dtype: DType = None,
    max_error: MaxError = None,
    dry_run: DryRun = False,
    force: Force = False,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Write an adapter at another rank (the best approximation), and report the error."""
    from fedlora.adapters import merging

    report = merging.resize(
        adapter, _target(out, dry_run), rank=rank, dtype=dtype, max_error=max_error,
        dry_run=dry_run, force=force, max_bytes=max_bytes, progress=tracked,
    )  # fmt: skip
    _show(report if out else replace(report, out=""), json, "Resized", "truncation error over all modules:")


# -------------------------------------------------------------------------------------------------------- inside


def _target(out: Path | None, dry_run: bool) -> Path:
    """Where to write. A dry run without a place gets one that does not exist and is never made.

    Raises `ConfigError` if there is something to write but no place.
    """
    if out is None and not dry_run:
        raise ConfigError("give -o DIRECTORY to write to, or --dry-run to write nothing.")
    return out or Path(tempfile.gettempdir()) / f"fedlora-{uuid.uuid4().hex}"


def _of_what(method: str, *, ruled: bool) -> str:
    """What the result's error is, in words."""
    if ruled:
        mean = "the mean that the rule weighs"
        return f"truncation error over all modules, of {mean}:" if method == "svd" else f"off {mean} by"
    return "truncation error over all modules:" if method == "svd" else "off the mean of the adapters by"


def _method(text: str) -> tuple[Method[Any], str]:
    from fedlora.cli.method_names import parse_methods

    sections = parse_methods("svd energy=1.0" if text == "svd" else text)
    if len(sections) != 1:
        raise ConfigError(f"--method takes one method; got {text[:80]!r}.")
    label, section = next(iter(sections.items()))
    return section.build(), label


def _show(report: MergeReport, json: bool, title: str, off: str) -> None:
    """Print the modules, the assumptions, and how far off the result is. off: what the error is, in words."""
    if json:
        print_json(plain(asdict(report)))
        return
    reports = report.modules
    if len(reports) <= 60:
        table = Table("module", "stacked rank", "full rank", "kept", "error", "spectrum", title=title)
        for r in reports:
            values = " ".join(f"{s:.2g}" for s in r.singular_values[:4]) + (" ..." if r.full > 4 else "")
            table.add_row(cell(r.module), str(r.stacked), str(r.full), str(r.kept), f"{r.error:.1e}", values)
        console.print(table)
    tell_remarks(report.warnings)
    told = ", ".join(f"{w:.4g}" for w in report.weights)
    count = f"{len(report.adapters)} adapters, weights {told}" if len(report.adapters) > 1 else "1 adapter"
    ruled = ""
    if report.weighed is not None:
        counts = ", ".join(f"{c:.4g}" for c in report.weighed.counts)
        gone = sum(c == 0 for c in report.weighed.counts)
        ruled = f"; after {report.weighed.rule} their changes count {counts} ({gone} left out)"
    console.print(f"{count}{ruled}")
    if report.beside:
        console.print(f"{counted(len(report.beside), 'tensor')} of saved modules, such as {shown(report.beside[0])}")
    if report.lacking:
        console.print(
            f"not in every adapter: {counted(len(report.lacking), 'module')}, such as {shown(report.lacking[0])}"
        )
    if report.dropped:
        console.print(
            f"left out: {counted(len(report.dropped), 'tensor')} of saved modules, such as {shown(report.dropped[0])}"
        )
    console.print(f"{off} {report.error:.2e}")
    if report.weighed is not None:
        console.print(
            f"the mean that the rule weighs is off the plain mean of all adapters by {report.weighed.apart:.2e}"
        )
    if report.rounding:
        console.print(f"writing {report.dtype} adds {report.rounding:.2e}")
    if report.beside_rounding:
        console.print(f"writing saved modules changes them by up to {report.beside_rounding:.2e} of their own size")
    to = f" to {report.out}" if report.out else ""
    where = f"{report.out}: " if report.written else f"dry run, nothing was written{to}: "
    size = f"{byte_size(report.bytes)} of {report.dtype}, from {byte_size(report.bytes_before)}"
    console.print(f"{where}rank {report.rank}, {size}")
