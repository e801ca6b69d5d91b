"""Text of strangers: whatever it holds, what is shown of it is short, on one line, and only letters that print."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.core.text import escaped, markdown_cell, quoted, shown, yaml_string

NASTY = (
    "a\nb", "a\r\nb", "\x1b[31mred\x1b[0m", "\x9b31m", "\u202eabc", "\u2066x\u2069", "\u2028", "\x00", "\ud800",
    "\ufeff", "a|b", "`code`", "[link](http://x)", "<script>", "---", "# head", "key: value", "'",
    '"', "\\", "*b*", " ", "",
    "x" * 10**5, "\n" * 10**5, "null", "yes", "1e3", "~", "@a", "%x", "{a}", "- a", "? a", "é", "日本", "😀",
)  # fmt: skip
texts = st.text(st.characters(), max_size=300) | st.sampled_from(NASTY)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(texts, inner, max_size=30),
    max_leaves=40,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(texts)
def test_what_is_shown_prints(text: str) -> None:
    for found in (shown(text), quoted(text), markdown_cell(text)):
        assert found.isprintable() and len(found) <= 400
    assert escaped(text).isprintable() and shown("x" * 201).endswith("x...") and shown("x" * 200) == "x" * 200
    assert escaped(text) == text or not text.isprintable()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(values)
def test_any_value_is_quoted_in_200_letters(value: Any) -> None:
    found = quoted(value)
    assert found.isprintable() and len(found) <= 200


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.none() | st.booleans() | st.integers(-9, 9) | st.lists(st.sampled_from(["a", "b'", None, 2.5]), max_size=3)
       | st.dictionaries(st.sampled_from(["r", "x"]), st.integers(0, 9)))  # fmt: skip
def test_a_small_value_is_quoted_as_python_writes_it(value: Any) -> None:
    assert quoted(value) == repr(dict(sorted(value.items())) if isinstance(value, dict) else value)


class Bytes(bytes):
    """That nobody may write whole."""

    __repr__ = None  # type: ignore[assignment]


def test_what_is_large_or_deep_costs_little() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, [0] * 10**7, {"a" * 10**7: "b" * 10**7}, 10**100_000, [[[[[1] * 1000] * 1000] * 1000]] * 1000,
                  Bytes(10**7)):  # fmt: skip
        assert len(quoted(value)) <= 200


@settings(max_examples=80, deadline=None, derandomize=True)
@given(texts)
def test_a_card_s_front_matter_keeps_its_one_key(text: str) -> None:
    """As the hub reads it: YAML. What does not print is shown by its code."""
    found = yaml.safe_load(f"base_model: {yaml_string(text)}\ntags: [lora]\n")
    assert found == {"base_model": escaped(text[:2000]), "tags": ["lora"]}


def test_a_card_s_table_keeps_its_columns() -> None:
    """A cell is one code span: nothing in it ends the span, the cell or the row."""
    for text in NASTY:
        found = markdown_cell(text)
        assert found[0] == found[-1] == "`" and "`" not in found[1:-1] and "|" not in found and "\n" not in found
