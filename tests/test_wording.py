"""Wording is free: a test asks a message for its facts and names, and every sentence of src can be rewritten.

Read from the syntax of the tests: text in `match=`, before `in`, beside `==`, in `re.search` and its like. A clause of
five words there is prose: write the facts instead, as in `match=r"min_size.*max_draws"` or `"--resume" in said`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WORDS = 5
ASKING = {"search", "match", "fullmatch", "startswith", "endswith", "count", "index", "partition", "rpartition"}
# Files whose words are a format or not ours.
MEANT = {"data/test_demo.py", "data/test_superni.py"}


def prose(text: str) -> bool:
    """A clause of `WORDS` lower-case words: between gaps of a pattern, marks and cells.

    What stands in quotes or has a mark in it is a name or a command, and so a fact.
    """
    clauses = re.split(r"\.[*+]\??|[\n|│;:,()]|\. ", re.sub(r"`[^`]*`", "``", text))
    return any(len(re.findall(r"(?<![\w'.=/\\-])[a-z][a-z']+(?![\w=/-]|\.\w)", each)) >= WORDS for each in clauses)


def asked(node: ast.AST) -> list[ast.AST]:
    """The expressions of this node that a message is compared with."""
    if isinstance(node, ast.keyword) and node.arg == "match":
        return [node.value]
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.In | ast.NotIn) for op in node.ops):
        equal = any(isinstance(op, ast.Eq) for op in node.ops)
        return [node.left, *node.comparators] if equal else [node.left]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING:
        return node.args[:1]
    return []


def texts(node: ast.AST) -> Iterator[str]:
    """All text below a node; an f-string is one text, with {} for what it fills in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.Lambda | ast.Call):
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def found(source: str) -> set[str]:
    """The prose that a test's messages are compared with."""
    return {t for node in ast.walk(ast.parse(source)) for part in asked(node) for t in texts(part) if prose(t)}


@pytest.mark.parametrize(
    "source",
    [
        'with raises(E, match=rf"{name}.* is zero in every module of the two"): pass',
        'assert "acme: a second reply in one round came" in said',
        'assert said == f"round {k} waits for all of them"',
        'assert re.search(r"7: the update is zero in every module", said)',
    ],
)
def test_prose_is_found_wherever_it_is_asked_for(source: str) -> None:
    assert len(found(source)) == 1


def test_no_test_asks_for_a_sentence() -> None:
    names = {str(path.relative_to(TESTS)): path for path in sorted(TESTS.rglob("*.py"))}
    wrong = {name: found(path.read_text("utf-8")) for name, path in names.items() if name not in MEANT}
    assert not {name: hits for name, hits in wrong.items() if hits}, "ask for facts and names, not for sentences"
