"""What a number of seeds can show: the formulas against simulated families, their ends, and what `plan` prints of them.
Kinds: oracle (simulation), property."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlora.experiments.claims import Claims, Family
from fedlora.experiments.verdicts import chance_of_equals, per_cent, smallest_gap

DRAWS = 40_000
SLACK = 4 * math.sqrt(0.25 / DRAWS)  # four standard errors of a share at most


def draws(spread: float, seeds: int, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """(mean, standard error) of simulated paired gaps, normal."""
    gaps = gap + spread * np.random.default_rng(0).standard_normal((DRAWS, seeds))
    return gaps.mean(axis=1), gaps.std(axis=1, ddof=1) / math.sqrt(seeds)


CASES = [
    # spread, seeds, questions of the family: stored plans (0.0134, 0.0077, 0.0015 at five seeds), and the ends
    (0.0134, 5, 3), (0.0077, 5, 3), (0.0015, 5, 3), (0.003, 6, 5), (0.002, 4, 9), (0.0005, 2, 1), (0.006, 30, 1),
]  # fmt: skip


@pytest.mark.parametrize(("spread", "seeds", "questions"), CASES)
def test_equals_are_found_equivalent_as_often_as_is_said(spread: float, seeds: int, questions: int) -> None:
    """Expected: the share of simulated questions with true gap 0 whose two one-sided tests both reject."""
    level = 0.05 / questions
    mean, se = draws(spread, seeds, 0.0)
    rejected = stats.t.sf((0.005 - abs(mean)) / se, seeds - 1) <= level
    assert chance_of_equals(spread, 0.005, seeds, level) == pytest.approx(float(rejected.mean()), abs=SLACK)


@pytest.mark.parametrize(("spread", "seeds", "questions"), CASES)
def test_the_smallest_gap_is_found_in_eight_of_ten(spread: float, seeds: int, questions: int) -> None:
    """Expected: the share of simulated questions with that true gap whose t test says that the first is better."""
    level = 0.05 / questions
    gap = smallest_gap(spread, seeds, level, 0.8)
    mean, se = draws(spread, seeds, gap)
    found = (2 * stats.t.sf(abs(mean) / se, seeds - 1) <= level) & (mean > 0)
    assert float(found.mean()) == pytest.approx(0.8, abs=SLACK)


def test_more_seeds_show_more_and_gaps_without_spread_show_all() -> None:
    gaps = [smallest_gap(0.01, n, 0.05, 0.8) for n in (2, 4, 8, 16, 64)]
    chances = [chance_of_equals(0.01, 0.005, n, 0.05) for n in (8, 16, 64, 256)]  # near zero it need not rise
    assert gaps == sorted(gaps, reverse=True) and chances == sorted(chances) and chances[-1] > 0.99
    assert smallest_gap(0.0, 4, 0.05, 0.8) == 0.0 and chance_of_equals(0.0, 0.005, 4, 0.05) == 1.0
    assert smallest_gap(0.02, 6, 0.01, 0.8) == pytest.approx(2 * smallest_gap(0.01, 6, 0.01, 0.8))
    for function in (lambda: smallest_gap(0.1, 1, 0.05, 0.8), lambda: chance_of_equals(0.1, 0.005, 1, 0.05)):
        with pytest.raises(ValueError, match="two seeds or more; got 1"):
            function()


def test_a_family_shares_its_level_among_its_questions() -> None:
    """By hand: two pairs in two set-ups are four questions, each at 0.05 / 4."""
    family = Family(question="?", experiment="e", pairs=[("a", "b"), ("a", "c")], setups=["x", "y"], margin=0.005)
    claims = Claims(families={"f": family})
    for spread in (0.004, 0.01):
        expected = smallest_gap(spread, 6, 0.0125, 0.8), chance_of_equals(spread, 0.005, 6, 0.0125)
        assert claims.shown_by(6, "f", spread) == expected


@pytest.mark.parametrize(
    ("chance", "words"),
    [(0.0, "below 1 %"), (0.0099, "below 1 %"), (0.015, "2 %"), (0.8, "80 %"), (0.99, "99 %"), (1.0, "above 99 %")],
)
def test_never_and_always_are_not_said(chance: float, words: str) -> None:
    assert per_cent(chance) == words
