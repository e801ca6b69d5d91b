"""Show a ledger on the command line, and write a budget or an earlier training into it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fedlora.cli.screen import Table, cell, console, print_json
from fedlora.errors import ConfigError
from fedlora.privacy.accounting import Spending, epsilon_up
from fedlora.privacy.events import Budget, recompute
from fedlora.privacy.ledger import Ledger


def write_line(
    file: Path,
    population: str | None,
    budget: tuple[float, float | None] | None,
    earlier: tuple[float | None, int | None, float],
) -> None:
    """Write one line: a budget (epsilon, delta), or without one an earlier training (z, T, q)."""
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
        return
    z, rounds, sampling = earlier
    if z is None or rounds is None:
        raise ConfigError(
            "--charge needs --noise-multiplier and --rounds (and --sampling, if clients were drawn secretly): the "
            "noise that the training added to each sum, in units of one client's largest change, and how many sums it "
            "released. A training without noise has no finite epsilon: do not start from its result."
        )
    ledger.charge_earlier(Spending(z, rounds, sampling))


def show_ledger(file: Path, delta: float | None, as_json: bool) -> None:
    """Print epsilon, recomputed from the file alone."""
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
