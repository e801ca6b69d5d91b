"""The part of the page that says what is decided: answers in words, map, curves, decision table, mechanism, claims.

Its numbers are those of `decisions`, `decision_words` and `tables`. Nothing here is computed but for the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedlora.experiments.claims import Claims, setup_axis
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.spec import Experiment
from fedlora.experiments.digits import by_spread
from fedlora.experiments.scores import scale
from fedlora.experiments.result import Result
from fedlora.experiments.tables import score_cells
from fedlora.experiments.decision_words import (
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

_ONE_LOOK = "Nothing is shown before all of them are there: a look in between would spend the error rate."


def decided_part(
    claims: Claims,
    found: Sequence[Answers],
    experiments: Mapping[str, Experiment],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
    past: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What page/decided.html shows. found: every family that has a plan. past: experiment -> how its verdicts came
    about, as `looks.history` tells it."""
    asked = dict.fromkeys(family.experiment for family in claims.families.values())
    parts = []
    for name in asked:
        if name in experiments:
            mine = [one for one in found if one.family.experiment == name]
            part = _experiment(claims, experiments[name], mine, results, failed)
            parts.append(part | {"remarks": [*part["remarks"], *past.get(name, [])]})
    return {"alpha": claims.alpha, "claims": claim_rows(claims, found), "experiments": parts}


def _experiment(
    claims: Claims, experiment: Experiment, found: Sequence[Answers], results: Mapping[str, Result],
    failed: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    name, complete = experiment.name, [one for one in found if one.complete]
    part: dict[str, Any] = {
        "name": name, "title": experiment.title, "families": [_family(one) for one in found],
        "decide": f"fedlora experiment decide {name} --format json", "plot": f"fedlora experiment plot {name}",
        "remarks": remarks(found), "tally": _tally(complete), "glossary": _glossary(experiment) if complete else [],
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
        part["mechanism"] = _mechanism(cut, profile, results, failed)
    return part


def _waiting(found: Sequence[Answers]) -> str:
    there = ", ".join(f"{one.there} of {one.wanted}" for one in {one.there: one for one in found}.values())
    return f"{there} planned seeds are there. {_ONE_LOOK}"


def _family(found: Answers) -> dict[str, Any]:
    lines = [
        {"mark": mark(a), "kind": kind(a), "setup": a.question.setup, "words": sentence(found, a)}
        for a in found.answers
    ]
    return {"question": found.family.question, "lines": lines, "state": "" if lines else _waiting([found])}


def kind(answer: Answer) -> str:
    """Its class in the style sheet."""
    return answer.verdict or ("out" if answer.why.startswith(OUT) else "none")


def _tally(found: Sequence[Answers]) -> str:
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

    from fedlora.experiments.pictures import map_figure
    from fedlora.experiments.pictures import inline

    made: list[object] = []
    for score, of in by_score(found).items():
        told = "; ".join(f"{a.question.words}: {_short(one, a)}" for one in of for a in one.answers)
        made.append(
            Markup(inline(map_figure(of), f"map-{name}-{score}", f"Heat map of {name}, {UNITS[score][0]}. {told}."))
        )
    return made


def _short(found: Answers, a: Answer) -> str:
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

    from fedlora.experiments.pictures import dots, dots_figure, reach
    from fedlora.experiments.pictures import drawn, inline
    from fedlora.experiments.pictures import curve_figure, curve_panels, legend_of

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


def _mechanism(
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
