"""The part of the report that says what is decided: the map, the curves, the decision table, the paper's claims."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import BinaryIO

from fedlora.experiments.claims import Claims
from fedlora.experiments.decision_words import COLUMNS, claim_rows, remarks, rows, title
from fedlora.experiments.decisions import Answers, read_scores
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Experiment

_PART = """
<h2 id="decided">What is decided</h2>
<p>Each question is asked at a number of seeds that a pilot fixed, once. Verdicts: better, worse, equivalent (the
difference is smaller than the margin), undecided. Of each family the chance that it says anything false is at most
{{ alpha }} (Holm's step-down with Shaffer's count, over a test of difference and two one-sided tests of equivalence for
each question). Intervals are 95 %, of one question each, paired by seed.</p>
{% for e in experiments %}
<h3>{{ e.title }}</h3>
<p>{{ e.question }}</p>
<p class="note">Its numbers: <code>fedlora experiment run {{ e.name }} --profile {{ e.profile }}</code>, then
<code>fedlora experiment decide {{ e.name }} --format json</code></p>
{% for picture in e.pictures %}<img alt="{{ picture.words }}" src="data:image/png;base64,{{ picture.data }}">
{% endfor %}
{% for table in e.tables %}<div class="scroll"><table><caption>{{ table.caption }}</caption>
<thead><tr>{% for c in columns %}<th>{{ c }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr class="{{ 'decided' if row[-1] in ('better', 'worse', 'equivalent') }}">
{%- for x in row %}<td>{{ x }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}
{% for line in e.remarks %}<p class="attack">{{ line }}</p>{% endfor %}
{% endfor %}
<h3>The paper's claims</h3>
<div class="scroll"><table><thead><tr><th>claim</th><th>sentence</th><th>where</th><th>verdicts here</th></tr></thead>
<tbody>{% for row in claims %}<tr>{% for x in row %}<td class="words">{{ x }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
"""


def decision_part(
    claims: Claims,
    found: Sequence[Answers],
    experiments: Mapping[str, Experiment],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
) -> object:
    """The part as markup. found: every family that has a plan."""
    import jinja2
    from markupsafe import Markup

    from fedlora.experiments.map_plots import plot_budgets, plot_map

    parts = []
    for name in dict.fromkeys(one.family.experiment for one in found):
        mine, experiment = [one for one in found if one.family.experiment == name], experiments[name]
        pictures = [{"words": f"map of {name}", "data": encoded(partial(plot_map, mine))}]
        profile = mine[0].family.profile
        if all(one.complete for one in mine):
            scores = read_scores(experiment, profile, results, failed)
            seeds = experiment.profile(profile).seeds[: mine[0].wanted]
            setups = list(dict.fromkeys(setup for one in mine for setup in one.family.setups))
            drawn = encoded(partial(plot_budgets, experiment, scores, seeds, setups))
            pictures += [{"words": f"rank budgets of {name}", "data": drawn}] if drawn else []
        parts.append(
            {
                "name": name, "title": experiment.title, "question": experiment.question, "profile": profile,
                "pictures": pictures, "remarks": remarks(mine),
                "tables": [{"caption": title(one), "rows": rows(one)} for one in mine],
            }
        )  # fmt: skip
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PART)
    return Markup(page.render(alpha=claims.alpha, experiments=parts, columns=COLUMNS, claims=claim_rows(claims, found)))


def encoded(draw: Callable[[BinaryIO], object]) -> str:
    """The picture as base64; empty where nothing was drawn."""
    picture = io.BytesIO()
    draw(picture)
    return base64.b64encode(picture.getvalue()).decode()
