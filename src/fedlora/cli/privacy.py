"""`fedlora privacy`: the plan of a private run before it begins, and epsilon recomputed from a ledger."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedlora.cli.runs import AsJson, DataRoot, Sets
from fedlora.cli.screen import cell, console, notes, print_json
from fedlora.errors import ConfigError
from fedlora.privacy.accounting import epsilon_up
from fedlora.privacy.ledger import recompute
from fedlora.runs.config import load_config
from fedlora.runs.preparation import prepare
from fedlora.runs.private_plan import PrivacyPlan, plan
from fedlora.runs.private_run import check_affordable
from fedlora.runs.quiet import quiet_libraries

SECONDS_AN_ENTRY = 13e-6  # of exact noise, on one core (privacy.mechanism)


def privacy(
    file: Annotated[Path, typer.Argument(help="a ledger; with --plan, a run's TOML file", show_default=False)],
    planned: Annotated[bool, typer.Option("--plan", help="what a run of this config would cost, and leave")] = False,
    set: Sets = None,
    delta: Annotated[float | None, typer.Option(help="of a ledger: at this delta (default: its smallest)")] = None,
    data_root: DataRoot = None,
    json: AsJson = False,
) -> None:
    """What a private run will cost and what is left of its signal, or what a ledger has spent."""
    if planned:
        if delta is not None:
            raise ConfigError("--delta is of a ledger; a plan's delta is privacy.delta (--set privacy.delta=...).")
        _plan(file, set or [], data_root, json)
        return
    if set or data_root:
        raise ConfigError("--set and --data-root belong to a config file: add --plan, or leave them out.")
    _ledger(file, delta, json)


def _plan(file: Path, overrides: list[str], data_root: Path | None, as_json: bool) -> None:
    config = load_config(file, overrides)
    if config.privacy is None:
        raise ConfigError(f"{file} has no table [privacy], so there is nothing to plan.")
    quiet_libraries()
    with notes.status("reading the model"):
        prepared = prepare(config, data_root)
        found = plan(prepared)
    if as_json:
        print_json({**asdict(found), "parts": {name: asdict(part) for name, part in found.parts.items()}})
    else:
        _show_plan(found)
    check_affordable(prepared)  # exit code 2 and one line, where the run would be refused
    if weak := [name for name, part in found.parts.items() if part.signal <= part.lost]:
        notes.print(
            f"in {len(weak)} of {len(found.parts)} parts a change that all clients agree on, with the clip spread "
            f"evenly, drowns in the noise even after all rounds: expect little more than noise there.",
            style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip


def _show_plan(found: PrivacyPlan) -> None:
    who = "all" if found.sampling == 1.0 else f"each with chance {found.sampling:g}"
    console.print(
        f"epsilon {epsilon_up(found.epsilon)} at delta {found.delta:g} for {found.rounds} rounds: noise multiplier "
        f"{found.noise_multiplier:.3f}, clip {found.clip:g}, {found.clients} clients ({who}), {found.size} numbers a "
        f"round (about {found.size * SECONDS_AN_ENTRY:.0f} s to draw their noise), server rank {found.rank}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table("part", "summed as", "signal", "noise", "strongest", "drowns below", title="A round's mean change")
    for name, part in found.parts.items():
        table.add_row(
            cell(name), f"{part.rows} x {part.columns}", f"{part.signal:.3g}", f"{part.noise:.3g}",
            f"{part.strongest:.3g}", f"{part.lost:.3g}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "signal: where all clients agree and the clip is spread evenly over the parts; no data were looked at. noise: "
        "its norm; strongest: its strongest direction. drowns below: what no number of clients who agree can show in "
        "these rounds.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _ledger(file: Path, delta: float | None, as_json: bool) -> None:
    found = recompute(file, delta)
    number, digest = found.tip
    if as_json:
        print_json({
            "population": found.population, "delta": found.delta, "epsilon": found.epsilon, "planned": found.planned,
            "events": len(found.events), "tip": {"number": number, "digest": digest},
        })  # fmt: skip
        return
    table = Table("run", "rounds", "of", "noise multiplier", "sampling", "clip", title="Releases")
    for run in dict.fromkeys(charged.event.run for charged in found.events):
        of = [charged.event for charged in found.events if charged.event.run == run]
        table.add_row(
            cell(run), str(len(of)), str(of[-1].rounds), f"{of[-1].noise_multiplier:.4g}", f"{of[-1].sampling:g}",
            f"{of[-1].clip:g}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"population {found.population}: epsilon {epsilon_up(found.epsilon)} at delta {found.delta:g} in "
        f"{len(found.events)} releases; {epsilon_up(found.planned)} when all planned rounds are played. The chain is "
        f"whole; its newest line is {number}, {digest}: whoever keeps that can tell later whether lines were taken "
        f"away.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
