"""Metrics of answers and which way they are better. Kind of evidence: *oracle* - numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from fedlora.errors import ConfigError
from fedlora.training.metrics import (
    METRICS,
    MetricName,
    accuracy,
    by_guessing,
    find_metric,
    is_better,
    macro_f1,
    mean_loss,
    worst_of,
)

# Ten examples of three classes. Class 0: 4 of 5 found; class 1: 1 of 3; class 2: 2 of 2.
LABELS = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
SAID = [0, 0, 0, 0, 1, 0, 1, 2, 2, 2]


def test_scores_of_three_classes_by_hand() -> None:
    """F1: class 0 has TP 4, FP 1, FN 1: 8/10; class 1 TP 1, FP 1, FN 2: 2/5; class 2 TP 2, FP 1, FN 0: 4/5."""
    assert accuracy(LABELS, SAID) == pytest.approx(7 / 10)
    assert macro_f1(LABELS, SAID) == pytest.approx((8 / 10 + 2 / 5 + 4 / 5) / 3)


def test_a_class_without_examples_counts_nowhere_but_costs_whoever_names_it() -> None:
    """Class 1 is said twice and is never right: F1 (2/3 + 0) / 2 of the two that occur."""
    labels, said = [0, 0, 0, 0], [0, 0, 1, 1]
    assert macro_f1(labels, said) == pytest.approx((2 / 3) / 2)


def test_nothing_to_measure_is_nan_and_never_better() -> None:
    assert all(math.isnan(measure([], [])) for measure in (accuracy, macro_f1, mean_loss))
    assert not is_better("accuracy", math.nan, 0.1) and not is_better("accuracy", None, 0.1)
    assert is_better("loss", 9.0, math.nan) and is_better("loss", 9.0, None)


def test_which_way_is_better() -> None:
    """The loss falls; everything else rises; by more than `by`, not by as much."""
    assert {name for name, metric in METRICS.items() if not metric.larger_is_better} >= {"loss"}
    assert is_better("loss", 0.5, 0.6) and not is_better("loss", 0.6, 0.5)
    assert is_better("macro_f1", 0.6, 0.5) and not is_better("macro-f1", 0.5, 0.6)
    assert not is_better("loss", 0.5, 0.5) and not is_better("accuracy", 0.5, 0.5)
    assert is_better("loss", 0.25, 0.5, by=0.125) and not is_better("loss", 0.375, 0.5, by=0.125)


def test_the_worst_is_the_first_of_equals() -> None:
    def value(item: tuple[str, Any]) -> Any:
        return item[1]

    items = [("a", 0.5), ("b", 0.25), ("c", 0.5), ("d", 0.25)]
    assert worst_of("accuracy", items, value) == ("b", 0.25)
    assert worst_of("loss", items, value) == ("a", 0.5)
    assert worst_of("loss", [("x", 0.5), ("y", math.nan), ("z", 0.75)], value)[0] == "y"  # type: ignore[index]


def test_names_of_configs_and_of_scores_are_one_table() -> None:
    assert set(get_args(MetricName)) == set(METRICS)
    assert find_metric("macro_f1") is METRICS["macro-f1"] is find_metric("macro-f1")
    with pytest.raises(ConfigError, match=r"'acuracy'; there are accuracy, macro-f1"):
        find_metric("acuracy")


def test_perplexity_is_exp_of_the_mean_over_tokens() -> None:
    """Two batches: a mean of 1 over one token and of 2 over three; and no overflow of a diverged loss."""
    assert METRICS["loss"].measure([1.0, 2.0], [1, 3]) == 7 / 4
    assert METRICS["perplexity"].measure([1.0, 2.0], [1, 3]) == pytest.approx(math.exp(7 / 4))
    assert METRICS["perplexity"].measure([1e6], [1]) == math.inf


@pytest.mark.parametrize(
    ("answer", "references", "want"),
    [("The  cat!", ["a cat"], 1.0), ("cats", ["cat"], 0.0), ("ten", ["9", "An ten."], 1.0), ("", ["the"], 1.0)],
)
def test_exact_match_is_squads(answer: str, references: list[str], want: float) -> None:
    """Lower case, no punctuation, no articles, single spaces (Rajpurkar et al., 2016)."""
    assert METRICS["exact-match"].measure(answer, references) == want


def test_rouge_l_by_hand() -> None:
    """2 LCS / (m + n) with LCS, m and n counted by hand (Lin, 2004; beta = 1); stems by Porter; the best reference."""
    measure = METRICS["rouge-l"].measure
    assert measure("a b c d a e", ["a b f d a e"]) == pytest.approx(5 / 6)
    assert measure("a b c", ["x", "a b", "a b c d e"]) == pytest.approx(4 / 5)  # 0, 2*2/5 = 4/5, 2*3/8 = 3/4
    assert measure("Running dogs jumped!", ["run dog jumps"]) == 1.0


def test_guessing_by_hand() -> None:
    """Each of K classes with probability 1 / K; nothing to guess with one class, or for other metrics."""
    assert by_guessing("loss", 4) == pytest.approx(math.log(4))
    assert (by_guessing("accuracy", 4), by_guessing("macro-f1", 4)) == (0.25, None)
    assert by_guessing("accuracy", 1) is None
