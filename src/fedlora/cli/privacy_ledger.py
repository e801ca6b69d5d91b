"""Show a ledger on the command line, and write people's decisions into it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlora.cli.screen import Table, cell, console, print_json
from fedlora.errors import ConfigError
from fedlora.privacy.accounting import epsilon_up
from fedlora.privacy.ledger import Budget, Earlier, Ledger, Recomputed, budget_facts, recompute
from fedlora.runs.private_run import of_people


def decide(
    file: Path,
    because: str | None,
    population: str | None,
    budget: tuple[float, float | None] | None,
    charged: tuple[float | None, int | None, float] | None,
) -> None:
    """Write one line: a budget (epsilon, delta), an earlier training (z, T, q), or, without both, a moved file."""
    if because is None:
        raise ConfigError("--because 'why' is missing: it stays in the ledger, and whoever gets a model can read it.")
    if not file.is_file() and (population is None or (budget is None and charged is None)):
        raise ConfigError(
            f"{file} does not exist. To begin a ledger with this line, name its clients: --population 'the 200 clinics "
            f"of 2026', as privacy.population of the runs will."
        )
    whose = recompute(file).population if file.is_file() and file.stat().st_size else population
    if whose is None or (population is not None and population != whose):
        raise ConfigError(f"{file} belongs to the population {whose!r}, not {population!r}: leave --population out.")
    ledger = Ledger(file, whose)
    if budget is not None:
        delta = budget[1]
        if delta is None:
            before = ledger.budget()
            if before is None:
                raise ConfigError("--delta is missing: a budget is an epsilon at a delta, far below 1 / clients.")
            delta = before.delta
        ledger.set_budget(Budget(budget[0], delta), because)
    elif charged is not None:
        z, rounds, sampling = charged
        if z is None or rounds is None:
            raise ConfigError(
                "--charge needs --noise-multiplier and --rounds (and --sampling, if clients were drawn secretly): "
                "the noise that the training added to each sum, in units of one client's largest change, and how "
                "many sums it released. A training without noise has no finite epsilon: do not start from its result."
            )
        ledger.charge_earlier(Earlier(because, z, rounds, sampling))
    else:
        ledger.adopt(because)


def _people(found: Recomputed) -> dict[str, Any]:
    """The decisions, in the form of `Ledger.describe`."""
    return {
        "earlier": [asdict(earlier) for earlier in found.earlier],
        "budgets": [budget_facts(budget) for budget in found.budgets],
        "moved": list(found.moves),
    }


def show_ledger(file: Path, delta: float | None, as_json: bool) -> None:
    """Print epsilon, recomputed from the file alone."""
    found = recompute(file, delta)
    number, digest = found.tip
    if as_json:
        print_json({
            "population": found.population, "delta": found.delta, "epsilon": found.epsilon, "planned": found.planned,
            "events": len(found.events), **_people(found), "has_tip": found.has_tip,
            "tip": {"number": number, "digest": digest},
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
    for what in of_people(_people(found)):
        console.print(f"decided: {what}")
    now = found.budgets[-1].budget if found.budgets else None
    as_far = (
        "" if found.has_tip else f" as far as it goes (no {file.name}.tip beside it shows whether lines were cut off)"
    )
    limit = f"budget: epsilon {now.epsilon:g} at delta {now.delta:g}. " if now else ""
    console.print(
        f"{limit}population {found.population}: epsilon {epsilon_up(found.epsilon)} at delta {found.delta:g} in "
        f"{len(found.events)} releases; {epsilon_up(found.planned)} when all planned rounds are played. The chain is "
        f"whole{as_far}; its newest line is {number}, {digest}: whoever keeps that can detect later whether lines "
        f"were removed."
    )
