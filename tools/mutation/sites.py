"""Where the program can be changed, which of these places are tried, and their switches in the syntax tree."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
ON = "_changed_here"  # the switch's name in a changed module
SHARES: Mapping[str, int] = {  # folder or file below fedlora -> how many changes are tried in it
    "linalg": 70, "methods": 80, "core": 60, "client.py": 10, "server": 80, "adapters": 70, "privacy": 60,
}  # fmt: skip
_COMPARED: Mapping[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: Mapping[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "zeros_like": "ones_like"}
_DROPPED = {"abs", "square", "sqrt", "clamp", "clamp_min", "flip", "clone", "sum"}  # x.abs() becomes x
_EVERY = 5  # changes of one function at most, so that long ones do not take all


@dataclass(frozen=True)
class Change:
    """One change. nth: of those alike in the function, the first is 0; so it is found again after lines have moved."""

    file: str
    function: str
    before: str
    after: str
    nth: int

    @property
    def package(self) -> str:
        """Of SHARES."""
        return next(name for name in SHARES if self.file.startswith(f"fedlora/{name}"))

    @property
    def id(self) -> str:
        told = "\0".join((self.file, self.function, self.before, self.after, str(self.nth)))
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def files() -> list[str]:
    """Of all packages that are looked at, in order."""
    package = SOURCE / "fedlora"
    found = [
        path
        for name in SHARES
        for path in ([package / name] if name.endswith(".py") else sorted((package / name).rglob("*.py")))
    ]
    return [path.relative_to(SOURCE).as_posix() for path in found]


def possible(file: str) -> list[Change]:
    """All changes of a file."""
    finder = _Finder(file, {})
    finder.visit(ast.parse((SOURCE / file).read_text(encoding="utf-8")))
    return finder.found


def chosen() -> list[Change]:
    """The share of each package, by digest: new code moves few of them."""
    found: list[Change] = []
    for name, share in SHARES.items():
        those = [change for file in files() if file.startswith(f"fedlora/{name}") for change in possible(file)]
        taken: Counter[tuple[str, str]] = Counter()
        for change in sorted(those, key=lambda one: one.id):
            if sum(taken.values()) < share and taken[change.file, change.function] < _EVERY:
                taken[change.file, change.function] += 1
                found.append(change)
    return found


def there() -> set[str]:
    """The ids of all changes that can be made now."""
    return {change.id for file in files() for change in possible(file)}


def instead_of(gone: Change, taken: Collection[Change]) -> Change:
    """Another change of the same package, for one whose code is gone."""
    known, functions = {change.id for change in taken}, Counter((each.file, each.function) for each in taken)
    those = [change for file in files() if file.startswith(f"fedlora/{gone.package}") for change in possible(file)]
    free = (one for one in those if one.id not in known and functions[one.file, one.function] < _EVERY)
    return min(free, key=lambda change: change.id)


def switched(file: str, changes: Mapping[str, int]) -> ast.Module:
    """The file's tree with a switch at each of the changes. changes: id -> its number."""
    tree = _Finder(file, changes).visit(ast.parse((SOURCE / file).read_text(encoding="utf-8")))
    place = next((k for k, node in enumerate(tree.body) if not _first(node)), len(tree.body))
    importing = ast.ImportFrom("mutation.switch", [ast.alias("on", ON)], 0)
    tree.body.insert(place, importing)
    return ast.fix_missing_locations(tree)


def _first(node: ast.stmt) -> bool:
    """What has to stand at a module's beginning."""
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class _Finder(ast.NodeTransformer):
    """Walks functions' bodies, innermost last, lists each change, and puts a switch where it is wanted."""

    def __init__(self, file: str, wanted: Mapping[str, int]) -> None:
        self.file, self.wanted = file, wanted
        self.found: list[Change] = []
        self._within: list[str] = []
        self._functions, self._alike = 0, Counter[tuple[str, str, str]]()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        node.body = [self.visit(each) for each in node.body]
        self._within.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._within.append(node.name)
        self._functions += 1
        node.body = [self.visit(each) for each in node.body]
        self._functions -= 1
        self._within.pop()
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # wording is free

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return self._statement(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        called = isinstance(node.value, ast.Call)
        return self._statement(node) if called else self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return self._statement(node)

    def _statement(self, node: ast.stmt) -> ast.AST:
        """Left out, or its parts changed."""
        before = copy.deepcopy(node)
        if not isinstance(node, ast.Raise):  # what is raised is wording
            node = self.generic_visit(node)  # type: ignore[assignment]
        number = self._number(before, "pass")
        if number is None:
            return node
        return ast.If(_call(number), [ast.Pass()], [node])

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return self._expression(node) if isinstance(node, ast.expr) else super().generic_visit(node)

    def _expression(self, node: ast.expr) -> ast.AST:
        before = copy.deepcopy(node)
        super().generic_visit(node)
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            return node
        for after in _instead(before):
            number = self._number(before, ast.unparse(after))
            if number is not None:
                return ast.IfExp(_call(number), after, node)
        return node

    def _number(self, before: ast.AST, after: str) -> int | None:
        """The change's number where it is wanted; each is listed."""
        if not self._functions:
            return None  # a module's own constants are computed once, before a switch can be turned
        key = (".".join(self._within), ast.unparse(before), after)
        change = Change(self.file, *key, self._alike[key])
        self._alike[key] += 1
        self.found.append(change)
        return self.wanted.get(change.id)


def _call(number: int) -> ast.expr:
    return ast.Call(ast.Name(ON, ast.Load()), [ast.Constant(number)], [])


def _instead(node: ast.expr) -> Iterator[ast.expr]:
    """What could stand for an expression."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARED:
            yield ast.Compare(left, [_COMPARED[type(operator)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in _COMPUTED:
            if not isinstance(left, ast.JoinedStr) and not (
                isinstance(left, ast.Constant) and isinstance(left.value, str)
            ):
                yield ast.BinOp(left, _COMPUTED[type(operator)](), right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(value) if isinstance(value, bool):
            yield ast.Constant(not value)
        case ast.Constant(value) if isinstance(value, int | float):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), _, _) if name in _CALLED:
            yield ast.Call(ast.Name(_CALLED[name], ast.Load()), node.args, node.keywords if name != "sorted" else [])
        case ast.Call(ast.Attribute(value, name), _, _) if name in _DROPPED:
            yield value
        case ast.Attribute(value, "mT"):
            yield value
        case ast.Subscript(value, ast.Slice(None, ast.expr(), None)):
            yield value
        case ast.ListComp(element, [ast.comprehension(target, source, [_], 0)]):
            yield ast.ListComp(element, [ast.comprehension(target, source, [], 0)])
        case ast.DictComp(key, value, [ast.comprehension(target, source, [_], 0)]):
            yield ast.DictComp(key, value, [ast.comprehension(target, source, [], 0)])
