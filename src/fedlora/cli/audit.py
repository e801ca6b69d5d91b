"""`fedlora audit`: how far each method is from real uploads' true mean, and how much it depends on coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedlora.cli.options import AsJson, MaxBytes, fetched, numbers
from fedlora.cli.run_words import tell_attack
from fedlora.cli.screen import Table, cell, console, notes, plotted, print_json, red, tracked
from fedlora.errors import ConfigError, counted
from fedlora.runs.drawing import check_picture
from fedlora.runs.folder import RunFolder, plain

if TYPE_CHECKING:
    from fedlora.analysis.audit import Audit
    from fedlora.core.messages import Upload


def audit(
    adapters: Annotated[
        list[Path] | None,
        typer.Argument(help="PEFT folders of one base model, or owner/name@revision", callback=fetched),
    ] = None,
    from_run: Annotated[Path | None, typer.Option(help="a run with run.keep_uploads: its newest uploads")] = None,
    methods: Annotated[str, typer.Option(help="names, separated by commas, as 'fedit, glora gamma=1'")] = "all",
    weights: Annotated[str | None, typer.Option(help="one for each adapter, separated by commas")] = None,
    conditions: Annotated[str, typer.Option(help="condition numbers of random coordinates")] = "10",
    draws: Annotated[int, typer.Option(min=1, help="random coordinates for each condition")] = 3,
    plot: Annotated[Path | None, typer.Option(help="the picture (default: audit.png)")] = None,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Rewrite adapters with random Q: which methods' results change, and which are the true mean?"""
    from fedlora.analysis.audit import MOST
    from fedlora.analysis.audit import audit as audit_method
    from fedlora.cli.typed import parse_methods

    if plot is not None or from_run is None:
        check_picture(plot or Path("audit.png"))
    uploads = _uploads(adapters or [], from_run, weights, max_bytes)
    grid = numbers(conditions, "--conditions", least=1.0, most=MOST)
    chosen = {label: s.build() for label, s in parse_methods(methods).items()}
    found = [
        audit_method(label, method, uploads, conditions=grid, draws=draws)
        for label, method in tracked(chosen.items(), "auditing")
    ]
    if json:
        print_json(plain({audit.method: asdict(audit) for audit in found}))
    else:
        _show(found, uploads, grid)
    target = plot or (from_run / "plots" / "audit.png" if from_run else Path("audit.png"))
    plotted(lambda plots: [plots.plot_audit(found, target)])


def _uploads(
    adapters: Sequence[Path], from_run: Path | None, weights: str | None, max_bytes: int | None
) -> list[Upload]:
    from fedlora.adapters.uploads import read_uploads
    from fedlora.core.messages import Upload

    if bool(adapters) == (from_run is not None):
        raise ConfigError("give either adapter directories or --from-run RUN.")
    if from_run is not None:
        run = RunFolder(from_run)
        round, adapters = run.newest_uploads()
        if not adapters:
            raise ConfigError(
                f"{from_run} holds no uploads; name the folder of one run, made with --set run.keep_uploads=last to "
                f"store those of the last round."
            )
        if run.exists():
            tell_attack(run.read_json("manifest.json"))
            notes.warn(
                f"uploads of round {round} of {run.path}, which has played {counted(len(run.metrics()), 'round')}"
            )
    uploads = read_uploads(adapters, max_bytes=max_bytes)
    if weights is None:
        return uploads
    given = numbers(weights, "--weights", least=0.0)
    if not any(given):
        raise ConfigError("--weights are all zero: there is no mean.")
    if len(given) != len(uploads):
        raise ConfigError(f"--weights has {len(given)} numbers for {len(uploads)} adapters.")
    return [Upload(u.client, w, u.adapter) for u, w in zip(uploads, given, strict=True)]


def _show(found: Sequence[Audit], uploads: Sequence[Upload], conditions: Sequence[float]) -> None:
    at = 10.0 if 10.0 in conditions else conditions[-1]
    ranks = sorted({r for u in uploads for r in u.adapter.ranks.values()})
    modules = len({name for u in uploads for name in u.adapter.modules})
    table = Table(title=f"{len(uploads)} adapters, {modules} modules, ranks {', '.join(map(str, ranks))}")
    notes_below = []
    table.add_column("method", no_wrap=True)
    for title in ("off the true mean by", f"moves in other coordinates\n(condition {at:g})", "what clients get\nmoves"):
        table.add_column(title, justify="right")
    table.add_column("")
    for audit in found:
        if audit.refused is not None:
            notes_below.append(f"{audit.method} not run: {audit.refused}")
            continue
        error = "" if audit.error is None else _size(audit.error)
        model = "one factor travels" if audit.drift is None else _size(audit.drift[at])
        readouts = "" if audit.readout_drift is None else _size(audit.readout_drift[at])
        table.add_row(cell(audit.method), error, model, readouts, _consensus(audit))
    console.print(table)
    for line in notes_below:
        console.print(line, style="yellow")
    console.print(
        "relative, in the Frobenius norm over all modules; a result that moves depends on arbitrary coordinates"
    )


def _size(x: float) -> str | Text:
    return f"{x:.1e}" if x < 1e-3 else red(f"{x:.1%}")


def _consensus(audit: Audit) -> str:
    """GLoRA's cut in words: mean budget and mean union rank over modules, the least gap, and the number of ties."""
    cuts: list[Any] = [facts for facts in audit.modules.values() if "union_rank" in facts]
    if not cuts:
        return ""
    budget = sum(c["server_rank"] for c in cuts) / len(cuts)
    counted = [c["union_rank"] for c in cuts if c["union_rank"] is not None]
    union = f"union rank {sum(counted) / len(counted):.3g}, " if counted else ""
    gap, tied = min(c["gap"] for c in cuts), sum(bool(c["tied"]) for c in cuts)
    cut = "nothing cut" if math.isinf(gap) else f"least gap {gap:.1e}, {tied} of {len(cuts)} cuts tied"
    return f"R {budget:.3g}, {union}{cut}"
