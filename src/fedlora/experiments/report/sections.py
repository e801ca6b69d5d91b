"""One experiment as a section of the page: scores beside the paper's, differences with marks, prices, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.errors import counted
from fedlora.experiments.footnotes import notes, used
from fedlora.experiments.plan import mains, worst_values
from fedlora.experiments.spec import Experiment
from fedlora.experiments.report import set_up_pictures
from fedlora.experiments.digits import by_spread, rounded, shown, written
from fedlora.experiments.scores import parse_number
from fedlora.experiments.scores import capital, explained
from fedlora.experiments.result import Result
from fedlora.experiments.tables import SIMULATIONS, budget_rows, spendings
from fedlora.experiments.tables import (
    CellScore,
    Difference,
    measured_by,
    paired,
    score_categories,
    score_cells,
    smaller_is_better,
    without_number,
)
from fedlora.experiments.result import chance
from fedlora.experiments.decision_words import MARKS
from fedlora.experiments.tables import price_rows, prices
from fedlora.runs.attack_words import attacks_of


def section(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    printed: Mapping[str, Any],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """What page/experiment.html shows. printed: the paper's numbers. What was never run has no row and no column."""
    every = score_cells(experiment, profile, results, failed=failed)
    cells = [cell for cell in every if cell.scores or cell.none]
    columns_of = _columns(experiment)
    numbers = printed.get(experiment.paper or "", {})
    rows, columns = _labels(cells, experiment.rows), _labels(cells, columns_of)
    gone = [x for x in [*_labels(every, experiment.rows), *_labels(every, columns_of)] if x not in [*rows, *columns]]
    by_place = {(_label(c, experiment.rows), _label(c, columns_of)): c for c in cells}
    differences = paired(cells, experiment.rows[0], experiment.reference) if experiment.reference else []
    runs = mains(experiment, profile, results, failed)
    found = [result for run in runs if (result := run.result(results)) is not None]
    which, metric = experiment.profile(profile).metric or experiment.metric, measured_by(cells)
    less = metric is not None and smaller_is_better(which, metric)
    apart = "" if profile in ("mini", "paper") else f" ({profile})"
    differences_shown = [_difference(d, less) for d in differences]
    private = spendings(experiment, profile, results, failed)
    return {
        "name": f"{experiment.name}{apart}".replace(" ", "-"),
        "title": f"{experiment.title}{apart}",
        "short": _short(len({run.digest for run in runs if run.digest in results}), differences_shown),
        "question": experiment.question,
        "note": experiment.profile(profile).note,
        "metric": capital(explained(which, metric)),
        "chance": _chance(which, metric, found),
        "not_run": ", ".join(gone),
        "command": f"fedlora experiment table {experiment.name} --profile {profile} --format json",
        "plot": f"fedlora experiment plot {experiment.name} --profile {profile}",
        "more": [
            *_prices(experiment, profile, results, failed),
            *_budgets(experiment, profile, results, failed),
            *_categories(experiment, profile, results, failed),
        ],
        "simulated": [SIMULATIONS] if private else [],
        "worst": [
            *without_number(every),
            *notes(experiment, profile, which, used(experiment, profile, results, failed)),
            *worst_values(experiment, profile, results, failed),
        ],
        "attacks": attacks_of([results[r.digest].raw["config"] for r in runs if r.digest in results]),
        "row_name": ", ".join(experiment.rows),
        "columns": columns,
        "has_paper": bool(numbers),
        "rows": [
            {"label": row, "cells": [_cell(by_place.get((row, c)), numbers.get(c, {}).get(row)) for c in columns]}
            for row in rows
        ],
        "reference": experiment.reference,
        "way": "; less is better" if less else "",
        "differences": differences_shown,
        "digest_count": len(runs),
        "config": "\n".join([*(f"{r.digest}  {r.label}" for r in runs), "", *(r.config.canonical() for r in runs[:1])]),
        **(_budget_pictures(experiment, private) if private else set_up_pictures(experiment, profile, results, failed)),
    }


def _short(runs: int, differences: Sequence[Mapping[str, Any]]) -> str:
    counts = {word: sum(d["verdict"] == word for d in differences) for word in ("ahead", "behind", "undecided")}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return counted(runs, "run") + (f"; {told}" if told else "")


def _difference(d: Difference, less: bool) -> dict[str, Any]:
    """In words, with two digits of the interval's half, and a sign for who runs over it."""
    if d.interval is None:
        mean, interval = written(d.mean, abs(d.mean), sign=True), "none"
        verdict, kind = d.verdict, "none"
    else:
        half = (d.high - d.low) / 2
        mean, low, high = (rounded(x, half, sign=True) for x in (d.mean, d.low, d.high))
        interval = f"{low} to {high}"
        ahead = (d.mean < 0) == less
        verdict = ("ahead" if ahead else "behind") if d.decided else "undecided"
        kind = {"ahead": "better", "behind": "worse"}.get(verdict, "undecided")
    return {
        "other": d.other, "where": ", ".join(d.where.values()), "mean": mean, "interval": interval, "pairs": d.pairs,
        "verdict": verdict, "kind": kind, "mark": MARKS.get(kind, "="),
    }  # fmt: skip


def _chance(which: str, metric: str | None, found: Sequence[Result]) -> str:
    """What guessing scores, where the number is a score and not of its changes."""
    number = parse_number(which)
    if metric is None or not found or number.changes or number.where in ("rounds", "server"):
        return ""
    at = chance(found[0], metric)
    return "" if at is None else f"; chance is {at:.3f}"


def _prices(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What each row costs in peace and saves elsewhere, a table a score; none for other experiments."""
    found, tables = prices(experiment, profile, results, failed=failed), []
    for score in dict.fromkeys(price.score for price in found):
        columns, rows = price_rows(found, score)
        words = (
            f"Held-out {score}; in brackets what a {experiment.rows[0]} costs or saves against {experiment.reference}"
        )
        tables.append({"caption": f"{words}, with 95 % intervals over seeds", "columns": columns, "rows": rows})
    return tables


def _budgets(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What each cell spent; none for other experiments."""
    if experiment.budgets is None:
        return []
    columns, rows = budget_rows(spendings(experiment, profile, results, failed), experiment.budgets.lines)
    return [{"caption": "What each cell spent, and its held-out scores", "columns": columns, "rows": rows}]


def _budget_pictures(experiment: Experiment, private: Sequence[Any]) -> dict[str, Any]:
    from markupsafe import Markup

    from fedlora.experiments.pictures import budget_figures
    from fedlora.experiments.pictures import drawn, inline

    lines = experiment.budgets.lines if experiment.budgets else ""
    with drawn(9):
        figures, legend = budget_figures(private, lines)
        made = [
            Markup(inline(figure, f"budgets-{experiment.name}-{score}", f"{experiment.title}: {score} by epsilon"))
            for score, figure in figures.items()
        ]
    words = "Shaded: from the least to the largest seed. Dashed: without privacy. Hollow: next to no noise."
    return {"panels": made, "legend": legend, "panel_words": words}


def _categories(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Scores by category, seen and unseen, where the data come in tasks."""
    tables = []
    for which, words in (
        ("test, last", "tasks that clients train on"),
        ("unseen, last", "tasks that nobody trains on"),
    ):
        found = score_categories(experiment, profile, results, which, failed)
        categories = sorted({category for by in found.values() for category in by})
        if categories:
            rows = [[c, *(f"{by[c]:.3f}" if c in by else "" for by in found.values())] for c in categories]
            tables.append({"caption": f"By category: {words}", "columns": ["category", *found], "rows": rows})
    return tables


def _columns(experiment: Experiment) -> list[str]:
    return experiment.columns or [axis for axis in experiment.axes if axis not in experiment.rows]


def _label(cell: CellScore, axes: Sequence[str]) -> str:
    return ", ".join(cell.cell[axis] for axis in axes) or "all"


def _labels(cells: Sequence[CellScore], axes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_label(cell, axes) for cell in cells))


def _cell(cell: CellScore | None, paper: object) -> dict[str, Any]:
    bare = {"paper": "" if paper is None else str(paper), "mean": None, "seeds": 0, "planned": 0}
    if cell is None:
        return bare
    return bare | {
        "mean": cell.words(by_spread),
        "seeds": len(cell.scores),
        "planned": cell.planned,
        "tuned": "" if cell.tuned is None else f", tuned {shown(cell.tuned)}",
    }
