"""Every key of a run's configuration: its type and default from the fields, its meaning from the class's docstring."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedlora.runs.config import RunConfig
from generate.markdown import line, linked, prose

_PLAIN = {Any: "anything", str: "text", int: "integer", float: "number", bool: "boolean"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key. meaning: "" where the docstring has no word on it, which a test refuses."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table of the file: what it is about, and its keys."""

    name: str
    about: str
    keys: tuple[Key, ...]


def tables() -> Iterator[Table]:
    """Every table that a configuration may have, in the order of the code."""
    for name, field in RunConfig.model_fields.items():
        yield table_of(name, _section(field.annotation))


def table_of(name: str, section: type[BaseModel]) -> Table:
    """One table of a file, by that name."""
    names = list(section.model_fields)
    told = [split(_doc(each), names) for each in section.__mro__ if issubclass(each, BaseModel) and each.__doc__]
    about = told[0][0]
    meanings = {name: said for _, of in reversed(told) for name, said in of.items()}  # its own words count
    keys = [Key(key, _kind(of), _default(of), meanings.get(key, "")) for key, of in section.model_fields.items()]
    return Table(name, about, tuple(keys))


def _doc(section: type[BaseModel]) -> str:
    return (inspect.getdoc(section) or "").partition("\n\nExample:")[0]


def page(of: Iterable[Table] | None = None) -> str:
    """As Markdown. of: these tables; a run's configuration where there are none."""
    parts = []
    for table in tables() if of is None else of:
        parts += [f"## [{table.name}]" if table.name else "## At the top", linked(prose(table.about))]
        parts += [
            f"`{f'{table.name}.{k.name}'.lstrip('.')}` ({', '.join(filter(None, (k.kind, k.default)))})\n"
            f": {linked(line(k.meaning))}\n"
            for k in table.keys
        ]
    return "\n\n".join(parts) + "\n"


def split(doc: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the whole, and of each name: "a: meaning. b, c: meaning."."""
    name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    marks = list(re.finditer(rf"(?<![\w.\"'`])((?:{name})(?:, (?:{name}))*):\s", doc))
    found: dict[str, str] = {}
    for mark, following in zip(marks, [*marks[1:], None] if marks else [], strict=True):
        said = doc[mark.end() : following.start() if following else None]
        said = re.sub(r"[;,]?\s*(?:(?:and|or)\s+)?(?:in its\s+place\s+)?$", "", said)
        said = re.sub(r"[;,]\s*(?:or|and)$", "", said).strip()
        for key in mark[1].split(", "):
            found.setdefault(key, _sentence(said))
    return (doc[: marks[0].start()] if marks else doc).strip(), found


def _sentence(said: str) -> str:
    """With a capital and a full stop. A symbol, such as s or p_i, is no word and keeps its letter."""
    begun = said[:1].upper() + said[1:] if re.match(r"(a|[a-z][a-z-]+)(?![\w(])", said) else said
    return begun + "." * (begun[-1:] not in ("", ".", "?", "!"))


def _section(annotation: Any) -> type[BaseModel]:
    held = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type)]
    return next(part for part in held if issubclass(part, BaseModel))


def _kind(field: FieldInfo) -> str:
    return _words(field.annotation, field.metadata)


def _words(kind: Any, metadata: Any = ()) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(inside[0], [*inside[1:], *metadata])
    if origin in (Union, types.UnionType):
        parts = dict.fromkeys(_words(part) for part in inside if part is not type(None))
        said = sorted(parts, key=lambda words: words.startswith(("list of", "table of")))  # "list of: text or text"
        return " or ".join(said) + _bounds(metadata)
    if origin is Literal:
        return "/".join(f'`"{value}"`' if isinstance(value, str) else f"`{str(value).lower()}`" for value in inside)
    if origin in (list, tuple):
        return f"list of: {_words(inside[0])}"
    if origin is dict:
        return f"table of: {_words(inside[1])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table of " + ", ".join(f"`{name}`" for name in kind.model_fields)
    return _PLAIN.get(kind, getattr(kind, "__name__", str(kind))) + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    flat = [part for held in metadata for part in getattr(held, "metadata", [held])]
    said = [f"{word}{getattr(held, of):g}" for held in flat for of, word in _BOUNDS.items() if _has(held, of)]
    return f" {', '.join(said)}" if said else ""


def _has(held: Any, of: str) -> bool:
    return getattr(held, of, None) is not None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`".replace("'", '"').replace("()", "[]")
