"""Answers in words: the rows of the decision table, for the command line and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlora.experiments.claims import Claims
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.verdicts import Weighed
from fedlora.training.metrics import METRICS

COLUMNS = ("question", "set-up", "difference", "95 % interval", "ahead", "beside", "verdict")
MARKS = {"better": "▲", "worse": "▼", "equivalent": "≈", "undecided": "?"}
OUT = "thrown out"  # how a verdict that the gate took begins
UNITS = {"loss": ("log-loss, nats", 1.0, 4), "accuracy": ("accuracy, points", 100.0, 2)}  # words, factor, digits


def title(found: Answers) -> str:
    """What a family's table shows."""
    family = found.family
    unit, _, digits = UNITS[family.metric]
    margin = f"{family.margin:.{digits}f}".rstrip("0")
    lower = "" if METRICS[family.metric].larger_is_better else ", lower by this much"
    return f"{found.name}: {family.question} Positive: the first is better ({unit}{lower}); margin {margin}"


def mark(answer: Answer) -> str:
    """The verdict as one sign; ✕ where the gate threw the set-up out, – where there is no number."""
    if answer.verdict is not None:
        return MARKS[answer.verdict]
    return "✕" if answer.why.startswith(OUT) else "–"


def sentence(found: Answers, answer: Answer) -> str:
    """One answer for somebody who has not read a word of us."""
    first, second, test = answer.question.first, answer.question.second, answer.test
    if test is None or answer.verdict is None:
        return f"{first} against {second}: {answer.why}."
    score = found.family.metric
    name, (_, factor, digits) = {"loss": "log-loss"}.get(score, score), UNITS[score]
    mean, interval = in_unit(test, score)
    if answer.verdict == "equivalent":
        limit = f"{factor * test.margin:.{digits}f}".rstrip("0")
        return f"{first} and {second} do equally well: {name} differs by {mean} ({interval}), less than {limit}."
    if answer.verdict == "undecided":
        return f"{first} or {second}: not decided by {len(test.gaps)} seeds. {mean} ({interval})."
    up = METRICS[score].larger_is_better
    size, ends = mean.lstrip("+-"), sorted(abs(factor * x) for x in (test.low, test.high))
    way = "higher" if up == (answer.verdict == "better") else "lower"
    shown = f"{name} is {size} {way} ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})"
    if test.low < 0 < test.high:  # one question alone would not be decided; its family is
        shown = f"{name} is {size} {way}"
    return f"{first} is {answer.verdict} than {second}: {shown}.{_beside(found, answer)}"


def _beside(found: Answers, answer: Answer) -> str:
    if answer.beside is None:
        return ""
    mean, _ = in_unit(answer.beside, found.family.beside)
    name, _, unit = UNITS[found.family.beside][0].partition(", ")
    return f" {name.capitalize()} {mean} {unit}."


def tally(found: Sequence[Answers]) -> dict[str, int]:
    """Verdict -> how many questions have it, of several families; "no verdict" for those without one."""
    counts: dict[str, int] = {}
    for one in found:
        for answer in one.answers:
            word = answer.verdict or "no verdict"
            counts[word] = counts.get(word, 0) + 1
    return counts


def rows(found: Answers) -> list[list[str]]:
    """A row a question, in the order of `COLUMNS`; before all seeds are there without a number."""
    if not found.complete:
        waiting = f"{found.there} of {found.wanted} seeds"
        return [[f"{q.first} against {q.second}", q.setup, "", "", "", "", waiting] for q in found.family.questions]
    return [
        [f"{a.question.first} against {a.question.second}", a.question.setup, *_numbers(found, a), a.verdict or a.why]
        for a in found.answers
    ]


def _numbers(found: Answers, answer: Answer) -> list[str]:
    if answer.test is None:
        return [""] * 4
    test = answer.test
    ahead = f"{test.ahead} of {len(test.gaps)}"
    mean, interval = in_unit(test, found.family.metric)
    beside = "" if answer.beside is None else " ".join(in_unit(answer.beside, found.family.beside, bracket=True))
    return [mean, interval, ahead, beside]


def in_unit(test: Weighed, score: str, *, bracket: bool = False) -> tuple[str, str]:
    """(mean, interval) with a sign, in the unit of `UNITS`."""
    _, factor, digits = UNITS[score]
    mean, low, high = (f"{factor * value + 0.0:+.{digits}f}" for value in (test.mean, test.low, test.high))
    return mean, f"({low} to {high})" if bracket else f"{low} to {high}"


def remarks(found: Sequence[Answers]) -> list[str]:
    """What stands under the tables: what was thrown out, and what the gate found."""
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
    return list(dict.fromkeys(lines))


def claim_rows(claims: Claims, found: Sequence[Answers]) -> list[list[str]]:
    """A row for each claim of the paper: its sentence, and what the families that it is asked by came to."""
    by_name = {one.name: one for one in found}
    made = []
    for name, claim in claims.claims.items():
        said = [f"{family}: {_tally(by_name.get(family))}" for family in claims.asked_by(name)]
        made.append([name, claim.sentence, claim.where, "; ".join(said) or "no family asks it: the paper's scale"])
    return made


def _tally(found: Answers | None) -> str:
    if found is None:
        return "no plan yet"
    if not found.complete:
        return f"{found.there} of {found.wanted} seeds"
    return ", ".join(f"{count} {word}" for word, count in tally([found]).items())


def plain_answers(found: Answers) -> dict[str, Any]:
    """All of a family's numbers, for JSON."""
    return {
        "family": found.name, "experiment": found.family.experiment, "metric": found.family.metric,
        "margin": found.family.margin, "seeds": found.there, "planned": found.wanted,
        "answers": [
            {
                "first": a.question.first, "second": a.question.second, "setup": a.question.setup,
                "verdict": a.verdict, "why": a.why or None,
                **({} if a.test is None else {
                    "mean": a.test.mean, "low": a.test.low, "high": a.test.high, "sd": a.test.spread,
                    "p_same": a.test.p_same, "p_matters": a.test.p_matters, "ahead": a.test.ahead,
                    "gaps": list(a.test.gaps),
                }),
                **({} if a.beside is None else {
                    "beside_mean": a.beside.mean, "beside_low": a.beside.low, "beside_high": a.beside.high,
                }),
            }
            for a in found.answers
        ],
        "gates": [vars(gated) for gated in found.gates],
    }  # fmt: skip
