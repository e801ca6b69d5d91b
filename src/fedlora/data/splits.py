"""Splits one data set into train, validation and test parts, stratified and without leaks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fedlora.data.text import TextData
from fedlora.errors import DataError
from fedlora.seeds import derive_seed


def split(data: TextData, *, validation: float, test: float, seed: int) -> tuple[TextData, TextData, TextData]:
    """Split into (train, validation, test) at random, without leaks: copies of one input all go to the same part.

    Two examples are copies if their texts (and pair or history) agree after case folding and collapsing white space.
    Classification is stratified; a group of copies counts as the class of its first example. Each part is in random
    order. The shuffled groups are dealt class by class, each to the part furthest below its share. Without copies,
    every size is then within 4/3 of its share, and within 2 for each class; groups of copies cannot be cut.

    Args:
        data: N examples, N >= 1.
        validation, test: fractions of N in [0, 1), with a sum below 1. 0 gives an empty part.
        seed: the run's seed; the stream is `derive_seed(seed, "split")`.

    Raises:
        DataError: impossible fractions, or a requested part would be empty.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> train, validation, test = split(data, validation=0.2, test=0.2, seed=0)
        >>> len(train) + len(validation) + len(test) == len(data)
        True
    """
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise DataError(f"validation and test are fractions whose sum is below 1; got {validation} and {test}.")
    groups: dict[tuple[str, str], list[int]] = {}
    for i, one in enumerate(inputs(data)):
        groups.setdefault(one, []).append(i)
    strata: dict[int, list[list[int]]] = {}
    for members in groups.values():
        strata.setdefault(0 if data.labels is None else data.labels[members[0]], []).append(members)

    rng = np.random.default_rng(derive_seed(seed, "split"))
    shares = (1.0 - validation - test, validation, test)
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    dealt = 0
    for _, stratum in sorted(strata.items()):
        for g in rng.permutation(len(stratum)).tolist():
            members = stratum[g]
            dealt += len(members)
            behind = [share * dealt - len(part) for share, part in zip(shares, parts, strict=True)]
            parts[behind.index(max(behind))].extend(members)
    for name, share, part in zip(("train", "validation", "test"), shares, parts, strict=True):
        if share > 0 and not part:
            raise DataError(
                f"the {name} part would be empty: its share is {share:.4g} of {len(data)} examples, which are "
                f"{len(groups)} distinct inputs. Ask for a larger share, for 0, or bring more data."
            )
    train, val, tst = (data.select(rng.permutation(np.array(part, dtype=np.int64))) for part in parts)
    return train, val, tst


Parts = tuple[TextData, TextData, TextData]  # train, validation, test


def rearranged(parts: Parts, goes: Sequence[Sequence[int]]) -> Parts:
    """The same examples in other parts: goes[j][i] is the part that example i of part j goes to. What comes stands
    behind what stays."""
    new = []
    for k in range(3):
        order = (k, *(j for j in range(3) if j != k))
        new.append(TextData.concat([parts[j].select(np.flatnonzero(np.equal(goes[j], k))) for j in order]))
    return new[0], new[1], new[2]


def inputs(data: TextData) -> list[tuple[str, str]]:
    """Each example's text, and its pair or history ("" without), normalised so that two copies are equal."""
    pairs = data.pair or ("",) * len(data)
    if data.history is not None:  # the input is everything the model reads before its answer
        pairs = tuple(" ".join(content for _, content in before) for before in data.history)
    return [(_normalised(text), _normalised(pair)) for text, pair in zip(data.text, pairs, strict=True)]


def digests(data: TextData) -> list[str]:
    """Each example's input in 32 hexadecimal digits of SHA-256, by which two copies are known as such."""
    return [hashlib.sha256(ascii(one).encode()).hexdigest()[:32] for one in inputs(data)]


def _normalised(text: str) -> str:
    return " ".join(text.split()).casefold()
