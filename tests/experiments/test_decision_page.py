"""The page of what is decided: its numbers are those of `decide` and `table`, its pictures follow the verdicts, and
where there is nothing it says so. Kinds: oracle (planted effects), whole."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedlora.experiments.claims import Family, Question, Score, load_claims
from fedlora.experiments.decided import Decided
from fedlora.experiments.decision_words import (
    by_score,
    claim_rows,
    headings,
    margins,
    mark,
    plain_answers,
    sentence,
    tally,
    title,
)
from fedlora.experiments.decision_words import rows as rows_in_words
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.grid import Grid
from fedlora.experiments.map_picture import map_figure
from fedlora.experiments.report import Verdicts, decided_part
from fedlora.experiments.seed_plan import path_of, read_plan
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.store import as_lines, read_results_of
from fedlora.experiments.verdicts import Verdict, weigh
from support.command_line import Said, invoke
from support.cut_claims import cut_claims
from support.made_results import by_effects, write_runs

ROOT = Path(__file__).parents[2]
SETUPS = ["one", "two", "three", "four", "five"]
WHY = "thrown out: LoRA is not shown to carry the result there"


def answered(
    verdicts: Mapping[str, Verdict | None],
    gaps: Mapping[str, list[float]] | None = None,
    why: str = WHY,
    metric: Score = "loss",
) -> Answers:
    """One family of one pair: set-up -> verdict. gaps: set-up -> by how much the first is better, seed by seed."""
    family = Family(
        question="Is it?", experiment="e", pairs=[("new", "old")], setups=list(verdicts), margin=0.005, metric=metric
    )
    made = tuple(
        Answer(Question("new", "old", setup), None, why)
        if verdict is None
        else Answer(
            Question("new", "old", setup), verdict, "", weigh((gaps or {}).get(setup, [0.01, 0.012, 0.014]), 0.005)
        )
        for setup, verdict in verdicts.items()
    )
    return Answers("f", family, 3, 3, made)


def boxes(figure: Figure) -> dict[str, Rectangle]:
    """Question -> its cell."""
    return {str(p.get_gid()): p for p in figure.axes[0].patches if isinstance(p, Rectangle) and p.get_gid()}


def test_hatched_is_undecided_struck_is_thrown_out_and_nothing_else_is() -> None:
    verdicts: dict[str, Verdict | None] = {
        "one": "better", "two": "worse", "three": "equivalent", "four": "undecided", "five": None,
    }  # fmt: skip
    figure = map_figure([answered(verdicts)])
    found = boxes(figure)
    assert {name: bool(box.get_hatch()) for name, box in found.items()} == {
        f"new against old, {setup}": verdict == "undecided" for setup, verdict in verdicts.items()
    }
    struck = [line.get_gid() for line in figure.axes[0].lines]
    assert struck == ["struck: new against old, five"]
    lost = map_figure([answered({"one": "better", "two": None}, why="no number for new on seed 1")])
    assert not lost.axes[0].lines, "a failed run is not thrown out by the gate"


def test_colours_are_centred_at_zero_and_the_margin_is_on_the_scale() -> None:
    """A gap of zero has the colour map's middle; gaps of one size and two signs are at its two sides alike. By hand:
    the scale ends at four margins, 0.02, for the largest difference is 0.012."""
    gaps = {"one": [0.0, 0.001, -0.001], "two": [0.011, 0.012, 0.013], "three": [-0.011, -0.012, -0.013]}
    figure = map_figure([answered({"one": "equivalent", "two": "better", "three": "worse"}, gaps)])
    colours = {name.rpartition(" ")[2]: box.get_facecolor() for name, box in boxes(figure).items()}
    assert min(colours["one"][:3]) > 0.95, "PuOr's middle is next to white"
    (red, _, blue, _), (red2, _, blue2, _) = colours["two"], colours["three"]
    assert blue > red and red2 > blue2, "purple to the right, orange to the left"
    scale = figure.axes[1]
    assert list(scale.get_xticks()) == pytest.approx([-0.02, 0, 0.02])
    assert sorted(line.get_xdata()[0] for line in scale.lines) == pytest.approx([-0.005, 0.005])


def test_cells_have_the_number_and_the_mark() -> None:
    """By hand: the mean of 0.01, 0.012, 0.014."""
    texts = [text.get_text() for text in map_figure([answered({"one": "better", "two": None})]).axes[0].texts]
    assert "+0.012\n▲" in texts and "out" in texts and "new against old" in texts


SMALL = [0.002, 0.0021, 0.0022]  # of a margin of 0.005


def test_a_verdict_below_the_margin_says_so_wherever_it_stands() -> None:
    """In the table, in the tally, on the map with its key, for programs as a field of its own; others do not."""
    gaps = {"one": SMALL, "two": [-gap for gap in SMALL], "four": SMALL}
    verdicts: dict[str, Verdict | None] = {"one": "better", "two": "worse", "three": "better", "four": "equivalent"}
    found = answered(verdicts, gaps)
    said = [row[-1] for row in rows_in_words(found)]
    assert [words.split()[0] for words in said] == ["better", "worse", "better", "equivalent"]
    assert ["margin" in words for words in said] == [True, True, False, False] and list(tally([found])) == said
    assert [mark(answer) for answer in found.answers] == ["(▲)", "(▼)", "▲", "≈"]
    assert [a["below_margin"] for a in plain_answers(found)["answers"]] == [True, True, False, False]
    keys = "( ) by less"

    def legend(figure: Figure) -> list[str]:
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert keys in str(legend(map_figure([found])))
    assert keys not in str(legend(map_figure([answered({"one": "better"})])))


def test_a_map_has_one_unit_and_says_it() -> None:
    """Log-loss in nats and accuracy in points are two maps: 0.012 nats, and by hand 100 * 0.012 points."""
    loss, accuracy = answered({"one": "better"}), answered({"one": "better"}, metric="accuracy")
    assert by_score([loss, accuracy, loss]) == {"loss": [loss, loss], "accuracy": [accuracy]}
    for one, number, unit, margin in (
        (loss, "+0.012\n▲", "log-loss, nats", "0.005"), (accuracy, "+1.2\n▲", "accuracy, points", "0.5"),
    ):  # fmt: skip
        figure = map_figure([one])
        assert number in [text.get_text() for text in figure.axes[0].texts]
        assert [t.get_text() for t in figure.axes[1].texts] == [f"difference of {unit}; lines: ± margin, {margin}"]
        assert f"margin {margin} {unit.partition(', ')[2]}" in title(one)
        assert headings(one.family)[2] == f"difference: {unit}"


def test_a_margin_is_drawn_in_pictures_of_its_own_score_alone() -> None:
    """A margin of accuracy says nothing of log-loss, and was drawn there where it was the smaller one."""
    loss, accuracy = answered({"one": "better"}), answered({"one": "better"}, metric="accuracy")
    small = Answers("g", accuracy.family.model_copy(update={"margin": 0.001}), 3, 3, accuracy.answers)
    assert margins([loss, accuracy, small]) == {"loss": 0.005, "accuracy": 0.001}


@pytest.mark.parametrize(
    ("verdict", "gaps", "says"),
    [
        ("better", [0.01, 0.012, 0.014], r"new .*better than old: .*0\.0120 nats lower \(0\.0070 to 0\.0170\)\.$"),
        ("worse", [-0.01, -0.012, -0.014], r"new .*worse than old: .*0\.0120 nats higher \(0\.0070 to 0\.0170\)\.$"),
        ("equivalent", [0.0, 0.001, -0.001],
         r"new and old .*equally.*\+0\.0000 nats \(-0\.0025 to \+0\.0025\).* 0\.005"),
        ("undecided", [0.0, 0.02, -0.02], r"new or old: .*3 seeds.* \+0\.0000 nats \(-0\.0497 to \+0\.0497\)"),
        ("better", [0.002, 0.0021, 0.0022],
         r"better than old, .*the margin: .*0\.0021 nats lower \(0\.0019 to 0\.0023\)\..* 0\.005 "),
    ],
)  # fmt: skip
def test_an_answer_in_words(verdict: Verdict, gaps: list[float], says: str) -> None:
    """By hand: t(0.975, 2) = 4.302653; of 0.010, 0.012, 0.014 s = 0.002, half width 4.302653 * 0.002 / sqrt 3."""
    found = answered({"one": verdict}, {"one": gaps})
    assert re.search(says, sentence(found, found.answers[0]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both experiments of the map at their planned seeds. Ten local steps: factor averages cost nothing; else 0.06."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "experiments").mkdir()
    for name in ("map_once", "map_rounds"):
        shutil.copy(ROOT / "experiments" / f"{name}.toml", folder / "experiments")
    cut_claims(folder, ("map_once", "map_rounds"))
    once, rounds = (experiment(folder, name) for name in ("map_once", "map_rounds"))
    setups = {*once.axes["setup"], *rounds.axes["setup"]}
    effects = {("factor averages", setup): 0.06 for setup in setups - {"10 local steps"}}
    effects |= {("head alone", setup): 0.04 for setup in setups} | {("no adapter", setup): 0.1 for setup in setups}
    planted, bare = by_effects(effects, 0.0005), by_effects({}, 0.0)  # little: few seeds are planned

    def loss(label: str, setup: str, seed: int) -> float:
        return planted(label, setup, seed) - bare(label, setup, seed) + bare("", "", seed)

    results = folder / "results"
    for one in (once, rounds):
        write_runs(results, one, "mini", loss, search=True)
        write_runs(results, one, "pilot", loss)
        invoke("experiment", "plan", one.name, *options(folder))
        write_runs(results, with_seeds(one, wanted(folder, one.name)), "mini", loss)
    return folder


def wanted(folder: Path, name: str) -> int:
    """How many seeds its plan has."""
    return len(read_plan(path_of(folder / "results", name)).seeds)


def experiment(folder: Path, name: str) -> Experiment:
    return load_experiment(folder / "experiments" / f"{name}.toml")


def with_seeds(one: Experiment, count: int) -> Experiment:
    cut = one.profiles["mini"].model_copy(update={"seeds": one.profiles["mini"].seeds[:count]})
    made = one.model_copy(update={"profiles": {**one.profiles, "mini": cut}})
    made._folder = one.folder
    return made


def options(folder: Path) -> list[str]:
    return ["--experiments", str(folder / "experiments"), "--results", str(folder / "results"),
            "--work", str(folder / "work"), "--claims", str(folder / "claims.toml")]  # fmt: skip


@pytest.fixture(scope="module")
def page(place: Path) -> str:
    invoke("experiment", "report", "--out", str(place / "r.html"), *options(place))
    return (place / "r.html").read_text(encoding="utf-8")


def rows(page: str, part: str) -> list[list[str]]:
    """The cells of all tables of a part of the page, without markup."""
    text = page.split(f'<h2 id="{part}">')[1].split("<h2")[0]
    found = re.findall(r"<tr>(.*?)</tr>", text, flags=re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in found]
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in row] for row in cells]


def decisions(place: Path) -> list[dict[str, Any]]:
    families: list[dict[str, Any]] = []
    for name in ("map_once", "map_rounds"):
        said = invoke("experiment", "decide", name, "--format", "json", *options(place))
        families += json.loads(said.stdout)["families"]
    return families


def test_a_corrected_sentence_is_shown_with_its_correction() -> None:
    """The gap to FlexLoRA was written down wrongly: the file says when, and what is right. Others stand as they are."""
    claims = load_claims(ROOT / "docs" / "claims.toml")
    shown = {name: words for name, words, *_ in claim_rows(claims, [])}
    mended = claims.claims["flexlora-gap"]
    assert mended.corrected and shown["flexlora-gap"] == f"{mended.sentence} (Corrected: {mended.corrected})"
    assert shown["rank-budget"] == claims.claims["rank-budget"].sentence


def test_the_pages_numbers_are_those_of_decide(place: Path, page: str) -> None:
    """Every question: in the decision table, in words, and on the map."""
    table = {(row[0], row[1]): row[2:] for row in rows(page, "table") if len(row) == 7}
    words = html.unescape(page.split('<h2 id="decided">')[1].split('<h2 id="map">')[0])
    drawn = html.unescape(page.split('<h2 id="map">')[1].split('<h2 id="curves">')[0])
    asked = [(family, a) for family in decisions(place) for a in family["answers"]]
    claims = load_claims(place / "claims.toml")
    assert len(asked) == sum(len(family.questions) for family in claims.families.values()) > 15
    for _, a in asked:
        question = f"{a['first']} against {a['second']}"
        assert a["verdict"], "every planned run is there"
        found = table[question, a["setup"]]
        assert found[0] == f"{a['mean'] + 0.0:+.4f}" and found[1] == f"{a['low']:+.4f} to {a['high']:+.4f}"
        assert found[4] == a["verdict"]
        assert f"{question}, {a['setup']}: {a['mean']:+.4f}, {a['verdict']}" in drawn, "what is said of the map"
        assert f"{a['mean'] + 0.0:+.3f}</text>" in drawn
        assert f"{abs(a['mean']):.4f}" in words
    counts = {v: sum(a["verdict"] == v for _, a in asked) for v in ("better", "equivalent")}
    assert counts["better"] > 3 and counts["equivalent"] > 3, "planted: both kinds"


def test_the_mechanism_is_that_of_the_results(place: Path, page: str) -> None:
    """Of the planned seeds alone: the mean of what the stored results of a cell say, read from their file."""
    found = {(row[0], row[1]): row[2:] for row in rows(page, "mechanism") if len(row) == 5}
    stored = read_results_of(place / "results" / "map_rounds.jsonl")
    of = Grid(experiment(place, "map_rounds"), "mini", stored).of_seeds(range(wanted(place, "map_rounds")))
    cells = {(run.cell["setup"], run.cell["method"]) for run in of.runs}
    assert len(cells) > 5
    for cell in cells:
        each = [r.padded_error for run, r in of.used if (run.cell["setup"], run.cell["method"]) == cell]
        assert found[cell][0] == f"{fmean(x for x in each if x is not None):.3g}"
        assert found[cell][2] == str(len(each)) == str(wanted(place, "map_rounds"))


def test_what_is_not_there_is_a_sentence(place: Path) -> None:
    """No plan: no picture, no table, no empty grid, and the command that begins. Some seeds: how many."""
    claims = load_claims(place / "claims.toml")
    known = {name: experiment(place, name) for name in ("map_once", "map_rounds")}
    part = decided_part(Verdicts(claims, known))
    for one in part["experiments"]:
        assert not (one["maps"] or one["pictures"] or one["tables"] or one["mechanism"] or one["families"])
        assert f"fedlora experiment run {one['name']} --profile pilot" in one["state"]
    waiting = [Answers(name, family, 2, 7) for name, family in claims.of("map_once").items()]
    plan = read_plan(path_of(place / "results", "map_once"))
    late = Decided(claims, plan, Grid(known["map_once"], "mini"), waiting)
    once = decided_part(Verdicts(claims, known, {"map_once": late}))["experiments"][0]
    assert once["state"].startswith("2 of 7 planned seeds") and not once["maps"] and not once["tables"]
    assert all(not family["lines"] for family in once["families"])


def test_plot_draws_the_map_and_the_set_ups_and_nothing_before_its_time(
    place: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    for name in ("map_once", "map_rounds"):
        invoke("experiment", "plot", name, "--out", str(tmp_path / f"{name}.svg"), *options(place))
        map_text, set_ups = (tmp_path / f"{name}{x}.svg" for x in ("", "-setups"))
        assert map_text.stat().st_size > 10_000 and set_ups.stat().st_size > 10_000
    copy = Path(shutil.copytree(place, tmp_path / "copy"))
    there = wanted(copy, "map_rounds") - 1
    for path in (copy / "results").glob("*.jsonl"):  # without the last one
        kept = {digest: one for digest, one in read_results_of(path).items() if one.settings.run.seed != there}
        path.write_text(as_lines(kept))
    said = main("experiment", "plot", "map_rounds", *options(copy)).error()
    assert f"{there} of {there + 1} planned seeds of map_rounds" in said
