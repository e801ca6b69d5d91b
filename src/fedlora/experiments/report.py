"""One self-contained HTML page about all experiments: the decisions, how they were made, and each number's command.

No script, no outside request: pictures and style are inside the page, from the template page.html. It takes its tables
from Markdown pages (`page_tables`) and from `decisions`, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError, counted
from fedlora.experiments.claims import Claims
from fedlora.experiments.decided import Decided
from fedlora.experiments.decision_words import (
    UNITS,
    by_score,
    claim_rows,
    headings,
    kind,
    margins,
    mark,
    remarks,
    rows,
    sentence,
    tally_in_words,
    title,
    verdict_in_words,
)
from fedlora.experiments.decisions import Answers
from fedlora.experiments.grid import Grid
from fedlora.experiments.lost import lost_lines
from fedlora.experiments.page_tables import table_of, tables_of
from fedlora.experiments.spec import Experiment
from fedlora.experiments.table_forms import html
from fedlora.experiments.table_source import Source, Table

_ONE_LOOK = "Nothing is shown before all of them are there: a look in between would spend the error rate."


@dataclass(frozen=True)
class Verdicts:
    """The page's input about verdicts. experiments: by name, asked or not. found: of those with a plan, by name."""

    claims: Claims
    experiments: Mapping[str, Experiment]
    found: Mapping[str, Decided] = field(default_factory=dict)


def write_report(path: Path, grids: Sequence[Grid], verdicts: Verdicts | None = None) -> None:
    """Write the page, on grids with any result.

    Raises:
        ConfigError: jinja2 or matplotlib is missing, or there is no result at all.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("the report needs jinja2 and matplotlib: pip install 'fedlora[plot]'.") from error
    shown = [grid for grid in grids if grid.used]
    if not shown and not (verdicts and verdicts.found):
        raise ConfigError("no experiment has a result that may be shown; run some first.")
    results = {result.digest: result for grid in shown for _, result in grid.used}.values()
    folder = Path(__file__).parent
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True)
    pages.filters["sheet"] = lambda table, kind="": Markup(html(table, kind))
    text = pages.get_template("page.html").render(
        style=folder.joinpath("style.css").read_text(encoding="utf-8"),
        decided=None if verdicts is None else decided_part(verdicts),
        sections=[section(grid) for grid in shown],
        runs=len(results),
        commits=sorted({commit for result in results for commit in result.commits(12)}),
        machines=sorted({part.machine.words for result in results for part in result.made}),
    )
    files.write(path, text)


def section(grid: Grid) -> dict[str, Any]:
    """An experiment's section for page.html."""
    experiment, of = grid.experiment, f"{grid.experiment.name} --profile {grid.profile}"
    apart = "" if grid.profile in ("mini", "paper") else f" ({grid.profile})"
    made = tables_of(grid)
    return {
        "name": f"{experiment.name}{apart}".replace(" ", "-"),
        "title": f"{experiment.title}{apart}",
        "question": experiment.question,
        "note": experiment.profile(grid.profile).note,
        "runs": counted(len({run.digest for run, _ in grid.used}), "run"),
        "attacks": grid.attacks,
        "tables": made,
        "below": [
            *dict.fromkeys(line for one in made for line in one.below),
            *lost_lines(grid),
        ],
        "command": f"fedlora experiment table {of} --format json",
        "pictures": _pictures(grid),
        "plot": f"fedlora experiment plot {of}",
        "config": "\n".join(
            [*(f"{r.digest}  {r.label}" for r in grid.runs), "", *(r.config.canonical() for r in grid.runs[:1])]
        ),
    }


def _pictures(grid: Grid, margins: Mapping[str, float] | None = None) -> list[object]:
    """What `figures_of` draws. margins: score -> the largest difference that does not matter, if decided."""
    from markupsafe import Markup

    from fedlora.experiments.picture_style import inline
    from fedlora.experiments.pictures import figures_of

    of = f"{grid.experiment.title}, {grid.profile}{', decided' * bool(margins)}"
    return [Markup(inline(figure, f"{of}: {name}")) for name, figure in figures_of(grid, margins).items()]


# ---- decisions -------------------------------------------------------------------------------------------------------


def decided_part(verdicts: Verdicts) -> dict[str, Any]:
    """The verdicts for page.html."""
    claims, known = verdicts.claims, verdicts.experiments
    asked = dict.fromkeys(family.experiment for family in claims.families.values())
    return {
        "alpha": claims.alpha,
        "claims": claim_rows(claims, [one for found in verdicts.found.values() for one in found.answers]),
        "experiments": [_decided(known[name], verdicts.found.get(name)) for name in asked if name in known],
    }


def _decided(experiment: Experiment, decided: Decided | None) -> dict[str, Any]:
    name, found = experiment.name, [] if decided is None else decided.answers
    complete = [one for one in found if one.complete]
    state = ""
    if decided is None:
        state = f"Not asked yet: {name} has no plan. Its first step: fedlora experiment run {name} --profile pilot"
    elif decided.late:
        state = f"{decided.late}. {_ONE_LOOK}"
    grid = decided.grid if decided is not None and not decided.late else None
    mechanism = table_of("mechanism", Source(grid)) if grid else None
    return {
        "name": name, "title": experiment.title, "state": state, "tally": tally_in_words(complete),
        "families": [
            {"question": one.family.question,
             "lines": [{"mark": mark(a), "kind": kind(a), "setup": a.question.setup, "words": sentence(one, a)}
                       for a in one.answers]}
            for one in found
        ],
        "remarks": [*remarks(found), *(decided.plan.history if decided else [])],
        "tables": [Table(headings(one.family), rows(one), title(one)) for one in complete],
        "maps": _maps(name, complete),
        "pictures": _pictures(grid, margins(found)) if grid else [],
        "mechanism": mechanism if mechanism and mechanism.rows else None,
        "decide": f"fedlora experiment decide {name} --format json", "plot": f"fedlora experiment plot {name}",
    }  # fmt: skip


def _maps(name: str, found: Sequence[Answers]) -> list[object]:
    """A heat map for each score of the families, because one scale has one unit."""
    from markupsafe import Markup

    from fedlora.experiments.map_picture import map_figure
    from fedlora.experiments.picture_style import inline

    made: list[object] = []
    for score, of in by_score(found).items():
        told = "; ".join(
            f"{a.question.words}: "
            + (a.why if a.test is None else f"{UNITS[score].size(a.test.mean, '+')}, {verdict_in_words(a)}")
            for one in of
            for a in one.answers
        )
        made.append(Markup(inline(map_figure(of), f"Heat map of {name}, {UNITS[score].words}. {told}.")))
    return made
