"""Tables in a Markdown page that are filled from stored results, and by nothing else.

    <!-- filled: privacy mini budgets -->
    | clients | epsilon | ...
    <!-- end -->

Between the two markers stands what `filled` makes of an experiment, a profile and a kind of table. `fedlora experiment
fill PAGE` writes it, and a test holds every page to it: no number there was typed.

kind                what
budgets             an experiment's `budgets`: what each cell spent, and its scores
prices SCORE        an experiment's `peace`: what each row costs without an attacker, and saves with one
scores              its number, mean ± standard deviation over seeds
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.experiments.budgets import budget_rows, spendings
from fedlora.experiments.digits import in_words
from fedlora.experiments.plan import mains
from fedlora.experiments.prices import SCORES, price_rows, prices
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.tables import CellScore, score_cells

_BEGIN = r"^<!-- filled: (?P<asked>[^\n]*?) -->$"  # markers have lines of their own
_BLOCK = re.compile(rf"({_BEGIN}\n)(?:(?!<!-- filled: ).)*?(^<!-- end -->$)", flags=re.DOTALL | re.MULTILINE)
KINDS = ("budgets", *(f"prices {score}" for score in SCORES), "scores")
Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


def filled(text: str, experiments: Path, results: Mapping[str, Result]) -> str:
    """The page with each block as the results have it; the rest of it as it was.

    Args:
        text: of a Markdown page.
        experiments: the folder of the experiments' files.
        results: digest -> result, as `results.read_results` reads them.

    Raises:
        ConfigError: a block that asks for what there is not, or has no end.
    """
    begun = len(re.findall(_BEGIN, text, flags=re.MULTILINE))
    if begun != len(_BLOCK.findall(text)):
        raise ConfigError(f"a page has {begun} blocks '<!-- filled: ... -->', and not each is ended by '<!-- end -->'.")
    return _BLOCK.sub(lambda found: f"{found[1]}{_block(found['asked'], experiments, results)}{found[3]}", text)


def read_page(path: Path) -> str:
    """Its text. Raises `ConfigError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the page {path} cannot be read: {error}.") from error


def _block(asked: str, experiments: Path, results: Mapping[str, Result]) -> str:
    name, _, rest = asked.partition(" ")
    profile, _, kind = rest.partition(" ")
    if kind not in KINDS:
        raise ConfigError(
            f"<!-- filled: {asked} --> names an experiment, a profile and one of {', '.join(KINDS)}; got {kind!r}."
        )
    experiment = load_experiment(experiments / f"{name}.toml")
    runs = mains(experiment, profile, results)
    done = sum(run.digest in results for run in runs)
    if not done:
        return f"No run of it is stored yet (0 of {len(runs)}).\n"
    columns, rows = _rows(experiment, profile, kind, results)
    if not rows:
        raise ConfigError(f"<!-- filled: {asked} -->: experiment {name} says nothing of {kind}.")
    return f"{markdown(columns, rows)}\n{_made(experiment, profile, results, done, len(runs))}\n"


def _rows(experiment: Experiment, profile: str, kind: str, results: Mapping[str, Result]) -> Rows:
    if kind == "budgets":
        lines = experiment.budgets.lines if experiment.budgets else ""
        return budget_rows(spendings(experiment, profile, results), lines)
    if kind == "scores":
        return _score_rows(experiment, score_cells(experiment, profile, results))
    columns, rows = price_rows(prices(experiment, profile, results), kind.removeprefix("prices "))
    return [experiment.rows[0], *columns[1:]], [[cell or "not run" for cell in row] for row in rows]


def _score_rows(experiment: Experiment, cells: Sequence[CellScore]) -> Rows:
    axes = list(experiment.axes)
    rows = [[*(cell.cell[axis] for axis in axes), in_words(cell.mean, cell.spread), str(len(cell.scores))]
            for cell in cells if cell.mean is not None]  # fmt: skip
    return [*axes, "mean ± sd", "seeds"], rows


def _made(experiment: Experiment, profile: str, results: Mapping[str, Result], done: int, planned: int) -> str:
    """How many runs, of which commits, on which machines, in which time."""
    used = [results[run.digest].raw for run in mains(experiment, profile, results) if run.digest in results]
    commits = sorted({str((raw["commit"] or {}).get("id", "unknown"))[:7] for raw in used})
    machines = sorted({f"{raw['machine']['device']}, {raw['machine']['architecture']}" for raw in used})
    return (
        f"`fedlora experiment run {experiment.name} --profile {profile}`: {done} of {planned} runs, commit "
        f"{', '.join(commits)}, {'; '.join(machines)}."
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with its last line break."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return line(columns) + "|" + "---|" * len(columns) + "\n" + "".join(line(row) for row in rows)
