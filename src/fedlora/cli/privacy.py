"""`fedlora privacy`: plan a private run, recompute epsilon from a ledger, and add a budget or a cost to a ledger."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.cli.options import AsJson, DataRoot, Sets, refuse_idle
from fedlora.cli.screen import Table, cell, console, notes, print_json
from fedlora.doing import doing
from fedlora.errors import ConfigError, counted
from fedlora.runs.quiet import quiet_libraries

if TYPE_CHECKING:
    from fedlora.runs.private_run import PrivacyPlan

SECONDS_AN_ENTRY = 13e-6  # to draw exact noise, on one core (privacy.exact)

_GOES_WITH: dict[str, tuple[str, ...]] = {  # parameter -> the options that use it; "": showing a ledger
    "set": ("--plan",), "data_root": ("--plan",), "delta": ("--budget", ""), "population": ("--budget", "--charge"),
}  # fmt: skip


def privacy(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="a ledger; with --plan, a run's TOML file", show_default=False)],
    planned: Annotated[bool, typer.Option("--plan", help="show a run's cost, and the signal it leaves")] = False,
    set: Sets = None,
    delta: Annotated[float | None, typer.Option(help="delta of a ledger's epsilon (default: its smallest)")] = None,
    budget: Annotated[float | None, typer.Option(help="epsilon that all runs may spend, at --delta")] = None,
    charge: Annotated[
        tuple[float, int, float] | None,
        typer.Option(
            metavar="Z ROUNDS Q", help="charge a training elsewhere: its noise multiplier, releases, sampling"
        ),
    ] = None,
    population: Annotated[str | None, typer.Option(help="begin the ledger of these clients, if there is none")] = None,
    data_root: DataRoot = None,
    json: AsJson = False,
) -> None:
    """Plan a private run (epsilon, and signal against noise), or compute the epsilon spent so far from a ledger.

    --budget and --charge add one permanent line to a ledger. Use one file for all runs on the same clients: a copy
    spends the same budget again, and fedlora cannot tell."""
    given = {"--plan": planned, "--budget": budget is not None, "--charge": charge is not None}
    modes = [mode for mode, there in given.items() if there]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} are {len(modes)} different actions: give one at a time.")
    mode = modes[0] if modes else ""
    idle = {name: where for name, where in _GOES_WITH.items() if mode not in where}
    refuse_idle(context, {name: f"goes with {' or '.join(filter(None, where))}" for name, where in idle.items()})
    if planned:
        _plan(file, set or [], data_root, json)
        return
    if mode:
        _write_line(file, population, None if budget is None else (budget, delta), charge)
    _show_ledger(file, None if mode else delta, json)


def _plan(file: Path, overrides: list[str], data_root: Path | None, as_json: bool) -> None:
    from fedlora.runs.config import load_config
    from fedlora.runs.preparation import prepare
    from fedlora.runs.private_run import check_affordable, plan

    config = load_config(file, overrides)
    quiet_libraries()
    with notes.status("reading the model"), doing("planning", closed=True):
        prepared = prepare(config, data_root)
        found = plan(prepared)
    if as_json:
        print_json({**asdict(found), "parts": {name: asdict(part) for name, part in found.parts.items()}})
    else:
        _show_plan(found)
    check_affordable(prepared)  # prints one line and exits with code 2 if the run would be refused
    if weak := [name for name, part in found.parts.items() if part.signal <= part.lost]:
        notes.warn(
            f"in {len(weak)} of {len(found.parts)} parts even a change that all clients agree on, with the clip "
            f"spread evenly, drowns in the noise after all rounds: expect little more than noise there."
        )


def _show_plan(found: PrivacyPlan) -> None:
    from fedlora.privacy.accounting import epsilon_up, how_strong

    who = "all" if found.sampling == 1.0 else f"each with chance {found.sampling:g}"
    console.print(
        f"epsilon {epsilon_up(found.epsilon)} at delta {found.delta:g} for {counted(found.rounds, 'round')}"
        f"{how_strong(found.epsilon)}: noise multiplier "
        f"{found.noise_multiplier:.3f}, clip {found.clip:g}, {counted(found.clients, 'client')} ({who}), "
        f"{found.size} numbers a round (about {found.size * SECONDS_AN_ENTRY:.0f} s to draw their noise), "
        f"server rank {found.rank}"
    )
    table = Table("part", "summed as", "signal", "noise", "strongest", "drowns below", title="A round's mean change")
    for name, part in found.parts.items():
        table.add_row(
            cell(name), f"{part.rows} x {part.columns}", f"{part.signal:.3g}", f"{part.noise:.3g}",
            f"{part.strongest:.3g}", f"{part.lost:.3g}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "signal: if all clients agree and the clip is spread evenly over the parts; no data were read. noise: "
        "its norm; strongest: its strongest direction. drowns below: smaller signals stay hidden in these rounds, "
        "however many clients agree."
    )


# ---- ledgers -----------------------------------------------------------------------------------------------------


def _write_line(
    file: Path,
    population: str | None,
    budget: tuple[float, float | None] | None,
    earlier: tuple[float, int, float] | None,
) -> None:
    """Write one line: a budget (epsilon, delta), or a training elsewhere (z, T, q)."""
    from fedlora.privacy.accounting import Spending
    from fedlora.privacy.events import Budget, recompute
    from fedlora.privacy.ledger import Ledger

    begun = file.is_file() and file.stat().st_size > 0
    if not begun and population is None:
        raise ConfigError(
            f"{file} does not exist, or is empty. To begin a ledger with this line, name its clients: --population "
            f"'the 200 clinics of 2026', as privacy.population of the runs will."
        )
    ledger = Ledger(file, population or recompute(file).population)
    if budget is not None:
        delta = budget[1]
        if delta is None:
            if not (before := ledger.read().budgets):
                raise ConfigError("--delta is missing: a budget is an epsilon at a delta, far below 1 / clients.")
            delta = before[-1].delta
        ledger.set_budget(Budget(budget[0], delta))
    if earlier is not None:
        ledger.charge_earlier(Spending(*earlier))


def _show_ledger(file: Path, delta: float | None, as_json: bool) -> None:
    """Print epsilon, recomputed from the file alone."""
    from fedlora.privacy.accounting import epsilon_up
    from fedlora.privacy.events import recompute

    found = recompute(file, delta)
    number, digest = found.newest
    if as_json:
        print_json({
            "population": found.population, "delta": found.delta, "epsilon": found.epsilon, "planned": found.planned,
            "events": len(found.events), "earlier": [asdict(one) for one in found.earlier],
            "budgets": [asdict(budget) for budget in found.budgets], "newest": {"number": number, "digest": digest},
        })  # fmt: skip
        return
    table = Table("run", "rounds", "of", "noise multiplier", "sampling", "clip", title="Releases")
    for run in dict.fromkeys(event.run for event in found.events):
        of = [event for event in found.events if event.run == run]
        table.add_row(
            cell(run), str(len(of)), str(of[-1].rounds), f"{of[-1].noise_multiplier:.4g}", f"{of[-1].sampling:g}",
            f"{of[-1].clip:g}",
        )  # fmt: skip
    for one in found.earlier:
        table.add_row(
            "earlier", str(one.rounds), str(one.rounds), f"{one.noise_multiplier:.4g}", f"{one.sampling:g}", ""
        )
    console.print(table)
    budgets = ", then ".join(f"epsilon {budget.epsilon:g} at delta {budget.delta:g}" for budget in found.budgets)
    console.print(
        f"{f'budget: {budgets}. ' if budgets else ''}population {found.population}: epsilon "
        f"{epsilon_up(found.epsilon)} at delta {found.delta:g} in {len(found.events)} releases; "
        f"{epsilon_up(found.planned)} when all planned rounds are played. The chain is whole as far as it goes; its "
        f"newest line is {number}, {digest}: whoever keeps that can detect later whether lines were removed."
    )
