"""true is no number, "3" is none, and 1 is no truth value: for every key of every table.

Kind of evidence: contract, by a walk over all fields, so that no new key can be left out. What a key should take is
read from its annotation by the test itself, and not asked of pydantic; a table in pydantic's lax mode is the negative
control.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from pydantic import BaseModel, Field, ValidationError

from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.config import RunConfig
from fedlora.runs.data_sections import ClientsSection
from fedlora.runs.sections import RunSection
from fedlora.training.settings import Section, TrainSection

PLAIN = (True, False, 0, 1, 3, 0.5, math.inf, -math.inf, math.nan, "yes", "true", "0", "1", "3", "0.5", "inf")

# One rank for everybody is a list of it.
ALLOWED = {(ClientsSection, "ranks", int)}


def options(kind: Any) -> list[Any]:
    """The types that a value may have, each by itself."""
    if get_origin(kind) is Annotated:
        return options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [option for each in get_args(kind) for option in options(each)]
    return [kind]


def fits(value: Any, option: Any) -> bool:
    if get_origin(option) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(option))
    if option is float:
        return type(value) in (int, float) and math.isfinite(value)
    return option is Any or (option in (bool, int, str) and type(value) is option)


def wrong(kind: Any) -> Iterator[Any]:
    """Values that a key of that type must not take, also within its lists and tables."""
    choice = options(kind)
    yield from (value for value in PLAIN if not any(fits(value, option) for option in choice))
    for option in choice:
        if get_origin(option) in (list, tuple):
            yield from ([item] for item in wrong(get_args(option)[0]))
        elif get_origin(option) is dict and get_args(option)[1] is not Any:
            yield from ({"a": item} for item in wrong(get_args(option)[1]))
        else:
            plain = option in (bool, int, float, str, Any, NoneType) or get_origin(option) in (Literal, dict)
            assert plain or issubclass(option, Section), f"{option} is a type that this walk does not know"


def tables(kind: type[Section] = Section) -> Iterator[type[Section]]:
    for table in kind.__subclasses__():
        if table.__module__.startswith("fedlora."):
            yield table
        yield from tables(table)


def taken(table: type[BaseModel], key: str, kind: Any) -> list[Any]:
    """Wrong values that the table takes."""
    found = []
    for value in wrong(kind):
        try:
            table.model_validate({key: value})
        except ValidationError as error:
            if any(e["loc"][:1] == (key,) for e in error.errors()):
                continue
        found.append(value)
    return [value for value in found if (table, key, type(value)) not in ALLOWED]


TABLES = sorted(tables(), key=lambda table: table.__name__)


def test_no_key_takes_a_value_of_another_type() -> None:
    found = {
        f"{table.__name__}.{key}": taken(table, key, get_type_hints(table, include_extras=True)[key])
        for table in TABLES
        for key in table.model_fields
    }
    assert {key: values for key, values in found.items() if values} == {}


def test_the_walk_sees_all_tables_and_finds_what_is_wrong() -> None:
    """Those of a run and of a federation are among the classes walked over; a table in lax mode is caught."""
    for whole in (RunConfig, FederationSettings):
        held = {kind for f in whole.model_fields.values() for kind in options(f.annotation) if isinstance(kind, type)}
        assert {kind for kind in held if issubclass(kind, BaseModel)} <= {*TABLES}

    class Lax(BaseModel):
        number: float = 1.0
        whole: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
        truth: bool = False
        table: dict[str, float] = {}
        ranks: list[int] = []

    hints = get_type_hints(Lax, {**globals(), **locals()}, include_extras=True)
    found = {key: taken(Lax, key, hints[key]) for key in hints}
    assert True in found["number"] and "0.5" in found["number"] and math.inf in found["number"]
    assert True in found["whole"] and "3" in found["whole"] and 0.5 not in found["whole"]
    assert 1 in found["truth"] and "yes" in found["truth"]
    assert {"a": True} in found["table"] and [True] in found["ranks"] and ["3"] in found["ranks"]


def test_whole_numbers_are_numbers_and_three_point_zero_is_whole() -> None:
    """As TOML, JSON, a search over floats and Python's callers give them."""
    assert TrainSection(lr=1).lr == 1.0 and type(TrainSection(lr=1).lr) is float
    assert RunSection.model_validate({"rounds": 3.0}).rounds == 3
    assert type(RunSection.model_validate({"rounds": 1e3, "seed": np.int64(2)}).rounds) is int
    assert type(RunSection.model_validate({"seed": np.int64(2)}).seed) is int
    assert ClientsSection.model_validate({"ranks": (2, 4.0)}).ranks == [2, 4]
    with pytest.raises(ValidationError, match="valid integer"):
        RunSection.model_validate({"rounds": 3.5})
