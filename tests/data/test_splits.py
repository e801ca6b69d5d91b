"""Splits neither leak nor lose examples.

Kinds of evidence: *property* (drawn data with copies), *oracle* (the bound that the docstring of `split` proves).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data import TextData
from fedlora.data.splits import inputs, split
from fedlora.errors import DataError

SEEDS = st.integers(0, 2**40)
SPELLINGS = ("Film {}", "  film   {} ", "FILM\n{}")


def sentences(labels: list[int], names: tuple[str, ...] = ("no", "yes")) -> TextData:
    return TextData("classification", tuple(f"s{i}" for i in range(len(labels))), None, tuple(labels), None, names)


def examples(*parts: TextData) -> Counter[tuple[object, ...]]:
    return Counter(row for p in parts for row in zip(p.text, p.pair or p.text, p.labels or p.responses, strict=True))  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 2)), min_size=12, max_size=80),
    kind=st.sampled_from(["classes", "pairs", "talks"]),
    seed=SEEDS,
)
def test_nothing_is_lost_and_no_copies_straddle(words: list[tuple[int, int]], kind: str, seed: int) -> None:
    """A copy is one input in any case and spacing, whatever its label or response; an input is all that is read before
    the answer: with its pair, or with what was said before."""
    said = tuple(SPELLINGS[i % 3].format(word) for i, (word, _) in enumerate(words))
    labels, same = tuple(y for _, y in words), ("go on",) * len(words)
    data = {
        "classes": TextData("classification", said, None, labels, None, ("a", "b", "c")),
        "pairs": TextData("classification", same, said, labels, None, ("a", "b", "c")),
        "talks": TextData("instruction", same, responses=said, history=tuple((("user", text),) for text in said)),
    }[kind]
    try:
        parts = split(data, validation=0.2, test=0.3, seed=seed)
    except DataError:
        assert len({word for word, _ in words}) < 8  # only a handful of distinct inputs can leave a part empty
        return
    assert examples(*parts) == examples(data)
    keys = [set(inputs(part)) for part in parts]
    assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
    assert len(keys[0] | keys[1] | keys[2]) == len({word for word, _ in words})
    assert parts == split(data, validation=0.2, test=0.3, seed=seed)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 60), min_size=2, max_size=4).filter(lambda c: sum(c) >= 60),
    validation=st.sampled_from([0.1, 0.15, 0.3]),
    test=st.sampled_from([0.1, 0.25]),
    seed=SEEDS,
)
def test_sizes_and_strata(counts: list[int], validation: float, test: float, seed: int) -> None:
    """Without copies the shares after every deal sum to one over three parts, so the receiver was at least 1/3
    behind: a part is never over 2/3 ahead, hence never over 4/3 behind; a class lies between two such moments."""
    data = sentences([k for k, n in enumerate(counts) for _ in range(n)], names=tuple("abcd"[: len(counts)]))
    shares = (1 - validation - test, validation, test)
    for share, part in zip(shares, split(data, validation=validation, test=test, seed=seed), strict=True):
        assert abs(len(part) - share * len(data)) <= 4 / 3 + 1e-9
        for k, n in enumerate(counts):
            assert abs((part.labels or ()).count(k) - share * n) <= 2 + 1e-9


def test_seeds_differ_and_parts_are_mixed() -> None:
    data = sentences([0] * 100 + [1] * 100)
    one, other = (split(data, validation=0.2, test=0.2, seed=seed) for seed in (0, 1))
    assert set(one[2].text) != set(other[2].text)
    for part in one:  # sorted input, mixed output: a prefix of a part is a fair sample
        assert any(a > b for a, b in pairwise(part.labels or ()))


def test_shares() -> None:
    """0 is an empty part, of the same classes; what cannot be is refused with its numbers."""
    data = sentences([0, 1] * 10)
    parts = split(data, validation=0, test=0, seed=0)
    assert [*map(len, parts)] == [20, 0, 0] and parts[1].label_names == ("no", "yes")
    assert [*map(len, split(data, validation=0.0, test=0.5, seed=0))] == [10, 0, 10]
    for validation, test in ((-0.1, 0.1), (0.5, 0.5), (float("nan"), 0.1)):
        with pytest.raises(DataError, match="sum is below 1"):
            split(data, validation=validation, test=test, seed=0)
    with pytest.raises(DataError, match=r"test part .*0\.01 of 10 examples"):
        split(sentences([0, 1] * 5), validation=0, test=0.01, seed=0)
    with pytest.raises(DataError, match="are 1 distinct inputs"):
        split(TextData("instruction", ("q",) * 9, responses=("r",) * 9), validation=0, test=0.3, seed=0)
