"""One self-contained HTML page of all experiments: tables beside the paper's numbers, curves, configs, commits.

No script, no outside request: pictures are inside the page.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.budgets import SIMULATIONS, budget_rows, spendings
from fedlora.experiments.claims import Claims
from fedlora.experiments.decision_page import decision_part, encoded
from fedlora.experiments.decisions import Answers
from fedlora.experiments.digits import difference_in_words, in_words, shown
from fedlora.experiments.numbers import titled
from fedlora.experiments.plan import mains, worst_values
from fedlora.experiments.prices import price_rows, prices
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import CellScore, measured_by, paired, score_categories, score_cells
from fedlora.runs.attack_words import attacks_of

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fedlora: experiments</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
 h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1.5rem; }
 table { border-collapse: collapse; margin: 1rem 0; } caption { text-align: left; color: #555; padding: .3rem 0; }
 th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
 th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #999; }
 .paper { color: #7a4a00; background: #fff8ec; } .none { color: #999; } .decided { font-weight: 600; }
 img { max-width: 100%; } details { margin: .5rem 0; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
 .attack { color: #a00000; font-weight: 600; } td.words { white-space: normal; text-align: left; }
 nav a { margin-right: 1rem; } .scroll { overflow-x: auto; } .note { color: #555; }
</style></head><body>
<h1>Experiments, profile {{ profile }}</h1>
<p>{{ runs }} runs, {{ commits | length }} commit{{ "s" if commits | length != 1 }}
({{ commits | join(", ") }}), on {{ machines | join("; ") }}. Mean and standard deviation over seeds. Learning rates
and best rounds were chosen on a share of the training data, never on the test set.</p>
<p class="note">Numbers on this ground are printed in the paper, at the paper's scale, with other models and data:
<span class="paper">&nbsp;paper&nbsp;</span>. They stand here to be compared in their order and gaps only.</p>
<nav>{% for e in experiments %}<a href="#{{ e.name }}">{{ e.name }}</a>{% endfor %}</nav>
{{ decisions }}
{% for e in experiments %}
<h2 id="{{ e.name }}">{{ e.title }}</h2>
<p>{{ e.question }}</p>
{% if e.note %}<p class="note">{{ e.note }}</p>{% endif %}
{% if e.attacks %}<p class="attack">Under attack, on purpose: {{ e.attacks | join("; ") }}. Nothing of these runs is
for use.</p>{% endif %}
<div class="scroll"><table><caption>{{ e.metric }}</caption>
<thead><tr><th>{{ e.row_name }}</th>{% for c in e.columns %}<th>{{ c }}</th>
{% if e.has_paper %}<th class="paper">paper</th>{% endif %}{% endfor %}</tr></thead>
<tbody>{% for row in e.rows %}<tr><td>{{ row.label }}</td>{% for c in row.cells %}
{% if c.mean is none %}<td class="none">not run</td>
{% else %}<td title="{{ c.seeds }} of {{ c.planned }} seeds{{ c.tuned }}">{{ c.mean }}
{%- if c.seeds != c.planned %}<sup>{{ c.seeds }}</sup>{% endif %}</td>{% endif %}
{% if e.has_paper %}<td class="paper">{{ c.paper }}</td>{% endif %}{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% if e.differences %}<div class="scroll"><table>
<caption>Paired differences against {{ e.reference }}, 95 % intervals (t) over seeds</caption>
<thead><tr><th>{{ e.row_name }}</th><th>where</th><th>difference</th><th>interval</th><th>pairs</th></tr></thead><tbody>
{% for d in e.differences %}<tr class="{{ 'decided' if d.decided }}"><td>{{ d.other }}</td><td>{{ d.where }}</td>
<td>{{ d.mean }}</td><td>{{ d.interval }}</td><td>{{ d.pairs }}</td></tr>{% endfor %}
</tbody></table></div>{% endif %}
{% for line in e.simulated %}<p class="note">{{ line }}</p>{% endfor %}
{% for table in e.prices %}<div class="scroll"><table><caption>{{ table.caption }}</caption>
<thead><tr>{% for c in table.columns %}<th>{{ c }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr>{% for x in row %}<td>{{ x }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}
{% for table in e.categories %}<div class="scroll"><table><caption>{{ table.caption }}</caption>
<thead><tr><th>category</th>{% for c in table.columns %}<th>{{ c }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr><td>{{ row.label }}</td>{% for x in row.cells %}<td>{{ x }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}
{% for line in e.worst %}<p class="note">{{ line }}</p>{% endfor %}
{% for picture in e.pictures %}<img alt="curves of {{ e.name }}" src="data:image/png;base64,{{ picture }}">{% endfor %}
<details><summary>Configuration ({{ e.digest_count }} runs)</summary><pre>{{ e.config }}</pre></details>
{% endfor %}
</body></html>
"""


def write_report(
    path: Path,
    experiments: Sequence[Experiment],
    profile: str,
    results: Mapping[str, Result],
    paper: Path,
    failed: Mapping[str, str] | None = None,
    decided: tuple[Claims, Sequence[Answers]] | None = None,
) -> None:
    """The page, of those experiments that have the profile and any result; with "mini" go all profiles but "paper".

    failed: digest -> why, of runs of a search that failed. decided: the claims, and every family that has a plan; an
    experiment whose families still wait for seeds is not shown, for that would be a look before its time; nor are
    pilots.

    Raises:
        ConfigError: jinja2 or matplotlib is missing, or there is no result at all.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the report needs jinja2 and matplotlib: pip install 'fedlora[plot]'.") from error
    printed, failed = _paper_numbers(paper), failed or {}
    claims, families = decided or (None, [])
    waiting = {one.family.experiment for one in families if not one.complete}
    sections: list[dict[str, Any]] = []
    used: dict[str, Result] = {}
    for experiment in experiments:
        for name in experiment.profiles:
            if experiment.name in waiting or (claims is not None and name in claims.pilots(experiment.name)):
                continue
            if name != profile and (profile != "mini" or name == "paper"):
                continue
            runs = mains(experiment, name, results, failed)
            found = {r.digest: results[r.digest] for r in runs if r.digest in results}
            if not found:
                continue
            used |= found
            pictures = [] if experiment.merged else [encoded(partial(_curves, experiment, name, results, failed))]
            if experiment.budgets is not None:
                pictures.insert(0, encoded(partial(_by_budget, experiment, name, results, failed)))
            sections.append(_section(experiment, name, results, printed, failed) | {"pictures": pictures})
    if not sections and not families:
        raise ConfigError(f"no experiment has a result of profile {profile}; run some first.")
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    html = page.render(
        profile=profile,
        experiments=sections,
        decisions=""
        if claims is None
        else decision_part(claims, families, {e.name: e for e in experiments}, results, failed),
        runs=len(used),
        commits=sorted({str((r.raw["commit"] or {}).get("id"))[:12] for r in used.values()}),
        machines=sorted({_machine(r.raw["machine"]) for r in used.values()}),
    )
    files.write(path, html)


def _curves(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str], to: BinaryIO
) -> None:
    from fedlora.experiments.plots import plot_curves

    plot_curves(experiment, profile, results, to, failed)


def _by_budget(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str], to: BinaryIO
) -> None:
    from fedlora.experiments.budget_plot import plot_budgets

    if experiment.budgets is not None:
        spent = spendings(experiment, profile, results, failed)
        plot_budgets(spent, experiment.title, experiment.budgets.lines, to)


def _machine(m: Mapping[str, Any]) -> str:
    return f"{m['device']} ({m['architecture']}, {m['cpus']} cores, {m['threads']} thread a run)"


def _section(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    printed: Mapping[str, Any],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    cells = score_cells(experiment, profile, results, failed=failed)
    numbers = printed.get(experiment.paper or "", {})
    rows, columns = _labels(cells, experiment.rows), _labels(cells, _columns(experiment))
    by_place = {(_label(c, experiment.rows), _label(c, _columns(experiment))): c for c in cells}
    differences = paired(cells, experiment.rows[0], experiment.reference) if experiment.reference else []
    runs = mains(experiment, profile, results, failed)
    apart = "" if profile in ("mini", "paper") else f" ({profile})"
    return {
        "name": f"{experiment.name}{apart}".replace(" ", "-"),
        "title": f"{experiment.title}{apart}",
        "question": experiment.question,
        "note": experiment.profile(profile).note,
        "metric": titled(experiment.profile(profile).metric or experiment.metric, measured_by(cells)),
        "categories": _categories(experiment, profile, results, failed),
        "prices": [*_prices(experiment, profile, results, failed), *_budgets(experiment, profile, results, failed)],
        "simulated": [SIMULATIONS] if spendings(experiment, profile, results, failed) else [],
        "worst": worst_values(experiment, profile, results, failed),
        "attacks": attacks_of([results[r.digest].raw["config"] for r in runs if r.digest in results]),
        "row_name": ", ".join(experiment.rows),
        "columns": columns,
        "has_paper": bool(numbers),
        "rows": [
            {"label": row, "cells": [_cell(by_place.get((row, c)), numbers.get(c, {}).get(row)) for c in columns]}
            for row in rows
        ],
        "reference": experiment.reference,
        "differences": [
            {
                "other": d.other, "where": ", ".join(d.where.values()), "mean": mean, "interval": interval,
                "pairs": d.pairs, "decided": d.decided,
            }
            for d in differences
            for mean, interval in [difference_in_words(d.mean, d.low, d.high, " to ")]
        ],
        "digest_count": len(runs),
        "config": "\n".join([*(f"{r.digest}  {r.label}" for r in runs), "", *(r.config.canonical() for r in runs[:1])]),
    }  # fmt: skip


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
            rows = [
                {"label": c, "cells": [f"{by[c]:.4f}" if c in by else "" for by in found.values()]} for c in categories
            ]
            tables.append({"caption": f"By category: {words}", "columns": list(found), "rows": rows})
    return tables


def _columns(experiment: Experiment) -> list[str]:
    return experiment.columns or [axis for axis in experiment.axes if axis not in experiment.rows]


def _label(cell: CellScore, axes: Sequence[str]) -> str:
    return ", ".join(cell.cell[axis] for axis in axes) or "all"


def _labels(cells: Sequence[CellScore], axes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_label(cell, axes) for cell in cells))


def _cell(cell: CellScore | None, paper: object) -> dict[str, Any]:
    bare = {"paper": "" if paper is None else str(paper), "mean": None, "seeds": 0, "planned": 0}
    if cell is None or cell.mean is None:
        return bare
    return bare | {
        "mean": in_words(cell.mean, cell.spread),
        "seeds": len(cell.scores),
        "planned": cell.planned,
        "tuned": "" if cell.tuned is None else f", tuned {shown(cell.tuned)}",
    }


def _paper_numbers(path: Path) -> Mapping[str, Any]:
    """Table -> column -> row -> what the paper prints; empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
