"""`fedlora inspect | diff`: what adapters contain, and how two adapters differ. Each command imports torch itself."""

from __future__ import annotations

from dataclasses import asdict
from math import isinf
from typing import Any

from fedlora.cli.options import Adapters, AsJson, MaxBytes, OneAdapter
from fedlora.cli.screen import Table, byte_size, cell, console, print_json
from fedlora.core.text import shown
from fedlora.runs.folder import plain


def inspect(
    adapters: Adapters,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Ranks, norms, spectra, dead slots, and how much the adapters' subspaces overlap."""
    from fedlora.adapters.collection import collected
    from fedlora.analysis.inspection import facts, mean_overlap

    files = collected(adapters, heads="drop", missing="zero", max_bytes=max_bytes).files
    found = {str(f.directory): {m: facts(f.lora(m)) for m in f.modules} for f in files}
    shared = [[mean_overlap(a, b) for b in files] for a in files] if len(files) > 1 else []
    if json:
        each = {
            str(file.directory): {
                m: asdict(x) | {"scale": file.scales[m]} for m, x in found[str(file.directory)].items()
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
            scale = f"{file.scales[module]:.3g}"
            table.add_row(cell(module), used, f"{x.effective:.1f}", scale, f"{x.norm:.3g}", values, f"{x.balance:.2g}")
        console.print(table)
        base = shown(file.base_model or "not named")
        kinds = f"base model {base}, {len(file.modules)} modules, {len(file.heads)} heads"
        console.print(f"{kinds}, {byte_size(file.size())}")
    if shared:
        table = Table(
            "overlap", *(str(k + 1) for k in range(len(files))), title="Shared column space, mean over modules"
        )
        for k, (file, row) in enumerate(zip(files, shared, strict=True)):
            table.add_row(cell(f"{k + 1} {file.directory}"), *(f"{x:.2f}" for x in row))
        console.print(table)
        console.print("1: one space lies inside the other; independent spaces of rank r in d dimensions share r / d")


def diff(
    one: OneAdapter,
    other: OneAdapter,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Do two adapters hold the same update? Distances and angles for each module, and differences in saved modules."""
    from fedlora.adapters.collection import collected
    from fedlora.analysis.inspection import difference, heads_apart

    a, b = collected([one, other], heads="drop", missing="zero", max_bytes=max_bytes).files
    common = sorted(set(a.modules) & set(b.modules))
    found = {module: difference(a.lora(module), b.lora(module)) for module in common}
    lone = {str(f.directory): sorted(set(f.modules) - set(common)) for f in (a, b)}
    verdicts = {d.verdict for d in found.values()}
    beside = heads_apart(a, b)
    verdict = verdicts.pop() if len(verdicts) == 1 and not any(lone.values()) and not beside else "another update"
    if json:
        each: dict[str, Any] = {m: asdict(d) | {"verdict": d.verdict} for m, d in found.items()}
        print_json(plain({"verdict": verdict, "modules": each, "beside": beside, "only_in": lone}))
        return
    table = Table("module", "update", "B", "A", "largest angle", "", title="Relative distances")
    for module, d in found.items():
        factors = ["other rank" if x is None else f"{x:.1e}" for x in (d.B, d.A)]
        table.add_row(cell(module), f"{d.update:.1e}", *factors, f"{d.angle:.2g} deg", d.verdict)
    console.print(table)
    for name, apart in beside.items():
        how = (
            "is in only one of the two, or has another shape" if isinf(apart) else f"differs by {apart:.1e} of its size"
        )
        console.print(f"saved module: {shown(name)} {how}")
    for where, only in lone.items():
        if only:
            console.print(f"only in {where}: {', '.join(map(shown, only[:3]))} ({len(only)} in all)")
    console.print(verdict, style="bold")
