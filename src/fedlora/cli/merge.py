"""`fedlora merge | resize`: merge PEFT adapters, with or without a federated method, or change an adapter's rank."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.options import Adapters, AsJson, DType, Force, MaxBytes, OneAdapter, numbers
from fedlora.cli.screen import Table, byte_size, cell, console, print_json, tell_remarks
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
    weights: Annotated[
        str | None,
        typer.Option(
            help="one per adapter, separated by commas (default: equal), or num_examples: from each upload.json"
        ),
    ] = None,
    sum: Annotated[
        bool, typer.Option("--sum", help="a sum, not a mean: weights as they are, also negative (default: all 1)")
    ] = False,
    method: Annotated[str, typer.Option(help="svd, or a federated method, as 'glora rho=0.5'")] = "svd",
    rank: Annotated[str, typer.Option(help="a number, exact, or energy=0.99")] = "exact",
    missing: Annotated[
        str | None, typer.Option(help="zero: a module that an adapter lacks counts as zero (default: refuse)")
    ] = None,
    heads: Annotated[str, typer.Option(help="whole trained modules: average, first or drop")] = "average",
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
    from fedlora.cli.typed import parse_robust

    given: dict[str, Any] = {
        "weights": numbers(weights, "--weights") if weights and weights != "num_examples" else weights,
        "missing": missing, "heads": heads, "same_base": same_base, "max_bytes": max_bytes,
    }  # fmt: skip
    rule = parse_robust(robust) if robust is not None else None
    if method == "svd" and rule is None:
        report = merging.merge(
            adapters, out, rank=rank, sum=sum, dtype=dtype, max_error=max_error, dry_run=dry_run, force=force, **given
        )
    else:
        if sum:
            raise ConfigError("--sum is for merges without --method and --robust.")
        wanted = merging.Wanted(out, rank, heads, dtype, max_error, dry_run, force)
        wanted.check(adapters)
        report = merge_round(collected(adapters, **given), *_method(method), wanted, rule)
    _show(report, json, "Merged")


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
        adapter, out, rank=rank, dtype=dtype, max_error=max_error, dry_run=dry_run, force=force, max_bytes=max_bytes
    )
    _show(report, json, "Resized")


# -------------------------------------------------------------------------------------------------------- inside


def _method(text: str) -> tuple[Method[Any], str]:
    from fedlora.cli.typed import parse_methods

    sections = parse_methods("svd energy=1.0" if text == "svd" else text)
    if len(sections) != 1:
        raise ConfigError(f"--method takes one method; got {text[:80]!r}.")
    label, section = next(iter(sections.items()))
    return section.build(), label


def _show(report: MergeReport, json: bool, title: str) -> None:
    """Print the modules, the assumptions, and how far off the result is."""
    if json:
        print_json(plain(asdict(report)))
        return
    if len(report.modules) <= 60:
        table = Table("module", "stacked rank", "full rank", "kept", "error", "spectrum", title=title)
        for r in report.modules:
            values = " ".join(f"{s:.2g}" for s in r.singular_values[:4]) + (" ..." if r.full > 4 else "")
            table.add_row(cell(r.module), str(r.stacked), str(r.full), str(r.kept), f"{r.error:.1e}", values)
        console.print(table)
    tell_remarks(report.warnings)
    lines = [f"{counted(len(report.adapters), 'adapter')}, weights {', '.join(f'{w:.4g}' for w in report.weights)}"]
    if report.rule:
        counts = ", ".join(f"{count:.4g}" for count in report.counts)
        lines.append(f"after {report.rule} they are {counts} ({report.counts.count(0)} left out)")
    for what, names in (
        ("tensors of saved modules", report.beside),
        ("modules not in every adapter", report.lacking),
        ("tensors of saved modules left out", report.dropped),
    ):
        if names:
            lines.append(f"{what}: {len(names)}, such as {shown(names[0])}")
    lines.append(f"off {report.of} by {report.error:.2e}")
    if report.rounding:
        lines.append(f"writing {report.dtype} adds {report.rounding:.2e}")
    if report.beside_rounding:
        lines.append(f"writing saved modules changes them by up to {report.beside_rounding:.2e} of their own size")
    where = f"{report.out}: " if report.written else "dry run, nothing was written: "
    size = f"{byte_size(report.bytes)} of {report.dtype}, from {byte_size(report.bytes_before)}"
    console.print("\n".join([*lines, f"{where}rank {report.rank}, {size}"]))
