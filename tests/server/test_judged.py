"""What is told of a robust rule: one sentence, one table. Kind: unit, expected words by hand."""

from __future__ import annotations

import re
from typing import Any

from fedlora.server.judged import in_words, over_rounds


def line(rule: str, **c: float) -> dict[str, Any]:
    """c: the coefficients of clients of one weight."""
    one = {"weight": 1 / len(c), "norm": 1.0, "reason": ""}
    return {"rule": rule, "clients": {name: {**one, "coefficient": x} for name, x in c.items()}}


def test_a_sentence_names_who_counts_for_less() -> None:
    """Left out: 0 alone; held back: below 95 % of the weight, the least first; four names, and how many more."""
    assert in_words(line("clip (threshold = 0.5)", a=0.25, b=0.24, c=0.25, d=0.25)) == ""
    said = in_words(line("geometric-median", a=0.5, b=0.2, c=0.0125, d=0.0))
    assert re.fullmatch(r"geometric-median left out d \(1 of 4 .* held back c to 5% .*, b to 80% .*", said)
    said = in_words(line("krum (f = 2) after mixing", **{f"c{k}": float(k == 7) for k in range(9)}))
    assert said == "krum left out c0, c1, c2, c3 and 4 more (8 of 9 clients)"


def test_a_table_sums_up_the_rounds() -> None:
    """Means over the rounds in which a client counted; who lost most comes first; other lines have no rule."""
    lines = [{"robust": line("krum", a=1.0, b=0.0)}, {"robust": line("krum", a=0.75, b=0.25)}, {}, {"robust": None}]
    assert over_rounds(lines) == {
        "b": {"rounds": 2, "left_out": 1, "weight": 0.5, "coefficient": 0.125},
        "a": {"rounds": 2, "left_out": 0, "weight": 0.5, "coefficient": 0.875},
    }
    assert [*over_rounds(lines)] == ["b", "a"] and over_rounds([{}]) == {}
