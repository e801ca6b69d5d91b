"""One self-contained HTML page of all experiments: what is decided, how, and every number with its command.

No script, no outside request: pictures and style are inside the page, whose template is page.html. Its numbers are
those of `decisions` and `tables`; nothing here is computed but for the pictures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError, counted
from fedlora.experiments.claims import Claims, setup_axis
from fedlora.experiments.decision_words import (
    MARKS,
    OUT,
    UNITS,
    by_score,
    claim_rows,
    headings,
    margins,
    mark,
    remarks,
    rows,
    sentence,
    tally,
    title,
    verdict_in_words,
)
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.digits import by_spread, rounded, shown, written
from fedlora.experiments.footnotes import notes, used
from fedlora.experiments.plan import mains, worst_values
from fedlora.experiments.result import Result
from fedlora.experiments.scores import capital, explained, parse_number, scale
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import (
    SIMULATIONS,
    Budget,
    CellScore,
    Difference,
    budget_rows,
    measured_by,
    paired,
    price_rows,
    prices,
    score_categories,
    score_cells,
    smaller_is_better,
    spendings,
    without_number,
)
from fedlora.given_files import read_toml
from fedlora.runs.attack_words import attacks_of


def write_report(
    path: Path,
    experiments: Sequence[Experiment],
    profile: str,
    results: Mapping[str, Result],
    paper: Path,
    failed: Mapping[str, str] | None = None,
    decided: tuple[Claims, Sequence[Answers]] | None = None,
    awaited: Collection[str] = (),
    past: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """The page, of those experiments that have the profile and any result; with "mini" go all profiles but "paper".

    failed: digest -> why, of runs of a search that failed. decided: the claims, and every family that has a plan; an
    experiment whose families still wait for seeds is not shown, for that would be a look before its time; nor are
    pilots, and seeds beyond a plan. awaited: digests of runs that an open plan waits for; what has one of them is not
    shown either. past: experiment -> how its verdicts came about, as its plan tells it.

    Raises:
        ConfigError: jinja2 or matplotlib is missing, or there is no result at all.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the report needs jinja2 and matplotlib: pip install 'fedlora[plot]'.") from error
    from fedlora.experiments.pictures import style_sheet

    printed, failed = _paper_numbers(paper), failed or {}
    claims, families = decided or (None, [])
    sections: list[dict[str, Any]] = []
    shown_runs: dict[str, Result] = {}
    for cut, name in _shown(experiments, profile, claims, families):
        found = {r.digest: results[r.digest] for r in mains(cut, name, results, failed) if r.digest in results}
        if found and found.keys().isdisjoint(awaited):
            shown_runs |= found
            sections.append(section(cut, name, results, printed, failed))
    if not sections and not families:
        late = ", but for runs that an open plan waits for" if awaited else ""
        raise ConfigError(f"no experiment has a result of profile {profile}{late}; run some first.")
    folder = Path(__file__).parent
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True)
    by_name = {e.name: e for e in experiments}
    html = pages.get_template("page.html").render(
        colours=style_sheet(),
        style=folder.joinpath("style.css").read_text(encoding="utf-8"),
        decided=None if claims is None else decided_part(claims, families, by_name, results, failed, past or {}),
        sections=sections,
        has_paper=any(one["has_paper"] for one in sections),
        runs=len(shown_runs),
        commits=sorted({commit for r in shown_runs.values() for commit in r.commits(12)}),
        machines=sorted({(part.machine or r.machine).words for r in shown_runs.values() for part in r.made}),
    )
    files.write(path, html)


def _shown(
    experiments: Sequence[Experiment], profile: str, claims: Claims | None, families: Sequence[Answers]
) -> Iterator[tuple[Experiment, str]]:
    """Each experiment, with the seeds of its plan where it has one, and its profiles that are shown."""
    waiting = {one.family.experiment for one in families if not one.complete}
    wanted = {(one.family.experiment, one.family.profile): one.wanted for one in families}
    for experiment in experiments:
        pilots = set() if claims is None else claims.pilots(experiment.name)
        for name in experiment.profiles if experiment.name not in waiting else ():
            if name not in pilots and (name == profile or (profile == "mini" and name != "paper")):
                seeds = wanted.get((experiment.name, name))
                yield (experiment if seeds is None else experiment.of_first_seeds(name, seeds)), name


def _paper_numbers(path: Path) -> Mapping[str, Any]:
    """Table -> column -> row -> what the paper prints; empty where the file is missing."""
    if not path.is_file():
        return {}
    return read_toml(path, "the paper's numbers")


# ---- an experiment ---------------------------------------------------------------------------------------------------


def section(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    printed: Mapping[str, Any],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """What page.html shows. printed: the paper's numbers. What was never run has no row and no column."""
    every = score_cells(experiment, profile, results, failed=failed)
    cells = [cell for cell in every if cell.scores or cell.none]
    columns_of = _columns(experiment)
    numbers = printed.get(experiment.paper or "", {})
    labels, columns = _labels(cells, experiment.rows), _labels(cells, columns_of)
    gone = [x for x in [*_labels(every, experiment.rows), *_labels(every, columns_of)] if x not in [*labels, *columns]]
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
        "attacks": attacks_of([results[r.digest].settings.model_dump() for r in runs if r.digest in results]),
        "row_name": ", ".join(experiment.rows),
        "columns": columns,
        "has_paper": bool(numbers),
        "rows": [
            {"label": row, "cells": [_cell(by_place.get((row, c)), numbers.get(c, {}).get(row)) for c in columns]}
            for row in labels
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
    at = found[0].chance(metric)
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


def _budget_pictures(experiment: Experiment, private: Sequence[Budget]) -> dict[str, Any]:
    from markupsafe import Markup

    from fedlora.experiments.pictures import budget_figures, drawn, inline

    with drawn(9):
        figures, legend = budget_figures(private, experiment.budgets.lines if experiment.budgets else "")
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


# ---- what is decided -------------------------------------------------------------------------------------------------

_ONE_LOOK = "Nothing is shown before all of them are there: a look in between would spend the error rate."


def decided_part(
    claims: Claims,
    found: Sequence[Answers],
    experiments: Mapping[str, Experiment],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
    past: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What page.html shows. found: every family that has a plan. past: experiment -> how its verdicts came
    about, as its plan tells it."""
    asked = dict.fromkeys(family.experiment for family in claims.families.values())
    parts = []
    for name in asked:
        if name in experiments:
            mine = [one for one in found if one.family.experiment == name]
            part = _decided_experiment(claims, experiments[name], mine, results, failed)
            parts.append(part | {"remarks": [*part["remarks"], *past.get(name, [])]})
    return {"alpha": claims.alpha, "claims": claim_rows(claims, found), "experiments": parts}


def _decided_experiment(
    claims: Claims, experiment: Experiment, found: Sequence[Answers], results: Mapping[str, Result],
    failed: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    name, complete = experiment.name, [one for one in found if one.complete]
    part: dict[str, Any] = {
        "name": name, "title": experiment.title, "families": [_decided_family(one) for one in found],
        "decide": f"fedlora experiment decide {name} --format json", "plot": f"fedlora experiment plot {name}",
        "remarks": remarks(found), "tally": _tally_words(complete),
        "glossary": _glossary(experiment) if complete else [],
        "tables": [{"caption": title(one), "columns": headings(one.family), "rows": rows(one)} for one in complete],
        "maps": [], "panels": [], "mechanism": [], "state": "",
        "no_mechanism": "No run of it measured what its server did to the updates.",
    }  # fmt: skip
    if not found:
        part["state"] = (
            f"Not asked yet: {name} has no plan. Its first step: fedlora experiment run {name} --profile pilot"
        )
    waiting = [one for one in found if not one.complete]
    if waiting or not found:
        part["no_picture"] = part["no_mechanism"] = part["state"] or _waiting(waiting)
    if complete:
        part["maps"] = _maps(name, complete)
    if found and not waiting:
        profile = found[0].family.profile
        part["numbers"] = f"fedlora experiment table {name} --profile {profile} --format json"
        cut = experiment.of_first_seeds(profile, found[0].wanted)
        part |= set_up_pictures(cut, profile, results, failed, margins=margins(found))
        part["mechanism"] = _mechanism_tables(cut, profile, results, failed)
    return part


def _waiting(found: Sequence[Answers]) -> str:
    there = ", ".join(f"{one.there} of {one.wanted}" for one in {one.there: one for one in found}.values())
    return f"{there} planned seeds are there. {_ONE_LOOK}"


def _decided_family(found: Answers) -> dict[str, Any]:
    lines = [
        {"mark": mark(a), "kind": kind(a), "setup": a.question.setup, "words": sentence(found, a)}
        for a in found.answers
    ]
    return {"question": found.family.question, "lines": lines, "state": "" if lines else _waiting([found])}


def kind(answer: Answer) -> str:
    """Its class in the style sheet."""
    return answer.verdict or ("out" if answer.why.startswith(OUT) else "none")


def _tally_words(found: Sequence[Answers]) -> str:
    counts = tally(found)
    total = sum(counts.values())
    told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{total} {'question' if total == 1 else 'questions'}: {told}." if total else ""


def _glossary(experiment: Experiment) -> list[list[str]]:
    """What labels stand for: the settings in the experiment's file."""
    axes = [setup_axis(experiment), experiment.rows[0]]
    return [
        [label, ", ".join(f"{key} = {value}" for key, value in settings.items()) or "the base configuration"]
        for axis in axes
        for label, settings in experiment.axes[axis].items()
    ]


def _maps(name: str, found: Sequence[Answers]) -> list[object]:
    """A heat map for each score that families go by: one scale has one unit."""
    from markupsafe import Markup

    from fedlora.experiments.pictures import inline, map_figure

    made: list[object] = []
    for score, of in by_score(found).items():
        told = "; ".join(f"{a.question.words}: {_short_answer(one, a)}" for one in of for a in one.answers)
        made.append(
            Markup(inline(map_figure(of), f"map-{name}-{score}", f"Heat map of {name}, {UNITS[score][0]}. {told}."))
        )
    return made


def _short_answer(found: Answers, a: Answer) -> str:
    _, factor, digits = UNITS[found.family.metric]
    return a.why if a.test is None else f"{factor * a.test.mean:+.{digits}f}, {verdict_in_words(a)}"


def set_up_pictures(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    failed: Mapping[str, str],
    margins: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A picture a set-up: curves over rounds, with the reference's paired bands; of merged runs, which have one round,
    dots with intervals. margins: score -> what is too small to matter, of an experiment that is decided."""
    from markupsafe import Markup

    from fedlora.experiments.pictures import (
        curve_figure,
        curve_panels,
        dots,
        dots_figure,
        drawn,
        inline,
        legend_of,
        reach,
    )

    name = f"{experiment.name}-{profile}"
    against = experiment.reference if margins else None
    with drawn(9):
        if experiment.merged:
            panels = dots(experiment, profile, results, failed, margins)
            end = reach(panels) if panels else 0.0
            made = [
                Markup(inline(dots_figure(panel, end), f"dots-{name}-{k}", panel.words))
                for k, panel in enumerate(panels)
            ]
            margin = panels[0].margin if panels else 0.0
            strip = f" The grey strip is the margin of {margin:g}: what is too small to matter." if margin else ""
            unit = f" ({scale(panels[0].metric)})" if panels else ""
            words = (
                f"A dot is the mean difference to {experiment.reference}{unit}, paired by seed, with its 95 % "
                f"interval; right is better, hollow: zero is inside. Each interval is of one comparison.{strip}"
            )
            return {"panels": made, "legend": [], "panel_words": words}
        curves = curve_panels(experiment, profile, results, failed)
        labels, legend = legend_of(curves)
        made = [
            Markup(inline(curve_figure(panel, labels, against), f"curves-{name}-{k}", panel.words))
            for k, panel in enumerate(curves)
        ]
        shaded = f"the 95 % interval of the gap to {against}, paired by seed" if against else "± its standard error"
        words = f"Validation by round, mean over seeds; each panel has its own scale. Shaded, of few lines: {shaded}."
        return {"panels": made, "legend": legend, "panel_words": words}


_MECHANISM = {
    "server, error": "How far the merged update is from the exact mean of the sites' updates, relative to that mean "
    "(0: it is the mean; 1: as far as no update at all).",
    "server, gauge drift": "How far the merged update moves when sites write the same updates in other coordinates, of "
    "condition 10 (0: not at all).",
    "server, error of factor averages": "How far averages of factors are from the exact mean, in the last round: for "
    "factor averages what they did, for the others what they would have done to the same uploads.",
}


def _mechanism_tables(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A table a number, a row a label, a column a set-up; of labels that have the number."""
    axis, rows_axis = setup_axis(experiment), experiment.rows[0]
    numbers = ["server, error" if experiment.merged else "server, error of factor averages", "server, gauge drift"]
    tables = []
    for which in numbers:
        cells = [c for c in score_cells(experiment, profile, results, which, failed) if c.scores]
        setups = list(dict.fromkeys(c.cell[axis] for c in cells))
        shown = {(c.cell[rows_axis], c.cell[axis]): c.words(by_spread) for c in cells}
        labels = list(dict.fromkeys(c.cell[rows_axis] for c in cells))
        if labels:
            tables.append(
                {
                    "words": _MECHANISM[which], "columns": [rows_axis, *setups],
                    "rows": [[label, *(shown.get((label, setup), "") for setup in setups)] for label in labels],
                    "command": f'fedlora experiment table {experiment.name} --profile {profile} --metric "{which}"',
                }
            )  # fmt: skip
    return tables
