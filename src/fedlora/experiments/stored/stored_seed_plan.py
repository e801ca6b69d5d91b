"""What a stored plan has to be, checked where it is read. Fields that older plans lack are optional: "not noted"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from fedlora.errors import ConfigError
from fedlora.experiments.stored.checked_results import Commit, Count, Name, Size
from fedlora.experiments.stored.stored_json import Stored, read_table, shown, wrong_values

Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT[0-9:.+-]{5,21}$")]


class Look(Stored):
    """there: seeds with all runs, of each family. of: how many were planned."""

    at: Time
    there: Annotated[list[Count], Field(min_length=1)]
    of: Annotated[int, Field(ge=1)]
    by: Name = "decide"


class Rate(Stored):
    of: Name
    key: Name
    value: float | None
    at_the_edge: Name | None
    validation: dict[Name, dict[Name, float | None]]


class Before(Stored):
    """How many of the planned runs had a result when the plan was written."""

    there: Count
    of: Count


class PlanFile(Stored):
    """One plan, without those before it."""

    experiment: Name
    asked: Name
    written: Time
    commit: Commit | None
    profile: Name
    seeds: list[int]
    needed: dict[Name, Count]
    spreads: dict[Name, dict[Name, Size]]
    rates: list[Rate]
    looks: list[Look]
    runs: dict[Name, Name] | None = None
    results: Before | None = None
    before: list[dict[str, Any]]

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < max(2, len(seeds)) or min(seeds) < 0:
            raise ValueError(f"{shown(seeds)}, and they have to be two or more different whole numbers")
        return seeds

    @model_validator(mode="after")
    def _looks(self) -> PlanFile:
        """A look is at the plan's own seeds: another number would make an early one a whole one."""
        for number, look in enumerate(self.looks):
            if look.of != len(self.seeds) or max(look.there) > look.of:
                raise ValueError(
                    f"looks.{number} saw {shown(look.there)} of {look.of} seeds, and {len(self.seeds)} are planned"
                )
        return self


def read_stored_plan(path: Path) -> dict[str, Any]:
    """Raises `ConfigError` for none, or a damaged one."""
    try:
        plan = read_table(path)
        _check(plan, path.stem)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no plan {path}. Run the search and the pilot, then: fedlora experiment plan {path.stem}"
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(
            f"the plan {path} cannot be used: {why}. Restore it from where it was written (git): it says when it was "
            f"made, and who looked."
        ) from error
    return plan


def _check(plan: Mapping[str, Any], experiment: str) -> None:
    for number, one in enumerate([plan, *_list(plan.get("before"))]):
        where = f"before.{number - 1}: " if number else ""
        try:
            found = PlanFile.model_validate(one)
        except ValidationError as error:
            raise ValueError(f"{where}{wrong_values(error)}") from error
        if found.experiment != experiment:
            raise ValueError(f"{where}it is the plan of {shown(found.experiment)}")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
