"""A client's round as a folder: what a program finds to start from, and what it leaves. Both sides use this file.

    round.json     who trains which parts in which round (`RoundFacts`)
    start/         a PEFT folder: the adapter to train
    base/          only if the method moves the base weights: a PEFT folder to merge into the base before training
    result/        the program's: a PEFT folder, the trained adapter at the ranks of start/
    result.json    the program's: {"examples": 120, "loss": 0.43}; with base/ also "base": as in round.json

A program that knows nothing of fedlora reads and writes these with peft and json; `fedlora.hf.federate` does it for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlora.adapters.io import AdapterSpec, read_adapter, write_adapter
from fedlora.adapters.reader import WEIGHTS_FILE
from fedlora.core import files
from fedlora.core.folders import place
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.method import Roles
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError, FedLoRAError
from fedlora.given_files import kind_of, read_given
from fedlora.training.targets import in_words

VARIABLE = "FEDLORA_ROUND"  # names the folder in the program's environment
Part = Literal["B", "A", "heads"]


class ProgramFailed(RuntimeError):
    """A client's program failed, or did not leave what it must. The client's state is as before its round."""


class RoundFacts(BaseModel):
    """round.json. round: from 1. rounds: how many are planned. scaling: the update is scaling * B @ A. trains: the
    parts that may change; the others are frozen. base: SHA-256 of the weights in base/, if there is one. data: a file
    of the client's training examples, if it has one. labels: of a classifier, the names of its classes 0, 1, ...
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    form: Literal["fedlora-round/1"] = "fedlora-round/1"
    client: str
    round: Annotated[int, Field(ge=1)]
    rounds: Annotated[int, Field(ge=1)]
    scaling: Annotated[float, Field(gt=0)]
    trains: list[Part]
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
    facts, told = place("round.json"), place("result.json")

    # ------------------------------------------------------------------------------------------- the federation's side

    def write(self, facts: RoundFacts, adapter: Adapter, spec: AdapterSpec) -> RoundFacts:
        """Write the start, in an existing folder. adapter: in units of `spec.scaling`; its base goes beside it.

        Returns the facts as written, with the digest of base/.
        """
        write_adapter(self.start, replace(adapter, base=None), spec)
        if adapter.base:
            plain = replace(spec, config=ReadOnly({**spec.config, "modules_to_save": None}))
            write_adapter(self.base, Adapter(adapter.base), plain)
            facts = facts.model_copy(update={"base": files.digest(self.base / WEIGHTS_FILE)})
        files.write(self.facts, facts.model_dump_json(indent=1) + "\n")
        return facts

    def read_result(
        self, begun: Adapter, facts: RoundFacts, spec: AdapterSpec
    ) -> tuple[Adapter, ResultFacts, str | None]:
        """The trained adapter, what the program says of it, and the base model that it names.

        Args:
            begun: what `write` was given. facts: what it returned.

        Raises:
            ProgramFailed: something is missing, damaged, or does not fit the round.
        """
        for path in (self.result, self.told):
            _check_left(path)
        missing = [path.name for path in (self.result, self.told) if not path.exists()]
        if missing:
            raise ProgramFailed(
                f"it left no {' and no '.join(missing)} in the folder that {VARIABLE} names. A program must write a "
                f"PEFT folder result and a file result.json with examples and loss; fedlora.hf.federate does that."
            )
        said = _read(ResultFacts, self.told)
        if said.base != facts.base and facts.base is not None:
            raise ProgramFailed(
                f"this method moves the base weights, but the program's result.json does not say that it merged base/ "
                f"into its model before training: base is {said.base!r}, and round.json has {facts.base!r}. On the "
                f"pre-trained weights, training goes wrong. Merge it (PeftModel.from_pretrained(model, base), "
                f"merge_and_unload) and copy the digest, or use fedlora.hf.federate, or another method."
            )
        try:
            made, found = read_adapter(self.result, scaling=facts.scaling)
        except FedLoRAError as error:
            raise ProgramFailed(f"its result cannot be read: {error}") from error
        _check_shapes(begun, made)
        return _with_frozen(begun, made, facts.trains), said, found.base_model

    # ---------------------------------------------------------------------------------------------- the program's side

    def read(self) -> tuple[RoundFacts, Adapter]:
        """The facts and the start, with its base. Raises `FedLoRAError` if the folder is not of this form."""
        facts = _read(RoundFacts, self.facts)
        adapter, _ = read_adapter(self.start, scaling=facts.scaling)
        moved: Mapping[str, LoRA] = {}
        if facts.base is not None:
            moved = read_adapter(self.base, scaling=facts.scaling)[0].modules
        return facts, replace(adapter, base=moved)

    def write_result(self, facts: RoundFacts, adapter: Adapter, spec: AdapterSpec, examples: int, loss: float) -> None:
        """Write the result; result.json comes last, so an unfinished result is none.

        Raises:
            AdapterFormatError: the adapter or the loss is not finite: training diverged.
        """
        self.told.unlink(missing_ok=True)
        write_adapter(self.result, replace(adapter, base=None), spec)
        try:
            said = ResultFacts(examples=examples, loss=float(loss), base=facts.base)
        except ValidationError as error:
            raise AdapterFormatError(f"the round's examples or loss are not numbers: {_lines(error)}.") from error
        files.write(self.told, said.model_dump_json() + "\n")


def _check_left(path: Path) -> None:
    """Check a file, or a folder with all below it, without opening a file. path: in the round's folder.

    Raises:
        ProgramFailed: something there is neither a file nor a folder (to open a pipe could wait for ever), or is a link
            to a place outside of the folder that `path` is in.
    """
    home = path.parent.resolve()
    waiting = [path] if os.path.lexists(path) else []
    while waiting:
        found = waiting.pop()
        mode = found.lstat().st_mode
        if stat.S_ISDIR(mode):
            waiting += found.iterdir()
        elif stat.S_ISLNK(mode) and home not in Path(target := os.path.realpath(found)).parents:
            raise ProgramFailed(
                f"it left {found.relative_to(path.parent)}, a link to {target}: links may only lead to files in "
                f"{path.parent}. Let it copy the file."
            )
        elif not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise ProgramFailed(
                f"it left {found.relative_to(path.parent)}, {kind_of(mode)}: only files and folders are read. Let it "
                f"put other things into another folder."
            )


def trained_parts(roles: Roles) -> list[Part]:
    """The parts that a client may train under these roles."""
    names: tuple[Part, ...] = ("B", "A", "heads")
    return [name for name in names if getattr(roles, name) != "frozen"]


Table = TypeVar("Table", bound=BaseModel)


def _read(kind: type[Table], path: Path) -> Table:
    try:
        return kind.model_validate_json(read_given(path))  # of 4 MiB at most
    except (OSError, ValidationError) as error:
        why = _lines(error) if isinstance(error, ValidationError) else error.strerror
        raise ProgramFailed(f"{path.name} cannot be read: {why}.") from error


def _lines(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())


def _check_shapes(begun: Adapter, made: Adapter) -> None:
    """Raise `ProgramFailed` if the result has other modules, ranks, heads or shapes than the start."""
    if (odd := sorted(set(begun.modules) ^ set(made.modules))) or (odd := sorted(set(begun.heads) ^ set(made.heads))):
        raise ProgramFailed(
            f"its result and the start differ in {odd[0]!r} ({len(odd)} such). The result adapts "
            f"{in_words(made.modules)}, the start {in_words(begun.modules)}: train the adapter in start/, with the "
            f"same target_modules and modules_to_save (lora.targets and lora.saved of the federation)."
        )
    for name, was in begun.modules.items():
        now = made.modules[name]
        if now.rank != was.rank:
            raise ProgramFailed(
                f"its result has rank {now.rank} in {name}, but this client's rank is {was.rank}: train the adapter "
                f"in start/ instead of a new one, or change the client's rank in the federation."
            )
        for factor, shape in ((f, t.shape) for f, t in was.tensors().items()):
            if now.tensors()[factor].shape != shape:
                raise ProgramFailed(
                    f"its result belongs to another base model: {factor} of {name} has shape "
                    f"{tuple(now.tensors()[factor].shape)}, and the start has {tuple(shape)}."
                )
    for name, head in begun.heads.items():
        if made.heads[name].shape != head.shape:
            raise ProgramFailed(
                f"the head {name} of its result has shape {tuple(made.heads[name].shape)}, and that of the start "
                f"{tuple(head.shape)}: another number of classes?"
            )


def _with_frozen(begun: Adapter, made: Adapter, trains: list[Part]) -> Adapter:
    """The result with the start's own frozen parts and base. Raises `ProgramFailed` if a frozen part was trained."""
    frozen = [part for part in ("B", "A", "heads") if part not in trains]
    modules = {}
    for name, now in made.modules.items():
        parts, was = now.tensors(), begun.modules[name].tensors()
        for factor in (f for f in frozen if f in was):
            _same(f"{factor} of {name}", was[factor], parts[factor])
            parts[factor] = was[factor]
        modules[name] = LoRA(parts["B"], parts["A"])
    if "heads" in frozen:
        for name, head in begun.heads.items():
            _same(f"the head {name}", head, made.heads[name])
    return Adapter(modules, begun.heads if "heads" in frozen else made.heads, begun.base)


def _same(what: str, was: torch.Tensor, now: torch.Tensor) -> None:
    wide = torch.finfo(now.dtype).eps * 8
    if not torch.allclose(now.double(), was.double(), rtol=wide, atol=wide * float(was.abs().max() or 0)):
        raise ProgramFailed(
            f"the program trained {what}, which this method freezes: round.json lists what may change under trains. "
            f"Set requires_grad to False for the rest, or use fedlora.hf.federate."
        )


__all__ = [
    "VARIABLE", "ProgramFailed", "ResultFacts", "RoundFacts", "RoundFolder", "trained_parts",
]  # fmt: skip
