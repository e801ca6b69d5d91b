"""The table [train] of a run: fedlora's own loop, or a program of the client's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedlora.training.programs import Program
from fedlora.training.settings import TrainSection

Command = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0)]


class TrainTable(TrainSection):
    """One client's round: by fedlora's own loop, whose optimiser is new each round as in all reference codes, or by a
    program of the client's.

    command: a program and its arguments, such as ["python", "my_train.py"], started once for each client and round; it
    finds a PEFT folder and leaves one, and all other keys here have no effect. {data} in it is the client's file of
    training examples. timeout: seconds after which the program is ended and its client fails; not set: none.
    """

    command: Command | None = None
    timeout: Seconds | None = None

    def program(self) -> Program | None:
        """The clients' program, if they have one."""
        return None if self.command is None else Program(tuple(self.command), self.timeout)


__all__ = ["Command", "Seconds", "TrainTable"]
