"""TOML files in, values out: what is wrong with a file is said a line each, by the key as the file has it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fedlora.errors import ConfigError
from fedlora.training.settings import Section

Kind = TypeVar("Kind", bound=Section)


def checked(kind: type[Kind], raw: Mapping[str, Any]) -> Kind:
    """Nested tables as a value of that kind. Raises `ConfigError` with a line for each thing wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        wrong = [_Wrong.of(kind, e) for e in error.errors()]
        lines: dict[str, str] = {}
        for w in wrong:
            beside = [other for other in wrong if other.choice is not None and other.choice == w.choice]
            if beside:
                fitting = [other for other in beside if other.branch not in {b.branch for b in beside if b.misfit}]
                if fitting and w not in fitting:
                    continue  # of a type that is not the value's
                if not fitting:
                    w = replace(w, key=w.choice or w.key, value=beside[0].value, message=_any_of(beside))
            lines.setdefault(w.key, w.line())
        raise ConfigError("; ".join(lines.values())) from error


@dataclass(frozen=True)
class _Wrong:
    """One of pydantic's errors, by the key as the file has it.

    known: the keys of the table that it is in. choice: the key whose value may be of several types; None: it may not.
    branch: the type among these that the error is of. misfit: the value is of no such type at all.
    """

    key: str
    kind: str
    message: str
    value: object
    known: tuple[str, ...]
    choice: str | None = None
    branch: str | None = None
    misfit: bool = False

    @classmethod
    def of(cls, model: type[BaseModel], error: Any) -> _Wrong:
        """pydantic's place of an error also names the type of several that it tried, which is no key."""
        keys: list[str] = []
        within: Any = model
        choice = branch = None
        known: tuple[str, ...] = ()
        left = list(error["loc"])
        while left:
            options = _options(within)
            if len(options) > 1 and choice is None:
                choice, branch = ".".join(keys), str(left.pop(0))
                within = next((option for option in options if _named(option) == branch.partition("[")[0]), None)
                continue
            within = options[0] if options else None
            keys.append(str(left.pop(0)))
            fields = getattr(within, "model_fields", None)
            if fields is not None:
                known = tuple(fields)
                within = fields[keys[-1]].annotation if keys[-1] in fields else None
            else:  # the items of a list, the values of a table
                within = (get_args(within) or (None,))[-1]
        misfit = branch is not None and choice == ".".join(keys) and error["type"].endswith(("_type", "literal_error"))
        message = re.sub(r" or instance of \w+$", "", error["msg"]).replace("valid tuple", "valid list")
        return cls(".".join(keys), error["type"], message, error.get("input"), known, choice, branch, misfit)

    def line(self) -> str:
        """What is said of it."""
        if self.kind == "extra_forbidden":
            close = difflib.get_close_matches(self.key.rpartition(".")[2], self.known, n=1)
            nearest = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self.known)}"
            return f"unknown key {self.key!r}; {nearest}"
        if self.kind == "missing":
            return f"key {self.key!r} is missing"
        if self.kind == "value_error":  # of our own words
            said = self.message.removeprefix("Value error, ")
            return said if isinstance(self.value, dict) else f"{self.key}: {said}; got {self.value!r}"
        said = f"{self.message[0].lower()}{self.message[1:]}"
        return f"{self.key}: {said}; got {self.value!r}" if self.key else self.message


def _any_of(wrong: Sequence[_Wrong]) -> str:
    """What each of several types would have been, in one sentence."""
    said = dict.fromkeys(w.message.removeprefix("Input should be ") for w in wrong if w.misfit)
    return f"Input should be {' or '.join(said)}"


def _options(annotation: Any) -> list[Any]:
    """The types that a value may have, without none."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [option for each in get_args(annotation) if each is not NoneType for option in _options(each)]
    return [annotation]


def _named(option: Any) -> str:
    """As pydantic names it in the place of an error: of what is no scalar."""
    return str(getattr(get_origin(option) or option, "__name__", option))
