"""Perplexity and exact match. Kind of evidence: oracle (by hand)."""

from __future__ import annotations

import math

import pytest

from fedlora.training.metrics import METRICS, exact_match, generates, is_better, perplexity


def test_perplexity_is_exp_of_the_mean_over_tokens() -> None:
    """One batch of a token at log 2, one of three tokens at log 8 on average: (1 + 9) / 4 = 2.5 powers of 2."""
    assert perplexity([math.log(2), math.log(8)], [1, 3]) == pytest.approx(2**2.5)
    assert perplexity([1e4], [1]) == math.inf
    assert math.isnan(perplexity([], []))
    assert is_better("perplexity", 2.0, 3.0) and not is_better("perplexity", 3.0, 2.0)


@pytest.mark.parametrize(
    ("answer", "references", "want"),
    [
        ("The Blue, sky!", ["blue sky"], 1.0),  # articles, case and punctuation do not count
        ("blue  sky\n", ["red", "Blue sky."], 1.0),  # nor white space; one reference is enough
        ("theatre", ["atre"], 0.0),  # an article is a word
        ("blue", ["blue sky"], 0.0),
        ("", ["a"], 1.0),  # nothing is left of the reference
    ],
)
def test_exact_match_is_squads(answer: str, references: list[str], want: float) -> None:
    assert exact_match(answer, references) == want


def test_which_metrics_generate() -> None:
    assert {name for name in METRICS if generates(name)} == {"rouge-l", "exact-match"}  # type: ignore[arg-type]
