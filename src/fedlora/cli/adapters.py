"""`fedlora inspect | diff | validate | apply`: PEFT adapters as files. A command imports torch when it is called."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.limits import Limit, MaxBytes, MaxTensors, limits_of
from fedlora.cli.measures import byte_size
from fedlora.cli.screen import Table, cell, complain, console, import_plots, plotted, print_json, tracked
from fedlora.core.echo import shown
from fedlora.errors import AdapterFormatError, ConfigError, FedLoRAError
from fedlora.runs.drawing import check_picture
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.applying.apply import Applied

Adapters = Annotated[list[Path], typer.Argument(help="PEFT adapter directories", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
AllowUnknown = Annotated[
    list[str] | None, typer.Option(help="a config field to take as harmless (repeatable)", show_default=False)
]
Force = Annotated[
    bool,
    typer.Option("--force", help="replace what an earlier call of this command left there, by the mark in its weights"),
]


def inspect(
    adapters: Adapters,
    plot: Annotated[Path | None, typer.Option(help="draw the overlap, module by module, into this file")] = None,
    allow_unknown: AllowUnknown = None,
    limit: Limit = None,
    json: AsJson = False,
) -> None:
    """Ranks, norms, spectra, dead slots, and how much the adapters' subspaces overlap."""
    from fedlora.analysis.inspection import facts
    from fedlora.cli.opened import check_memory, mean_overlap, of_one_base, opened, overlaps

    if plot is not None:
        check_picture(plot)
    files = of_one_base(opened(adapters, allow_unknown, limit=limit))
    check_memory(files)
    found = {str(f.directory): {m: facts(f.lora(m)) for m in f.modules} for f in files}
    shared = [[mean_overlap(a, b) for b in files] for a in files] if len(files) > 1 else []
    if plot is not None:
        if len(files) < 2:
            raise AdapterFormatError("--plot draws how adapters overlap: give two at least.")
        names = [shown(file.directory.name) for file in files]
        plotted(lambda: [import_plots().plot_overlaps(names, overlaps(files), plot)])
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
        table = Table("module", title=cell(file.directory))
        for column in ("rank", "effective", "scale", "norm", "spectrum", "‖B‖/‖A‖"):
            table.add_column(column, no_wrap=True)
        for module, x in found[str(file.directory)].items():
            used = f"{x.numerical} of {x.rank}{f', {x.dead} dead' if x.dead else ''}"
            values = " ".join(f"{s:.2g}" for s in x.singular_values[:2]) + (" ..." if x.numerical > 2 else "")
            scale = f"{file.scale(module):.3g}"
            table.add_row(cell(module), used, f"{x.effective:.1f}", scale, f"{x.norm:.3g}", values, f"{x.balance:.2g}")
        console.print(table)
        base = shown(file.base_model or "not named")
        kinds = f"base model {base}, {len(file.modules)} modules, {len(file.heads)} heads"
        console.print(f"{kinds}, {byte_size(file.size())}", markup=False)
    if shared:
        table = Table(
            "overlap", *(str(k + 1) for k in range(len(files))), title="Shared column space, mean over modules"
        )
        for k, (file, row) in enumerate(zip(files, shared, strict=True)):
            table.add_row(cell(f"{k + 1} {file.directory}"), *(f"{x:.2f}" for x in row))
        console.print(table)
        console.print("1: one space lies in the other; independent ones of rank r in d dimensions share about r / d")


def diff(
    one: Annotated[Path, typer.Argument(help="a PEFT adapter directory", show_default=False)],
    other: Annotated[Path, typer.Argument(help="another", show_default=False)],
    limit: Limit = None,
    json: AsJson = False,
) -> None:
    """Is it the same update in another gauge? Distances of updates, of factors, and angles, module by module."""
    from fedlora.analysis.inspection import difference
    from fedlora.cli.opened import check_memory, of_one_base, opened

    a, b = of_one_base(opened([one, other], limit=limit))
    check_memory([a, b])
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
        table.add_row(cell(module), f"{d.update:.1e}", *factors, f"{d.angle:.2g} deg", d.verdict)
    console.print(table)
    for where, only in lone.items():
        if only:
            console.print(f"only in {where}: {', '.join(map(shown, only[:3]))} ({len(only)} in all)", markup=False)
    console.print(verdict, style="bold")


def validate(
    adapters: Adapters,
    base: Annotated[
        str | None, typer.Option(help="the base model's directory, or demo: do modules and shapes fit it?")
    ] = None,
    allow_unknown: AllowUnknown = None,
    max_bytes: MaxBytes = None,
    max_tensors: MaxTensors = None,
    limit: Limit = None,
    json: AsJson = False,
) -> None:
    """Check adapters without using them. Exit code 0: all are sound; 2: at least one is refused."""
    from fedlora.adapters.merging import open_adapters
    from fedlora.cli import applied
    from fedlora.cli.opened import base_files, tell

    found: dict[str, str | None] = {}
    limits = limits_of(limit, max_bytes, max_tensors)
    fits: dict[str, Applied] = {}
    remarks: dict[str, list[str]] = {}
    model = base_files(base) if base is not None else None
    if model is not None:
        from fedlora.applying.apply import check_adapter
    for directory in tracked(adapters, "checking"):
        try:
            (file,), said = open_adapters([directory], allow_unknown or (), limits, with_base=model is not None)
            file.check()
            remarks[str(directory)] = said
            if model is not None:
                fits[str(directory)] = check_adapter(file, model)
            found[str(directory)] = None
        except FedLoRAError as error:
            found[str(directory)] = str(error)
    if json:
        judged = {
            name: {"sound": reason is None, "reason": reason, "notes": list(remarks.get(name, ()))}
            for name, reason in found.items()
        }
        print_json(
            {name: facts | (applied.as_json(fits[name]) if name in fits else {}) for name, facts in judged.items()}
        )
    else:
        for name, reason in found.items():
            console.print(f"{name}: {'sound' if reason is None else 'refused'}", markup=False, soft_wrap=True)
            if name in fits:
                applied.tell(fits[name])
            tell(remarks.get(name, ()))
    refused = [reason for reason in found.values() if reason is not None]
    if refused:
        more = f"; and {len(refused) - 3} more, with their reasons in --json" if len(refused) > 3 else ""
        raise typer.Exit(complain("; ".join(shown(reason, 700) for reason in refused[:3]) + more))


def apply(
    adapter: Annotated[Path, typer.Argument(help="a PEFT adapter directory", show_default=False)],
    base: Annotated[str, typer.Option(help="the base model's directory, or demo", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="of what is written: float16, bfloat16, float32, float64 (default: the base model's)",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    allow_unknown: AllowUnknown = None,
    limit: Limit = None,
    json: AsJson = False,
) -> None:
    """Merge an adapter into the full model, for serving without PEFT. The model is loaded whole."""
    from fedlora.adapters.merging import open_adapters
    from fedlora.applying.apply import DTYPES, apply_adapter
    from fedlora.cli import applied
    from fedlora.cli.opened import base_files, tell

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is one of {', '.join(DTYPES)}; got {dtype[:40]!r}.")
    (file,), said = open_adapters([adapter], allow_unknown or (), limits_of(limit, None, None), with_base=True)
    tell(said)
    done = apply_adapter(
        file,
        base_files(base),
        out,
        DTYPES[dtype] if dtype else None,
        progress=lambda steps: tracked(steps, "writing"),
        force=force,
    )
    if json:
        print_json({"out": str(out)} | applied.as_json(done))
        return
    applied.tell(done)
    loss = done.cost.loss if done.cost is not None else 0.0
    console.print(
        f"{out}: {len(done.changed)} tensors changed, {len(done.added)} added; rounding loses {loss:.1e} of the update",
        markup=False, soft_wrap=True,
    )  # fmt: skip
