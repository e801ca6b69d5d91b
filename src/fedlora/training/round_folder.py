"""A client's round as a folder: what a program finds to start from, and what it leaves. Both sides use this file.

    round.json     who trains which parts in which round (`RoundFacts`)
    start/         a PEFT folder: the adapter to train
    base/          only if the method moves the base weights: a PEFT folder to merge into the base before training
    result/        the program's: a PEFT folder, the trained adapter at the ranks of start/
    result.json    the program's: {"examples": 120, "loss": 0.43}; with base/ also "base": as in round.json

A program that knows nothing of fedlora reads and writes these with peft and json; `fedlora.hf.federate` does it for it.
It is the client's own program, so these checks find its mistakes, and nothing guards against its ill will.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlora.adapters.io import read_adapter
from fedlora.adapters.writer import AdapterSpec, write_adapter
from fedlora.core import files
from fedlora.core.folders import place
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.method import Roles
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError, FedLoRAError
from fedlora.training.targets import in_words

VARIABLE = "FEDLORA_ROUND"  # names the folder in the program's environment
_WEIGHTS = "adapter_model.safetensors"
Part = Literal["B", "A", "heads"]


class ProgramFailed(RuntimeError):
    """A client's program failed, or did not leave what it must. The client's state is as before its round."""


class RoundFacts(BaseModel):
    """round.json. round: from 1. rounds: how many are planned. scaling: the update is scaling * B @ A. trains: the
    parts that may change; the others are frozen. moves_base: whether the method changes the base weights in some round.
    base: SHA-256 of the weights in base/, if there is one. data: a file of the client's training examples, if it has
    one. labels: of a classifier, the names of its classes 0, 1, ...
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    form: Literal["fedlora-round/1"] = "fedlora-round/1"
    client: str
    round: Annotated[int, Field(ge=1)]
    rounds: Annotated[int, Field(ge=1)]
    scaling: Annotated[float, Field(gt=0)]
    trains: list[Part]
    moves_base: bool = False
    base: str | None = None
    data: str | None = None
    labels: list[str] = []


class ResultFacts(BaseModel):
    """result.json. examples: how many the client trained on; sets its weight. loss: the mean over the round."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    examples: Annotated[int, Field(ge=0, le=10**15)]
    loss: float
    base: str | None = None


@dataclass(frozen=True)
class RoundFolder:
    """Paths in a round's folder.

    Example:
        >>> RoundFolder(Path("round")).start.as_posix()
        'round/start'
    """

    path: Path

    @classmethod
    def named(cls) -> RoundFolder | None:
        """The folder that this process is to play a round in; None if no federation started it."""
        found = os.environ.get(VARIABLE)
        return cls(Path(found)) if found else None

    start, base, result = place("start"), place("base"), place("result")
    facts, result_facts = place("round.json"), place("result.json")

    def write(self, facts: RoundFacts, adapter: Adapter, spec: AdapterSpec) -> RoundFacts:
        """For the federation: write the start, in an existing folder. adapter: in units of `spec.scaling`; its base
        goes beside it. Returns the facts as written, with the digest of base/."""
        write_adapter(self.start, replace(adapter, base=None), spec)
        if adapter.base:
            plain = replace(spec, config=ReadOnly({**spec.config, "modules_to_save": None}))
            write_adapter(self.base, Adapter(adapter.base), plain)
            facts = facts.model_copy(update={"base": files.digest(self.base / _WEIGHTS)})
        files.write(self.facts, facts.model_dump_json(indent=1) + "\n")
        return facts

    def read_result(self, begun: Adapter, facts: RoundFacts) -> tuple[Adapter, ResultFacts]:
        """For the federation: the trained adapter, and what the program says of it.

        Args:
            begun: what `write` was given. facts: what it returned.

        Raises:
            ProgramFailed: something is missing, or does not fit the round.
        """
        missing = [path.name for path in (self.result, self.result_facts) if not path.exists()]
        if missing:
            raise ProgramFailed(
                f"it left no {' and no '.join(missing)} in the folder that {VARIABLE} names: federate(trainer) writes "
                f"them, or hand_back(model, ...) at the end of a loop (both of fedlora.hf)."
            )
        found = _read(ResultFacts, self.result_facts)
        if found.base != facts.base and facts.base is not None:
            raise ProgramFailed(
                f"this method moves the base weights, but by the program's result.json it did not merge base/ before "
                f"training: base is {found.base!r}, and round.json has {facts.base!r}. Merge it and copy the digest, "
                f"or use fedlora.hf."
            )
        try:
            made, _ = read_adapter(self.result, scaling=facts.scaling)
        except FedLoRAError as error:
            raise ProgramFailed(f"its result cannot be read: {error}") from error
        return _fitting(begun, made, facts.trains), found

    def read(self) -> tuple[RoundFacts, Adapter]:
        """For the program: facts and start, with its base. Raises `ProgramFailed` or `FedLoRAError`."""
        facts = _read(RoundFacts, self.facts)
        adapter, _ = read_adapter(self.start, scaling=facts.scaling)
        moved = read_adapter(self.base, scaling=facts.scaling)[0].modules if facts.base is not None else {}
        return facts, replace(adapter, base=moved)

    def write_result(self, facts: RoundFacts, adapter: Adapter, spec: AdapterSpec, examples: int, loss: float) -> None:
        """For the program: write the result; result.json comes last, so an unfinished result is none.

        Raises:
            AdapterFormatError: the adapter or the loss is not finite: training diverged.
        """
        self.result_facts.unlink(missing_ok=True)
        write_adapter(self.result, replace(adapter, base=None), spec)
        try:
            found = ResultFacts(examples=examples, loss=float(loss), base=facts.base)
        except ValidationError as error:
            raise AdapterFormatError(f"the round's examples or loss are not numbers: {_lines(error)}.") from error
        files.write(self.result_facts, found.model_dump_json() + "\n")


def trained_parts(roles: Roles) -> list[Part]:
    """The parts that a client may train under these roles."""
    names: tuple[Part, ...] = ("B", "A", "heads")
    return [name for name in names if getattr(roles, name) != "frozen"]


Table = TypeVar("Table", bound=BaseModel)


def _read(kind: type[Table], path: Path) -> Table:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = _lines(error) if isinstance(error, ValidationError) else error.strerror
        raise ProgramFailed(f"{path.name} cannot be read: {why}.") from error


def _lines(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())


def _fitting(begun: Adapter, made: Adapter, trains: list[Part]) -> Adapter:
    """The result with the start's own frozen parts and base. Raises `ProgramFailed` if it has other modules, heads,
    ranks or shapes than the start, or a frozen part was trained."""
    if odd := sorted({*begun.modules, *begun.heads} ^ {*made.modules, *made.heads}):
        raise ProgramFailed(
            f"its result and the start differ in {odd[0]!r} ({len(odd)} such). The result adapts "
            f"{in_words(made.modules)}, the start {in_words(begun.modules)}: train the adapter in start/, with its "
            f"target_modules and modules_to_save."
        )

    def checked(part: Part, what: str, was: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        if now.shape != was.shape:
            raise ProgramFailed(
                f"{what} of its result has shape {tuple(now.shape)}, and that of the start {tuple(was.shape)}: train "
                f"the adapter in start/."
            )
        if part in trains:
            return now
        saved = torch.finfo(now.dtype)  # it may be narrower, and B scaled by another alpha: two roundings at most
        if not torch.allclose(now.double(), was.double(), rtol=saved.eps, atol=saved.smallest_normal * saved.eps):
            raise ProgramFailed(
                f"the program trained {what}, which this method freezes: train only what round.json has under trains, "
                f"or use fedlora.hf."
            )
        return was

    modules = {}
    for name, lora in begun.modules.items():
        (B, A), (new_B, new_A) = lora.factors, made.modules[name].factors
        modules[name] = LoRA(checked("B", f"B of {name}", B, new_B), checked("A", f"A of {name}", A, new_A))
    heads = {name: checked("heads", f"the head {name}", head, made.heads[name]) for name, head in begun.heads.items()}
    return Adapter(modules, heads, begun.base)
