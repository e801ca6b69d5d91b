"""From results to verdicts: one look, at the planned number of seeds, after the gate, one family at a time.

`answers` gives no number before all planned seeds have run: until then a family is "n of N". Set-ups that the gate
discards and failures on a seed are listed, and stay in the family's count of questions, so that losing one makes no
other easier to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fedlora.experiments.claims import Claims, Family, Gate, Question, Score, setup_axis
from fedlora.experiments.footnotes import family_notes, gate_notes
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import SCORES
from fedlora.experiments.spec import Experiment
from fedlora.experiments.verdicts import Verdict, Weighed, beats_by, judge, seeds_to_beat, weigh
from fedlora.training.metrics import METRICS

Scores = Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]]  # (label, set-up) -> seed -> score's name -> value


@dataclass(frozen=True)
class Gated:
    """Whether LoRA matters in a set-up. ahead: label -> the mean difference by which its log-loss is below the head's,
    and spread its standard deviation over seeds. needed: the seeds with which such a lead would pass, with power 0.8;
    None if it is not above the margin. lost: the missing numbers, if they leave the gate without an answer."""

    setup: str
    passed: bool
    ahead: Mapping[str, float]
    margin: float
    spread: Mapping[str, float]
    needed: Mapping[str, int | None]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One question. verdict: None if there is none; why says the reason. test, beside: for the two scores."""

    question: Question
    verdict: Verdict | None
    why: str = ""
    test: Weighed | None = None
    beside: Weighed | None = None

    @property
    def below_margin(self) -> bool:
        """Whether it is better or worse, but by less than the margin in the mean. Then nothing shows that the gap is no
        larger; otherwise it would be equivalent."""
        return self.verdict in ("better", "worse") and self.test is not None and abs(self.test.mean) < self.test.margin


@dataclass(frozen=True)
class Answers:
    """One family. there, wanted: the seeds on which all of its runs are finished, and the plan's number. answers: empty
    until they are all there. gates: of its set-ups. notes, gate_notes: the origin of its scores and of the gate's
    (`footnotes`)."""

    name: str
    family: Family
    there: int
    wanted: int
    answers: tuple[Answer, ...] = ()
    gates: tuple[Gated, ...] = ()
    notes: tuple[str, ...] = ()
    gate_notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return bool(self.answers)


def read_scores(grid: Grid) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
    """Every finished cell's log-loss and accuracy on the test set after the last round, by seed; an empty mapping for a
    run that failed on its own or has no number, because there is nothing to wait for."""
    axis = setup_axis(grid.experiment)
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for run in grid.runs:
        by_seed = found.setdefault((run.cell[grid.rows], run.cell[axis]), {})
        result = run.result(grid.results)
        if result is not None:
            told = {name: result.tested(name) for name in SCORES}
            by_seed[run.seed] = {name: value for name, value in told.items() if value is not None}
        elif run.digest in grid.failed:
            by_seed[run.seed] = {}
    return found


def gaps_of(scores: Scores, question: Question, score: Score, seeds: Sequence[int]) -> list[float]:
    """By how much the first is better, for each seed. Raises `KeyError` if a number is missing."""
    first, second = (scores[label, question.setup] for label in (question.first, question.second))
    up = 1.0 if METRICS[score].larger_is_better else -1.0
    return [up * (first[seed][score] - second[seed][score]) for seed in seeds]


def answers(
    claims: Claims,
    experiment: Experiment,
    seeds: Sequence[int],
    scores: Scores,
    heads: Mapping[str, Mapping[int, Mapping[str, float]]],
) -> list[Answers]:
    """The answers of every family that asks about the experiment.

    Args:
        seeds: the planned ones. scores: from `read_scores`.
        heads: set-up -> seed -> the scores of a head alone; unused if the experiment has no gate.
    """
    gate = claims.gates.get(experiment.name)
    found = []
    for name, family in claims.of(experiment.name).items():
        cells = {(label, q.setup) for q in family.questions for label in (q.first, q.second)}
        if gate is not None:
            cells |= {(label, setup) for label in gate.lora for setup in family.setups}
        there = [seed for seed in seeds if all(seed in scores.get(cell, {}) for cell in cells)]
        if gate is not None:
            there = [seed for seed in there if all(seed in heads.get(setup, {}) for setup in family.setups)]
        if len(there) < len(seeds):
            found.append(Answers(name, family, len(there), len(seeds)))
            continue
        gates = tuple(_gated(gate, s, seeds, scores, heads[s], claims.alpha) for s in family.setups) if gate else ()
        found.append(
            Answers(name, family, len(seeds), len(seeds), _judged(family, gates, seeds, scores, claims.alpha), gates)
        )
    return found


def _judged(
    family: Family, gates: Sequence[Gated], seeds: Sequence[int], scores: Scores, alpha: float
) -> tuple[Answer, ...]:
    out = {gated.setup: gated for gated in gates if not gated.passed}
    tests: dict[Question, tuple[Weighed, Weighed | None]] = {}
    lost: dict[Question, str] = {}
    for question in family.questions:
        if question.setup in out:
            gone = ", ".join(out[question.setup].lost)
            lost[question] = (
                f"the gate has no number for {gone}: it failed or diverged" if gone else
                "thrown out: LoRA is not shown to carry the result there"
            )  # fmt: skip
            continue
        bare = [
            f"{label} on seed {seed}"
            for label in (question.first, question.second)
            for seed in seeds
            if family.metric not in scores[label, question.setup][seed]
        ]
        if bare:
            lost[question] = f"no number for {', '.join(bare)}: it failed or diverged"
            continue
        test = weigh(gaps_of(scores, question, family.metric, seeds), family.margin)
        try:
            beside = weigh(gaps_of(scores, question, family.beside, seeds), family.margin)
        except KeyError:
            beside = None
        tests[question] = (test, beside)
    verdicts = judge({q.words: test for q, (test, _) in tests.items()}, alpha, others=len(lost))
    return tuple(
        Answer(q, None, lost[q]) if q in lost else Answer(q, verdicts[q.words], "", *tests[q]) for q in family.questions
    )


def _gated(
    gate: Gate,
    setup: str,
    seeds: Sequence[int],
    scores: Scores,
    heads: Mapping[int, Mapping[str, float]],
    alpha: float,
) -> Gated:
    ahead: dict[str, float] = {}
    spread: dict[str, float] = {}
    needed: dict[str, int | None] = {}
    lost: list[str] = []
    passed, level = False, alpha / len(gate.lora)
    for label in gate.lora:
        mine = scores[label, setup]
        gone = [f"{gate.head} on seed {seed}" for seed in seeds if "loss" not in heads[seed]]
        gone += [f"{label} on seed {seed}" for seed in seeds if "loss" not in mine[seed]]
        if gone:  # this label cannot testify
            lost += [what for what in gone if what not in lost]
            continue
        gaps = [heads[seed]["loss"] - mine[seed]["loss"] for seed in seeds]
        better, _ = beats_by(gaps, gate.margin, level)
        ahead[label], spread[label], passed = fmean(gaps), stdev(gaps), passed or better
        needed[label] = seeds_to_beat(ahead[label] - gate.margin, spread[label], level)
    return Gated(setup, passed, ahead, gate.margin, spread, needed, () if passed else tuple(lost))


def answers_from(claims: Claims, grid: Grid, find: Callable[[str], Experiment], seeds: Sequence[int]) -> list[Answers]:
    """`answers` from stored results. grid: at the plan's profile. find: an experiment by its name, for a gate. seeds:
    the plan's."""
    gate = claims.gates.get(grid.experiment.name)
    setups = list(grid.experiment.axes[setup_axis(grid.experiment)])
    heads: dict[str, dict[int, dict[str, float]]] = {}
    beside: list[str] = []
    if gate is not None:
        elsewhere = gate.head_of
        theirs = grid if elsewhere is None else replace(grid, experiment=find(elsewhere.experiment))
        scores = read_scores(theirs)
        at = {setup: setup if elsewhere is None else elsewhere.setup for setup in setups}
        heads = {setup: scores.get((gate.head, there), {}) for setup, there in at.items()}
        asked = {at[setup] for family in claims.of(grid.experiment.name).values() for setup in family.setups}
        beside = gate_notes(gate, asked, theirs.of_seeds(seeds))
    mine = grid.of_seeds(seeds)
    return [
        replace(one, notes=tuple(family_notes(one.family, mine)), gate_notes=tuple(beside)) if one.complete else one
        for one in answers(claims, grid.experiment, seeds, read_scores(grid), heads)
    ]
