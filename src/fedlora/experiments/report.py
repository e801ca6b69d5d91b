"""One self-contained HTML page of all experiments: what is decided, how, and every number with its command.

No script, no outside request: pictures and style are inside the page. Its templates are in page/.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims
from fedlora.experiments.decisions import Answers
from fedlora.experiments.plan import mains
from fedlora.experiments.spec import Experiment
from fedlora.experiments.report import decided_part
from fedlora.experiments.report import section
from fedlora.experiments.result import Result
from fedlora.given_files import read_toml


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
    shown either. past: experiment -> how its verdicts came about, as `looks.history` tells it.

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
    waiting = {one.family.experiment for one in families if not one.complete}
    wanted = {(one.family.experiment, one.family.profile): one.wanted for one in families}
    sections: list[dict[str, Any]] = []
    used: dict[str, Result] = {}
    for experiment in experiments:
        for name in experiment.profiles:
            if experiment.name in waiting or (claims is not None and name in claims.pilots(experiment.name)):
                continue
            if name != profile and (profile != "mini" or name == "paper"):
                continue
            seeds = wanted.get((experiment.name, name))
            shown = experiment if seeds is None else experiment.of_first_seeds(name, seeds)
            runs = mains(shown, name, results, failed)
            found = {r.digest: results[r.digest] for r in runs if r.digest in results}
            if not found or not found.keys().isdisjoint(awaited):
                continue
            used |= found
            sections.append(section(shown, name, results, printed, failed))
    if not sections and not families:
        late = ", but for runs that an open plan waits for" if awaited else ""
        raise ConfigError(f"no experiment has a result of profile {profile}{late}; run some first.")
    folder = Path(__file__).with_name("page")
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True)
    by_name = {e.name: e for e in experiments}
    html = pages.get_template("report.html").render(
        colours=style_sheet(),
        style=folder.joinpath("style.css").read_text(encoding="utf-8"),
        decided=None if claims is None else decided_part(claims, families, by_name, results, failed, past or {}),
        sections=sections,
        has_paper=any(one["has_paper"] for one in sections),
        runs=len(used),
        commits=sorted({commit for r in used.values() for commit in r.commits(12)}),
        machines=sorted({_machine(part["machine"] or r.raw["machine"]) for r in used.values() for part in r.parts}),
    )
    files.write(path, html)


def _machine(m: Mapping[str, Any]) -> str:
    return f"{m['device']} ({m['architecture']}, {m['cpus']} cores, {m['threads']} thread a run)"


def _paper_numbers(path: Path) -> Mapping[str, Any]:
    """Table -> column -> row -> what the paper prints; empty where the file is missing."""
    if not path.is_file():
        return {}
    return read_toml(path, "the paper's numbers")
