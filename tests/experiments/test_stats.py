"""Paired comparisons. Kind: oracle (scipy's tests, Holm's and Schuirmann's definitions, simulation)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fedlora.experiments import stats
from fedlora.experiments.stats import Gap, holm, paired, seeds_needed, verdicts


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_gap_is_scipys_paired_t_test_and_two_one_sided_ones(n: int) -> None:
    draw = np.random.default_rng(n)
    ours, theirs = draw.normal(0.02, 0.1, n), draw.normal(0.0, 0.1, n)
    found, test = paired(list(ours - theirs), margin=0.05), scipy_stats.ttest_rel(ours, theirs)
    interval = test.confidence_interval(0.95)
    assert (found.n, found.mean) == (n, pytest.approx(float(np.mean(ours - theirs))))
    assert (found.p, found.low, found.high) == pytest.approx((test.pvalue, interval.low, interval.high), abs=1e-14)
    below = scipy_stats.ttest_1samp(ours - theirs, 0.05, alternative="less").pvalue
    above = scipy_stats.ttest_1samp(ours - theirs, -0.05, alternative="greater").pvalue
    assert found.matters == pytest.approx(max(below, above), abs=1e-14), "equivalence: the worse of the two"


def test_without_a_spread_there_is_no_interval() -> None:
    """One seed; the same gap on each, 0 too: accuracies of few texts are often equal, and that decides nothing."""
    for gaps in ([0.1], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]):
        found = paired(gaps, 0.05)
        assert found.mean == pytest.approx(gaps[0]) and all(map(math.isnan, (found.p, found.matters, found.low)))


def test_holms_p_is_its_definition() -> None:
    """The smallest is multiplied by the count, the next by one less, and none is below the one before it. By hand; one
    that is not known counts."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02, math.nan])[0] == pytest.approx(0.04) and math.isnan(holm([0.02, math.nan])[1])


def test_verdicts_by_hand() -> None:
    """Two hypotheses a pair, of which at most one is true: with m pairs undecided p is held against 0.05 / m."""
    family = {
        "far": Gap(8, 0.2, p=1e-6, matters=0.99), "near": Gap(8, 0.001, p=0.8, matters=1e-5),
        "open": Gap(8, 0.05, p=0.06, matters=0.4), "seed": Gap(1, 0.3),
    }  # fmt: skip
    found = verdicts(family, larger_is_better=True)
    assert found == {"far": "better", "near": "equivalent", "open": "undecided", "seed": "undecided"}
    assert verdicts(family, larger_is_better=False)["far"] == "worse"
    pair = {"a": Gap(8, 0.1, p=0.02, matters=0.9), "b": Gap(8, 0.1, p=0.03, matters=0.9)}
    assert verdicts(pair, larger_is_better=True) == {"a": "better", "b": "undecided"}, "0.02 <= 0.05 / 2 < 0.03"
    pair["a"] = Gap(8, 0.01, p=0.02, matters=0.01)
    assert verdicts(pair, larger_is_better=True) == {"a": "equivalent", "b": "better"}, "of a nothing is left: 0.05 / 1"


def test_all_verdicts_together_err_as_rarely_as_one() -> None:
    """Six pairs: three equal, three that differ by exactly the margin. Wrong: better or worse of the first, equivalent
    of the others. 5 % of 400 are 20; three standard deviations more are 33."""
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        means = [0.0, 0.0, 0.0, 0.1, 0.1, -0.1]
        family = {k: paired(list(draw.normal(mean, 0.1, 6)), 0.1) for k, mean in enumerate(means)}
        words = verdicts(family, larger_is_better=True)
        wrong += bool(
            {words[k] for k in (0, 1, 2)} & {"better", "worse"} or "equivalent" in [words[k] for k in (3, 4, 5)]
        )
    assert wrong <= 33


def test_the_seeds_needed_find_equal_ones_equivalent_as_often_as_promised() -> None:
    """By simulation of the two one-sided tests at that number of seeds, and at two fewer."""
    sd, margin, draw = 0.1, 0.08, np.random.default_rng(1)
    n = seeds_needed(sd, margin, 3)

    def power(count: int) -> float:
        x = draw.normal(0, sd, (20_000, count))
        bound = scipy_stats.t.ppf(1 - stats.ALPHA / 3, count - 1)
        error = x.std(axis=1, ddof=1) / math.sqrt(count)
        return float(np.mean((margin - np.abs(x.mean(axis=1))) / error > bound))

    assert power(n) >= 0.79 and power(n - 2) < 0.8
    assert seeds_needed(10.0, 1e-6) == stats.MOST
