"""`fedlora merge | inspect | diff | validate`: PEFT adapters as files, without base model and without federation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table
from torch import Tensor

from fedlora.adapter_file import WEIGHTS_FILE, AdapterFile
from fedlora.cli.screen import complain, console, notes, print_json
from fedlora.errors import AdapterFormatError, ConfigError, FedLoRAError
from fedlora.inspection import difference, facts, overlap
from fedlora.lora import Adapter, LoRA
from fedlora.merging import ModuleReport, RankRule, merge_module, total_error
from fedlora.methods.factors import weighted_mean
from fedlora.peft_io import pad_rank, spec_of, write_adapter
from fedlora.run_folder import plain
from fedlora.uploads import read_facts

Adapters = Annotated[list[Path], typer.Argument(help="PEFT adapter directories", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


def merge(
    adapters: Adapters,
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    weights: Annotated[str | None, typer.Option(help="one for each, separated by commas (default: alike)")] = None,
    weights_from: Annotated[str | None, typer.Option(help="num_examples: from each upload.json")] = None,
    rank: Annotated[str, typer.Option(help="a number, exact, or energy=0.99")] = "exact",
    missing: Annotated[str, typer.Option(help="a module that one lacks: zero or renormalise")] = "zero",
    heads: Annotated[str, typer.Option(help="fully trained modules: average, first or drop")] = "average",
    max_error: Annotated[
        float | None, typer.Option(help="refuse to write beyond this relative truncation error")
    ] = None,
    json: AsJson = False,
) -> None:
    """Merge adapters into one: the exact weighted mean of their updates, then the best adapter of the asked rank."""
    files = _open(adapters, least=1)
    rule = RankRule.parse(rank)
    shares = _shares(files, weights, weights_from)
    for name, value, options in (("--missing", missing, ("zero", "renormalise")), ("--heads", heads, _HEADS)):
        if value not in options:
            raise ConfigError(f"{name} is one of {', '.join(options)}; got {value!r}.")
    merged: dict[str, LoRA] = {}
    reports: list[ModuleReport] = []
    for module in track(_modules(files), "merging", console=notes, transient=True):
        held = [(file, w) for file, w in zip(files, shares, strict=True) if module in file.ranks]
        total = math.fsum(w for _, w in held) if missing == "renormalise" else 1.0
        if not total:
            raise ConfigError(f"module {module!r} is held only by adapters of weight 0.")
        lora, report = merge_module(module, [file.lora(module) for file, _ in held], [w / total for _, w in held], rule)
        merged[module] = pad_rank(lora, 1)
        reports.append(report)
    error = total_error(reports)
    if max_error is not None and error > max_error:
        raise typer.Exit(
            complain(
                f"cutting to {rank} loses {error:.2%} of the merged update, more than --max-error {max_error:g}; "
                f"nothing was written. A higher rank or energy=... loses less; exact loses nothing."
            )
        )
    adapter = Adapter(merged, _merged_heads(files, shares, heads))
    spec = spec_of(files[0].config, 1.0)
    write_adapter(out, adapter, spec, card=_card(files, shares, rank, reports))
    if json:
        print_json(plain({"out": str(out), "error": error, "modules": [asdict(r) for r in reports]}))
        return
    _show_merge(files, shares, reports, out)


def inspect(adapters: Adapters, json: AsJson = False) -> None:
    """Ranks, norms, spectra, dead slots, and how much the adapters' subspaces overlap."""
    files = _open(adapters, least=1)
    found = {str(f.directory): {m: facts(f.lora(m)) for m in f.modules} for f in files}
    shared = [[_mean_overlap(a, b) for b in files] for a in files] if len(files) > 1 else []
    if json:
        print_json(
            plain({"adapters": {k: {m: asdict(x) for m, x in v.items()} for k, v in found.items()}, "overlap": shared})
        )
        return
    for file in files:
        table = Table(
            "module", "rank", "of it used", "effective", "norm", "dead slots", "‖B‖/‖A‖", title=str(file.directory)
        )
        for module, x in found[str(file.directory)].items():
            table.add_row(
                module, str(x.rank), str(x.numerical), f"{x.effective:.1f}", f"{x.norm:.3g}", str(x.dead or ""),
                f"{x.balance:.2g}",
            )  # fmt: skip
        console.print(table)
        kinds = f"base model {file.base_model or 'not named'}, {len(file.modules)} modules, {len(file.heads)} heads"
        console.print(f"{kinds}, {file.size() / 1e6:.1f} MB", markup=False)
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
    a, b = _open([one, other], least=2)
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


def validate(adapters: Adapters, json: AsJson = False) -> None:
    """Check adapters without using them. Exit code 0: all are sound; 2: at least one is refused."""
    found: dict[str, str | None] = {}
    for directory in adapters:
        try:
            file = AdapterFile(directory)
            for module in file.modules:
                _finite(f"module {module!r}", *file.lora(module).factors)
            for path in file.heads:
                _finite(f"head {path!r}", file.head(path))
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


# -------------------------------------------------------------------------------------------------------- inside

_HEADS = ("average", "first", "drop")


def _open(directories: Sequence[Path], *, least: int) -> list[AdapterFile]:
    files = [AdapterFile(directory) for directory in directories]
    if len(files) < least:
        raise AdapterFormatError(f"at least {least} adapters are needed; got {len(files)}.")
    bases = {str(file.directory): file.base_model for file in files}
    if len(set(bases.values())) > 1:
        raise AdapterFormatError(f"the adapters are of different base models, so their updates do not add up: {bases}.")
    return files


def _modules(files: Sequence[AdapterFile]) -> list[str]:
    return sorted({module for file in files for module in file.modules})


def _shares(files: Sequence[AdapterFile], weights: str | None, weights_from: str | None) -> list[float]:
    """Weights that sum to 1."""
    if weights is not None and weights_from is not None:
        raise ConfigError("give --weights or --weights-from, not both.")
    if weights_from not in (None, "num_examples"):
        raise ConfigError(f"--weights-from is num_examples; got {weights_from!r}.")
    if weights_from is not None:
        given = [read_facts(file.directory)[1] for file in files]
    else:
        try:
            given = [float(w) for w in weights.split(",")] if weights is not None else [1.0] * len(files)
        except ValueError as error:
            raise ConfigError(f"--weights takes numbers separated by commas; got {weights!r}.") from error
    if len(given) != len(files):
        raise ConfigError(f"--weights has {len(given)} numbers for {len(files)} adapters.")
    if not all(math.isfinite(w) and w >= 0 for w in given) or not any(given):
        raise ConfigError(f"weights are finite, not negative, and not all zero; got {given}.")
    total = math.fsum(given)
    return [w / total for w in given]


def _merged_heads(files: Sequence[AdapterFile], shares: Sequence[float], rule: str) -> dict[str, Tensor]:
    if rule == "drop":
        return {}
    if rule == "first":
        return {path: files[0].head(path) for path in files[0].heads}
    if len({file.heads for file in files}) > 1:
        counts = {str(file.directory): len(file.heads) for file in files}
        raise AdapterFormatError(
            f"the adapters have different fully trained modules ({counts}), which cannot be averaged; "
            f"take those of the first with --heads first, or none with --heads drop."
        )
    return {path: weighted_mean([file.head(path).float() for file in files], list(shares)) for path in files[0].heads}


def _mean_overlap(one: AdapterFile, other: AdapterFile) -> float:
    common = sorted(set(one.modules) & set(other.modules))
    return math.fsum(overlap(one.lora(m), other.lora(m)) for m in common) / len(common) if common else 0.0


def _finite(what: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise AdapterFormatError(f"{what} is {tensor.dtype}; adapters hold floating-point numbers.")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterFormatError(f"{what} holds NaN or Inf.")


def _show_merge(
    files: Sequence[AdapterFile], shares: Sequence[float], reports: Sequence[ModuleReport], out: Path
) -> None:
    if len(reports) <= 60:
        table = Table("module", "stacked rank", "rank of the mean", "kept", "error", title="Merged")
        for r in reports:
            table.add_row(r.module, str(r.stacked), str(r.full), str(r.kept), f"{r.error:.1e}")
        console.print(table)
    size = (out / WEIGHTS_FILE).stat().st_size
    console.print(f"{len(files)} adapters, weights {', '.join(f'{w:.4g}' for w in shares)}", markup=False)
    console.print(f"truncation error over all modules: {total_error(reports):.2e}", markup=False)
    console.print(f"{out}: {size / 1e6:.1f} MB, from {sum(f.size() for f in files) / 1e6:.1f} MB", markup=False)


def _card(files: Sequence[AdapterFile], shares: Sequence[float], rank: str, reports: Sequence[ModuleReport]) -> str:
    base = files[0].base_model
    rows = "\n".join(
        f"| {file.directory.name} | {w:.6g} | {_sha256(file.directory / WEIGHTS_FILE)} |"
        for file, w in zip(files, shares, strict=True)
    )
    kept = sorted({r.kept for r in reports})
    ranks = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    return f"""---
library_name: peft
{f"base_model: {base}{chr(10)}" if base else ""}tags:
- lora
- merge
- fedlora
---

# Merged LoRA adapter

The weighted mean of the updates B A of {len(files)} adapters, exact up to the asked rank ({rank}): ranks {ranks},
relative truncation error {total_error(reports):.2e} over all modules. alpha = r, so the update is B A itself.

| adapter | weight | SHA-256 of {WEIGHTS_FILE} |
|---|---|---|
{rows}
"""


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
