"""A client's training by a program of its own: any command that finds a PEFT folder and leaves one.

    trainer = ProgramTrainer(Program(["python", "my_train.py"]), spec, lora, Path("work"))

The program is started once for each client and round, with the round's folder (`round_folder`) in its environment.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedlora.adapters.reader import scaled
from fedlora.adapters.writer import AdapterSpec
from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.process import end, how_ended, killed_with
from fedlora.core.trainer import Trained
from fedlora.data.rows import Rows
from fedlora.doing import doing
from fedlora.errors import ConfigError
from fedlora.training.round_folder import VARIABLE, ProgramFailed, RoundFacts, RoundFolder, trained_parts
from fedlora.training.settings import LoRASettings

_DATA = "{data}"  # in a command: the path of the client's examples


@dataclass(frozen=True)
class Program:
    """A command. {data} in its words is replaced by the path of the client's examples.

    timeout: in seconds; None: none. "python" is this process's, unless it is given with its path, and so are other
    programs of the same environment. It runs in its client's folder, where it may write.

    Example:
        >>> Program(["python", "my_train.py", "--data", "{data}"], timeout=3600).command[0]
        'python'
    """

    command: Sequence[str]
    timeout: float | None = None


class ProgramTrainer:
    """Trains any client by its program. Implements `core.trainer.Trainer`.

    Args:
        spec: of the federation's adapters. lora: how clients scale them. folder: for rounds and logs, a folder for each
            client; no other process may play in it. data: client -> its training examples, or its own file of them.
            labels: a classifier's classes, in their order. rounds: how many are planned.

    Raises:
        ConfigError: a client that trains with several ranks at one fixed alpha, which a PEFT folder cannot say here.

    Example:
        >>> model = AdaptedModel.load(
        ...     "model", "sequence-classification", LoRASettings(target_modules=["query"]), labels=["no", "yes"]
        ... )
        >>> adapter, spec = model.seed_adapter(4, seed=0)
        >>> trainer = ProgramTrainer(Program(["false"]), spec, model.settings, Path("work"))
        >>> try:
        ...     play_round(server.download(state, clients[0]), ClientMemory(), trainer)
        ... except RuntimeError as error:
        ...     print(str(error).partition(" after")[0])
        the program of 'site-1' ended with code 1
    """

    def __init__(
        self, program: Program, spec: AdapterSpec, lora: LoRASettings, folder: Path, *,
        data: Mapping[str, Rows | Path] | None = None, labels: Sequence[str] = (), rounds: int = 1,
    ) -> None:  # fmt: skip
        self._program, self._spec, self._lora, self.folder = program, spec, lora, folder
        self._data, self._labels, self._rounds = dict(data or {}), list(labels), rounds
        self._written: dict[str, Path] = {}

    def working_in(self, folder: Path) -> ProgramTrainer:
        """The same, with its rounds in another folder."""
        other = copy.copy(self)
        other.folder, other._written = folder, {}
        return other

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """Play a round of the client's program.

        Raises:
            ConfigError: the ranks have no common scale. ProgramFailed: the program failed, ran too long, or left a
                result that does not fit.
        """
        client, unit = download.client.id, self._lora.unit
        place = (self.folder / client).absolute()
        round, spec = RoundFolder(place / "round"), replace(self._spec, scaling=self._scale(adapter))
        shutil.rmtree(round.path, ignore_errors=True)  # of a round that failed: no result of it may count now
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        round.path.mkdir()
        begun = _scaled(adapter, unit / spec.scaling)
        facts = round.write(
            RoundFacts(
                client=client, round=download.round + 1, rounds=max(self._rounds, download.round + 1),
                scaling=spec.scaling, trains=trained_parts(download.roles), moves_base=download.roles.moves_base,
                data=self._file(client, place), labels=self._labels,
            ),
            begun, spec,
        )  # fmt: skip
        log = place / "program.log"
        self._run(client, facts, round, log)
        try:
            made, result = round.read_result(begun, facts)
        except ProgramFailed as failed:
            raise ProgramFailed(f"the program of {client!r} ended well, but {failed} Its log: {log}") from None
        shutil.rmtree(round.path)
        made = replace(_scaled(made, spec.scaling / unit), base=adapter.base)
        return Trained(made, result.examples, result.loss, position + result.examples)

    def _scale(self, adapter: Adapter) -> float:
        """The client's own alpha / r, or what stands for it."""
        scales = {self._lora.scale(rank) for rank in adapter.ranks.values()}
        if len(scales) > 1:
            raise ConfigError(
                f"with train.command, lora.lora_alpha gives this client several scales ({sorted(scales)}), since its "
                f"ranks differ: set lora.scaling instead."
            )
        return scales.pop()

    def _file(self, client: str, place: Path) -> str | None:
        """The client's file of examples: its own, or one written here once (`datasets` caches each new file)."""
        data = self._data.get(client)
        if not isinstance(data, Rows):
            return None if data is None else str(data.absolute())
        if client not in self._written:
            self._written[client] = place / f"data{data.suffix}"
            data.write(self._written[client])
        return str(self._written[client])

    def _run(self, client: str, facts: RoundFacts, round: RoundFolder, log: Path) -> None:
        """Run the program to its end. Raises `ProgramFailed`."""
        command = [word.replace(_DATA, facts.data or "") for word in self._program.command]
        env = {"HF_DATASETS_CACHE": str(log.parent / "datasets"), **os.environ}
        env |= {VARIABLE: str(round.path), "PATH": search_path()}
        what, began, limit = f"the program of {client!r}", time.monotonic(), self._program.timeout
        with log.open("wb") as file, doing(what):
            try:
                process = subprocess.Popen(
                    command, env=env, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True, preexec_fn=partial(killed_with, os.getpid()),
                )  # fmt: skip
            except OSError as error:
                raise ProgramFailed(f"{what} cannot be started: {command[0]!r}: {error.strerror}.") from error
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise ProgramFailed(
                    f"{what} ran longer than its timeout of {limit:g} s and was ended. Its log: {log}"
                ) from None
            finally:
                end(process)  # with those that it has started, as a launcher does
        if code:
            raise ProgramFailed(
                f"{what} ended {how_ended(code)} after {time.monotonic() - began:.0f} s. {_last_line(log)} "
                f"Its log: {log}"
            )


def check_program(program: Program) -> None:
    """Raises `ConfigError` if the command's program does not exist."""
    name = program.command[0]
    if shutil.which(name, path=search_path()) is None:
        raise ConfigError(f"train.command: {name!r} is no program here. Check it, or give its whole path.")


def search_path() -> str:
    """Where programs are looked for: in this process's environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _scaled(adapter: Adapter, factor: float) -> Adapter:
    """The adapter in other units. A power of two, or 1, changes no digit."""
    base = None if adapter.base is None else {name: scaled(lora, factor) for name, lora in adapter.base.items()}
    return Adapter({name: scaled(lora, factor) for name, lora in adapter.modules.items()}, adapter.heads, base)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"Its last line: {lines[-1]!r}." if lines else "It said nothing."
