"""Answers in words: the rows of the decision table, for the command line and for pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedlora.errors import counted
from fedlora.experiments.claims import Claims, Family, Score
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.verdicts import MOST, Weighed
from fedlora.training.metrics import METRICS

COLUMNS = ("question", "set-up", "difference", "95 % interval", "ahead", "beside", "verdict")
MARKS = {"better": "▲", "worse": "▼", "equivalent": "≈", "undecided": "?"}
OUT = "thrown out"  # how the reason of a discarded set-up begins
BELOW = "by less than the margin"


@dataclass(frozen=True)
class Unit:
    """How gaps of a score are written. score: in words. name: of the unit. factor: the unit's number for a gap of 1."""

    score: str
    name: str
    factor: float
    digits: int

    @property
    def words(self) -> str:
        return f"{self.score}, {self.name}"

    def size(self, gap: float, sign: str = "") -> str:
        return f"{self.factor * gap + 0.0:{sign}.{self.digits}f}"

    def margin(self, family: Family) -> str:
        """ "0.005 nats", "1 points"."""
        return f"{self.factor * family.margin:g} {self.name}"


UNITS = {"loss": Unit("log-loss", "nats", 1.0, 4), "accuracy": Unit("accuracy", "points", 100.0, 2)}


def title(found: Answers) -> str:
    """The title of a family's table."""
    family, unit = found.family, UNITS[found.family.metric]
    lower = "" if METRICS[family.metric].larger_is_better else ", lower by this much"
    return (
        f"{found.name}: {family.question} Positive: the first is better ({unit.words}{lower}); margin "
        f"{unit.margin(family)}"
    )


def caption(found: Answers, alpha: float) -> str:
    """The caption of a family's table on a page. alpha: the claims' level."""
    family, count = found.family, len(found.family.questions)
    unit, beside = (f"{UNITS[score].score} in {UNITS[score].name}" for score in (family.metric, family.beside))
    margin = UNITS[family.metric].margin(family)
    if all(a.test is None for a in found.answers):
        return (
            f"None of the {count} question{'s' if count > 1 else ''} has a verdict, so no number is shown. Compared: "
            f"{unit}, on held-out test data after the last round, with a margin of {margin} and {found.there} paired "
            f"seeds."
        )
    points = " (hundredths)" if "accuracy" in (family.metric, family.beside) else ""
    empty = " A question without a verdict has no numbers." if any(a.test is None for a in found.answers) else ""
    return (
        f"*difference*: how much better the first is ({unit}, held-out test data, last round), mean over {found.there} "
        f"paired seeds with its 95 % interval (for one question). Below the margin, {margin}, it does not matter. "
        f"*ahead*: on how many seeds. *beside*: the same for {beside}{points}, without a verdict. The chance of a "
        f"false verdict{' among the ' + str(count) if count > 1 else ''} is at most {alpha:g}, if gaps are nearly "
        f"normal.{empty}"
    )


def headings(family: Family) -> list[str]:
    """`COLUMNS` for people: the two scores by name, with their units."""
    own, beside = UNITS[family.metric], UNITS[family.beside]
    told = {"difference": f"difference: {own.words}", "beside": f"beside: {beside.words}"}
    return [told.get(column, column) for column in COLUMNS]


def seeds_in_words(count: int) -> str:
    """ "452"; "10000 or more" if the count stopped (`verdicts.MOST`)."""
    return f"{count} or more" if count >= MOST else str(count)


def verdict_in_words(answer: Answer) -> str:
    """The verdict, and whether its gap is below the margin; or why there is none."""
    if answer.verdict is None:
        return answer.why
    return f"{answer.verdict} {BELOW}" if answer.below_margin else answer.verdict


def by_score(found: Sequence[Answers]) -> dict[Score, list[Answers]]:
    """The families of each score, because a picture, with its margin, has one unit."""
    return {score: [one for one in found if one.family.metric == score] for score in
            dict.fromkeys(one.family.metric for one in found)}  # fmt: skip


def margins(found: Sequence[Answers]) -> dict[str, float]:
    """Score -> the smallest margin of its families."""
    return {score: min(one.family.margin for one in of) for score, of in by_score(found).items()}


def mark(answer: Answer) -> str:
    """The verdict as one sign, in brackets if its gap is below the margin; ✕ if the gate discarded the set-up, – if
    there is no number."""
    if answer.verdict is not None:
        return f"({MARKS[answer.verdict]})" if answer.below_margin else MARKS[answer.verdict]
    return "✕" if answer.why.startswith(OUT) else "–"


def sentence(found: Answers, answer: Answer) -> str:
    """One answer for a reader who knows none of our terms."""
    first, second, test = answer.question.first, answer.question.second, answer.test
    if test is None or answer.verdict is None:
        return f"{first} against {second}: {answer.why}."
    unit = UNITS[found.family.metric]
    (mean, interval), limit = in_unit(test, unit), f"{unit.factor * test.margin:g}"
    gap = f"{mean} {unit.name} ({interval})"
    if answer.verdict == "equivalent":
        return f"{first} and {second} do equally well: {unit.score} differs by {gap}, less than {limit}."
    if answer.verdict == "undecided":
        return f"{first} or {second}: not decided by {len(test.gaps)} seeds. {gap}."
    up = METRICS[found.family.metric].larger_is_better
    way = "higher" if up == (answer.verdict == "better") else "lower"
    shown = f"{unit.score} is {mean.lstrip('+-')} {unit.name} {way}"
    if not test.low < 0 < test.high:  # otherwise one question alone would not be decided; its family is
        shown += f" ({' to '.join(unit.size(x) for x in sorted(map(abs, (test.low, test.high))))})"
    than = f"{first} is {answer.verdict} than {second}"
    if answer.below_margin:
        shown = f"{shown}. A gap below {limit} is too small to matter; that it is no larger is not shown"
        than = f"{than}, {BELOW}"
    return f"{than}: {shown}.{_beside(found, answer)}"


def _beside(found: Answers, answer: Answer) -> str:
    if answer.beside is None:
        return ""
    unit = UNITS[found.family.beside]
    return f" {unit.score.capitalize()} {unit.size(answer.beside.mean, '+')} {unit.name}."


def tally(found: Sequence[Answers]) -> dict[str, int]:
    """Verdict -> the number of questions with it, over several families; "no verdict" for those without one."""
    counts: dict[str, int] = {}
    for one in found:
        for answer in one.answers:
            word = "no verdict" if answer.verdict is None else verdict_in_words(answer)
            counts[word] = counts.get(word, 0) + 1
    return counts


def tally_in_words(found: Sequence[Answers]) -> str:
    """ "9 questions: 5 better, 4 undecided."; empty if there are none."""
    counts = tally(found)
    told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{counted(sum(counts.values()), 'question')}: {told}." if counts else ""


def kind(answer: Answer) -> str:
    """Its class in the style sheet."""
    return answer.verdict or ("out" if answer.why.startswith(OUT) else "none")


def rows(found: Answers) -> list[list[str]]:
    """One row per question, in the order of `COLUMNS`; without numbers until all seeds have run."""
    if not found.complete:
        waiting = f"{found.there} of {found.wanted} seeds"
        return [[f"{q.first} against {q.second}", q.setup, "", "", "", "", waiting] for q in found.family.questions]
    return [
        [f"{a.question.first} against {a.question.second}", a.question.setup, *_numbers(found, a), verdict_in_words(a)]
        for a in found.answers
    ]


def _numbers(found: Answers, answer: Answer) -> list[str]:
    if answer.test is None:
        return [""] * 4
    test = answer.test
    ahead = f"{test.ahead} of {len(test.gaps)}"
    mean, interval = in_unit(test, UNITS[found.family.metric])
    if answer.beside is None:
        return [mean, interval, ahead, ""]
    beside, range_of_it = in_unit(answer.beside, UNITS[found.family.beside])
    return [mean, interval, ahead, f"{beside} ({range_of_it})"]


def in_unit(test: Weighed, unit: Unit) -> tuple[str, str]:
    """(mean, interval) with a sign."""
    return unit.size(test.mean, "+"), f"{unit.size(test.low, '+')} to {unit.size(test.high, '+')}"


def remarks(found: Sequence[Answers]) -> list[str]:
    """The notes below the tables: discarded set-ups, the gate's results, and the scores' origin."""
    lines = []
    for one in found:
        for gated in one.gates:
            if gated.lost:
                lines.append(
                    f"{one.family.experiment}: whether LoRA carries {gated.setup} is not known. There is no number "
                    f"for {', '.join(gated.lost)}: it failed or diverged."
                )
            elif not gated.passed:
                ahead = ", ".join(f"{k} {v:+.4f} ± {gated.spread[k]:.4f}" for k, v in gated.ahead.items())
                lines.append(
                    f"{one.family.experiment}: {gated.setup} is thrown out. {one.there} seeds do not show that LoRA "
                    f"beats a head alone there by more than {gated.margin:g} nats ({ahead})."
                )
        lines += [f"{one.family.experiment}: {note}" for note in one.gate_notes]
        lines += [f"{one.name}: {note}" for note in one.notes]
    return list(dict.fromkeys(lines))


def claim_rows(claims: Claims, found: Sequence[Answers]) -> list[list[str]]:
    """A row for each claim of the paper: its sentence, its correction, and its families' verdicts."""
    by_name = {one.name: one for one in found}
    made = []
    for name, claim in claims.claims.items():
        said = [f"{family}: {_tally(by_name.get(family))}" for family in claims.asked_by(name)]
        words = f"{claim.sentence} (Corrected: {claim.corrected})" if claim.corrected else claim.sentence
        made.append([name, words, claim.where, "; ".join(said) or "no family asks it: the paper's scale"])
    return made


def _tally(found: Answers | None) -> str:
    if found is None:
        return "no plan yet"
    if not found.complete:
        return f"{found.there} of {found.wanted} seeds"
    return ", ".join(f"{count} {word}" for word, count in tally([found]).items())


def records(found: Answers) -> list[dict[str, Any]]:
    """Each answer for programs, with all digits; only the questions until all seeds have run."""
    bare = [Answer(question, None, f"{found.there} of {found.wanted} seeds") for question in found.family.questions]
    return [
        {
            "first": a.question.first, "second": a.question.second, "setup": a.question.setup,
            "verdict": a.verdict, "below_margin": a.below_margin, "why": a.why or None,
            **({} if a.test is None else {
                "mean": a.test.mean, "low": a.test.low, "high": a.test.high, "sd": a.test.spread,
                "p_same": a.test.p_same, "p_matters": a.test.p_matters, "ahead": a.test.ahead,
            }),
            **({} if a.beside is None else {
                "beside_mean": a.beside.mean, "beside_low": a.beside.low, "beside_high": a.beside.high,
            }),
        }
        for a in found.answers or bare
    ]  # fmt: skip


def plain_answers(found: Answers) -> dict[str, Any]:
    """All of a family's numbers, for JSON."""
    return {
        "family": found.name, "experiment": found.family.experiment, "metric": found.family.metric,
        "margin": found.family.margin, "seeds": found.there, "planned": found.wanted,
        "answers": [
            {**told, **({} if a.test is None else {"gaps": list(a.test.gaps)})}
            for told, a in zip(records(found), found.answers, strict=False)
        ],
        "gates": [vars(gated) for gated in found.gates], "notes": [*found.gate_notes, *found.notes],
    }  # fmt: skip
