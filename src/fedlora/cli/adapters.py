"""`fedlora inspect | diff | validate | apply`: PEFT adapters as files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedlora.adapters.base_model import BaseFiles, apply_adapter, check_fit
from fedlora.adapters.merge import Collection
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.untrusted_files import Limits
from fedlora.analysis.inspection import difference, facts, overlap
from fedlora.cli.measures import byte_size
from fedlora.cli.screen import complain, console, import_plots, plotted, print_json, tracked
from fedlora.errors import AdapterFormatError, FedLoRAError
from fedlora.runs.folder import plain

Adapters = Annotated[list[Path], typer.Argument(help="PEFT adapter directories", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
AllowUnknown = Annotated[
    list[str] | None, typer.Option(help="a config field to take as harmless (repeatable)", show_default=False)
]
MaxBytes = Annotated[int | None, typer.Option(help="largest weights file [default: 64 GiB]", show_default=False)]
MaxTensors = Annotated[int | None, typer.Option(help="most tensors in one [default: 100,000]", show_default=False)]


def inspect(
    adapters: Adapters,
    plot: Annotated[Path | None, typer.Option(help="draw the overlap, module by module, into this file")] = None,
    allow_unknown: AllowUnknown = None,
    json: AsJson = False,
) -> None:
    """Ranks, norms, spectra, dead slots, and how much the adapters' subspaces overlap."""
    files = _of_one_base(opened(adapters, allow_unknown))
    found = {str(f.directory): {m: facts(f.lora(m)) for m in f.modules} for f in files}
    shared = [[_mean_overlap(a, b) for b in files] for a in files] if len(files) > 1 else []
    if plot is not None:
        if len(files) < 2:
            raise AdapterFormatError("--plot draws how adapters overlap: give two at least.")
        plotted(lambda: [import_plots().plot_overlaps([f.directory.name for f in files], _overlaps(files), plot)])
    if json:
        each = {
            str(file.directory): {
                m: asdict(x) | {"scale": file.scale(m)} for m, x in found[str(file.directory)].items()
            }
            for file in files
        }
        print_json(plain({"adapters": each, "overlap": shared}))
        return
    for file in files:
        table = Table("module", title=str(file.directory))
        for column in ("rank", "effective", "scale", "norm", "spectrum", "‖B‖/‖A‖"):
            table.add_column(column, no_wrap=True)
        for module, x in found[str(file.directory)].items():
            used = f"{x.numerical} of {x.rank}{f', {x.dead} dead' if x.dead else ''}"
            values = " ".join(f"{s:.2g}" for s in x.singular_values[:2]) + (" ..." if x.numerical > 2 else "")
            scale = f"{file.scale(module):.3g}"
            table.add_row(module, used, f"{x.effective:.1f}", scale, f"{x.norm:.3g}", values, f"{x.balance:.2g}")
        console.print(table)
        kinds = f"base model {file.base_model or 'not named'}, {len(file.modules)} modules, {len(file.heads)} heads"
        console.print(f"{kinds}, {byte_size(file.size())}", markup=False)
    if shared:
        table = Table(
            "overlap", *(str(k + 1) for k in range(len(files))), title="Shared column space, mean over modules"
        )
        for k, (file, row) in enumerate(zip(files, shared, strict=True)):
            table.add_row(f"{k + 1} {file.directory}", *(f"{x:.2f}" for x in row))
        console.print(table)
        console.print("1: one space lies in the other; independent ones of rank r in d dimensions share about r / d")


def diff(
    one: Annotated[Path, typer.Argument(help="a PEFT adapter directory", show_default=False)],
    other: Annotated[Path, typer.Argument(help="another", show_default=False)],
    json: AsJson = False,
) -> None:
    """Is it the same update in another gauge? Distances of updates, of factors, and angles, module by module."""
    a, b = _of_one_base(opened([one, other]))
    common = sorted(set(a.modules) & set(b.modules))
    found = {module: difference(a.lora(module), b.lora(module)) for module in common}
    lone = {str(f.directory): sorted(set(f.modules) - set(common)) for f in (a, b)}
    verdicts = {d.verdict for d in found.values()}
    verdict = verdicts.pop() if len(verdicts) == 1 and not any(lone.values()) else "another update"
    if json:
        each: dict[str, Any] = {m: asdict(d) | {"verdict": d.verdict} for m, d in found.items()}
        print_json(plain({"verdict": verdict, "modules": each, "only_in": lone}))
        return
    table = Table("module", "update", "B", "A", "largest angle", "", title="Relative distances")
    for module, d in found.items():
        factors = ["other rank" if x is None else f"{x:.1e}" for x in (d.B, d.A)]
        table.add_row(module, f"{d.update:.1e}", *factors, f"{d.angle:.2g} deg", d.verdict)
    console.print(table)
    for where, only in lone.items():
        if only:
            console.print(f"only in {where}: {', '.join(only[:3])} ({len(only)} in all)", markup=False)
    console.print(f"[bold]{verdict}")


def validate(
    adapters: Adapters,
    base: Annotated[Path | None, typer.Option(help="the base model's directory: do modules and shapes fit it?")] = None,
    allow_unknown: AllowUnknown = None,
    max_bytes: MaxBytes = None,
    max_tensors: MaxTensors = None,
    json: AsJson = False,
) -> None:
    """Check adapters without using them. Exit code 0: all are sound; 2: at least one is refused."""
    found: dict[str, str | None] = {}
    model = BaseFiles(base) if base is not None else None
    for directory in tracked(adapters, "checking"):
        try:
            (file,) = opened([directory], allow_unknown, max_bytes, max_tensors)
            for module in file.modules:  # reading checks that all is finite
                file.lora(module)
            for path in file.heads:
                file.head(path)
            if model is not None:
                _fits(file, model)
            found[str(directory)] = None
        except FedLoRAError as error:
            found[str(directory)] = str(error)
    if json:
        print_json({name: {"sound": reason is None, "reason": reason} for name, reason in found.items()})
    else:
        for name, reason in found.items():
            console.print(f"{name}: {'sound' if reason is None else 'refused'}", markup=False, soft_wrap=True)
    refused = [reason for reason in found.values() if reason is not None]
    if refused:
        raise typer.Exit(complain("; ".join(refused)))


def apply(
    adapter: Annotated[Path, typer.Argument(help="a PEFT adapter directory", show_default=False)],
    base: Annotated[Path, typer.Option(help="the base model's directory", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    allow_unknown: AllowUnknown = None,
) -> None:
    """Merge an adapter into the full model, for serving without PEFT: one tensor in memory at a time."""
    (file,) = opened([adapter], allow_unknown)
    changed = apply_adapter(file, BaseFiles(base), out, progress=lambda steps: tracked(steps, "writing"))
    console.print(f"{out}: {len(changed)} tensors changed or added", markup=False, soft_wrap=True)


# -------------------------------------------------------------------------------------------------------- inside


def opened(
    directories: Sequence[Path],
    allow_unknown: Sequence[str] | None = None,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    *,
    least: int = 1,
) -> list[AdapterFile]:
    """The adapters, checked but not read."""
    limits = Limits()
    limits = replace(limits, total=max_bytes or limits.total, tensors=max_tensors or limits.tensors)
    files = [AdapterFile(directory, limits=limits, allow_unknown=allow_unknown or ()) for directory in directories]
    if len(files) < least:
        raise AdapterFormatError(f"at least {least} adapters are needed; got {len(files)}.")
    return files


def _of_one_base(files: Sequence[AdapterFile]) -> list[AdapterFile]:
    return list(Collection.of(files, [1.0] * len(files)).files)


def _mean_overlap(one: AdapterFile, other: AdapterFile) -> float:
    common = sorted(set(one.modules) & set(other.modules))
    return math.fsum(overlap(one.lora(m), other.lora(m)) for m in common) / len(common) if common else 0.0


def _overlaps(files: Sequence[AdapterFile]) -> dict[str, list[list[float]]]:
    """Module -> adapter by adapter, how much their column spaces share; of the modules that all have."""
    common = [m for m in files[0].modules if all(m in file.ranks for file in files)]
    return {m: [[overlap(a.lora(m), b.lora(m)) for b in files] for a in files] for m in common}


def _fits(file: AdapterFile, base: BaseFiles) -> None:
    """Raises `AdapterFormatError` where a module is not in the base model, or has other shapes there."""
    for path, layout in file.layouts.items():
        name = base.weight_of(path, layout)
        lora = file.lora(layout.modules(path)[0])
        B, A = lora.factors
        check_fit(file.directory, path, layout, (B.shape[0], A.shape[1]), base.shape(name))
