"""Wording is free: a test asks a message for its facts and names, and every sentence of src can be rewritten.

Read from the syntax of the tests: what stands in `match=`, before `in`, beside `==`, in `re.search` and its like, and
in the tables and constants whose names are used there. A clause of five words in one of them is prose: write the facts
instead, as in `match=r"min_size.*max_draws"` or `"acme" in said and "--resume" in said`.
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
LOOKED_AT = {ast.keyword, ast.Compare, ast.Call, ast.Assign, ast.AnnAssign, ast.For, ast.comprehension}

# Files whose words are a format or not ours, or the words of the test itself.
MEANT = {
    "data/test_demo.py": "a review of the packaged data",
    "data/test_superni.py": "Alpaca's two prompts, given to a model",
}


def prose(text: str) -> bool:
    """A clause of `WORDS` lower-case words: between gaps of a pattern, marks and cells.

    What stands in quotes or has a mark in it is a name or a command, and so a fact.
    """
    clauses = re.split(r"\.[*+]\??|[\n|│;:,()]|\. ", re.sub(r"`[^`]*`", "``", text))
    return any(len(re.findall(r"(?<![\w'.=/\\-])[a-z][a-z']+(?![\w=/-]|\.\w)", each)) >= WORDS for each in clauses)


def texts(node: ast.AST | None) -> Iterator[tuple[int, str]]:
    """All text below a node, with its line; an f-string is one text, with {} for what it fills in."""
    if isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif node is not None and not isinstance(node, ast.Lambda):
        inner = {ast.Subscript: lambda: [node.value], ast.Dict: lambda: node.values}  # type: ignore[attr-defined]
        for child in inner.get(type(node), lambda: ast.iter_child_nodes(node))():
            yield from texts(child)


def asked(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """The expressions that a message is compared with."""
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield node.value
        elif isinstance(node, ast.Compare):
            equal = any(isinstance(op, ast.Eq) for op in node.ops)
            if equal or any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
                yield from [node.left, *node.comparators] if equal else [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING:
            yield from node.args[:1]


def names(node: ast.AST) -> set[str]:
    """Of an expression; what a function is called with is not what is compared, but for `re.escape`."""
    if isinstance(node, ast.Call):
        escapes = getattr(node.func, "attr", getattr(node.func, "id", "")) == "escape"
        return set().union(*map(names, [node.func, *(node.args if escapes else [])]))
    return {node.id} if isinstance(node, ast.Name) else set().union(*map(names, ast.iter_child_nodes(node)))


def columns(target: ast.AST, value: ast.AST, wanted: set[str]) -> Iterator[ast.AST]:
    """The parts of a value that are bound to one of these names."""
    if isinstance(target, ast.Name) and target.id in wanted:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple | ast.List):
        for one, part in zip(target.elts, value.elts, strict=False):
            yield from columns(one, part, wanted)


def rows(table: ast.AST, constants: dict[str, ast.AST]) -> list[ast.AST]:
    """The rows of a table that is written out, here or in a constant; the keys of a dictionary are names."""
    of = ""
    if isinstance(table, ast.Call) and isinstance(table.func, ast.Attribute):
        table, of = table.func.value, table.func.attr
    if isinstance(table, ast.Name):
        table = constants.get(table.id, table)
    if isinstance(table, ast.Dict) and of == "items":
        return [ast.Tuple([ast.Constant(None), value]) for value in table.values]
    if isinstance(table, ast.Dict):
        return table.values if of == "values" else []
    return list(table.elts) if isinstance(table, ast.Tuple | ast.List | ast.Set) else []


def tables(nodes: list[ast.AST], wanted: set[str]) -> Iterator[ast.AST]:
    """What is bound to one of these names: by an assignment, a loop, or pytest's parametrize."""
    bound = [(t, n.value) for n in nodes if isinstance(n, ast.Assign) for t in n.targets]
    bound += [(n.target, n.value) for n in nodes if isinstance(n, ast.AnnAssign) and n.value is not None]
    constants = {t.id: value for t, value in bound if isinstance(t, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension):
            bound += [(node.target, row) for row in rows(node.iter, constants)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize":
            given = [name.strip() for _, text in texts(node.args[0]) for name in text.split(",")]
            target = ast.Tuple([ast.Name(name) for name in given]) if len(given) > 1 else ast.Name(given[0])
            for row in rows(node.args[1], constants):
                cells = row.args if isinstance(row, ast.Call) else [row]
                bound.append((target, cells[0] if len(cells) == 1 else ast.Tuple(cells)))
    for target, value in bound:
        yield from columns(target, value, wanted)


def found(source: str) -> list[tuple[int, str]]:
    """The prose that a test's messages are compared with: line and text."""
    nodes = [node for node in ast.walk(ast.parse(source)) if type(node) in LOOKED_AT]
    asking = list(asked(nodes))
    bound = tables(nodes, set().union(*map(names, asking)))
    return sorted({hit for node in [*asking, *bound] for hit in texts(node) if prose(hit[1])})


@pytest.mark.parametrize(
    "source",
    [
        'with raises(E, match="the update is zero in every module"): pass',
        'with raises(E, match=rf"{name}.* is zero in every module of the two"): pass',
        'assert "acme: a second reply in one round came" in said',
        'assert said == f"round {k} waits for all of them"',
        'assert re.search(r"7: the update is zero in every module", said)',
        'for k, words in ((1, "the update is zero in every module"),):\n    assert words in said',
        'WORDS = {"a": "the update is zero in every module"}\nfor k, w in WORDS.items():\n    assert w in said',
        '@mark.parametrize(("k", "w"), [(1, "the update is zero in every module")])\ndef f(k, w): m(match=escape(w))',
    ],
)
def test_prose_is_found_wherever_it_is_asked_for(source: str) -> None:
    assert len(found(source)) == 1


def test_facts_and_names_are_no_prose() -> None:
    for facts in (r"min_size.*max_draws", "known: uniform, normal, heavy-tail, pareto, one", "no column 'a'; 'b', 'c'"):
        assert not found(f"assert re.search({facts!r}, said)")
    assert not found('say("the update is zero in every module")')


def test_no_test_asks_for_a_sentence() -> None:
    seen = {str(path.relative_to(TESTS)): found(path.read_text("utf-8")) for path in sorted(TESTS.rglob("*.py"))}
    wrong = [f"{name}:{line}: {text!r}" for name, hits in seen.items() if name not in MEANT for line, text in hits]
    assert not wrong, "ask for facts and names, not for sentences:\n" + "\n".join(wrong)
    assert not [name for name in MEANT if not seen.get(name)], "an exception that nothing needs any more"
