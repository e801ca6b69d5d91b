"""The terms of one round: what the server requests from its clients and how it counts them. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fedlora.core.lora import LoRA
from fedlora.core.messages import Client, Missing, Upload, checked_examples
from fedlora.core.method import Method, Roles
from fedlora.core.multiplied import TakesMultipliers, multiplied_how
from fedlora.errors import HyperparameterError, RankMismatch, UploadRefused
from fedlora.server.checks import check_adapter
from fedlora.server.method_faults import readouts
from fedlora.server.robust_rules.rule import Rule
from fedlora.server.state import ServerState

Weighting = Literal["examples", "uniform"]


def weighs_by(weighting: Weighting | None, rule: bool) -> Weighting:
    """The weighting; None means "uniform" with a robust rule, because liars may lie about examples, else "examples"."""
    return weighting or ("uniform" if rule else "examples")


@dataclass(frozen=True, eq=False)
class Terms:
    """One round as `Server.open` sets it up: the method, the state before it, its roles, and the server's options."""

    method: Method[Any]
    state: ServerState
    roles: Roles
    weighting: Weighting
    missing: Missing
    quorum: int | None
    workers: int | None
    rule: Rule | None = None

    @property
    def number(self) -> int:
        """The round's number, from 1."""
        return self.state.round + 1

    def count(self, upload: Upload) -> float:
        """n_i, or 1 if all count alike."""
        return float(upload.num_examples) if self.weighting == "examples" else 1.0

    def check(self, upload: Upload) -> bool:
        """Whether the upload is what this round requested; False: it is, but it abstains with 0 examples.

        Raises:
            UploadRefused: with the client id and the reason. It raises nothing else, whatever the upload holds.
            MethodFault: from a readout at a rank that no client had before.
        """
        try:
            counts = self._checked(upload)
        except UploadRefused:
            raise
        except Exception as error:
            raise UploadRefused(upload.client.id, f"it cannot be read: {type(error).__name__}: {error}.") from error
        if counts:
            self._require_served(upload.client)
        return counts

    def _checked(self, upload: Upload) -> bool:
        if checked_examples(upload) == 0:
            return False
        try:
            ranks = ranks_of(upload.client, self.state)
        except HyperparameterError as error:
            raise UploadRefused(upload.client.id, str(error)) from error
        check_adapter(
            upload,
            ranks=ranks,
            roles=self.roles,
            start=self.state.start,
            heads=self.state.heads,
            begun=lambda: self.begun(upload.client),
            averages=multiplied_how(self.method) == "factors",
        )
        return True

    @cached_property
    def _served(self) -> set[tuple[str, int]]:
        """(module, rank) that the method is known to serve: the start's ranks, then those of earlier uploads."""
        return set(self.state.start.ranks.items())

    def _require_served(self, client: Client) -> None:
        """Raises `UploadRefused` if the method has no readout at the client's ranks: it cannot average them either."""
        unknown = client.ranks(self.state.modules).items() - self._served
        try:
            self.begun(Client(client.id, dict(sorted(unknown))))
        except RankMismatch as error:
            raise UploadRefused(client.id, str(error)) from error
        self._served.update(unknown)

    def begun(self, client: Client) -> dict[str, LoRA]:
        """Module -> the client's readout, at its current ranks."""
        ranks = client.ranks(self.state.modules)
        made = readouts(self.method, self.state.modules, self.state.start, client.id, ranks, self.roles)
        return {name: readout.lora for name, readout in made.items()}

    def require_multipliers(self, columns: int | None = None) -> None:
        """Raises `HyperparameterError` if the method's options undo a robust rule."""
        if isinstance(self.method, TakesMultipliers):
            self.method.require_multipliers(columns)


def ranks_of(client: Client, state: ServerState) -> dict[str, int]:
    """Module -> r, for the modules that the client holds. Raises `HyperparameterError` for a module not adapted."""
    if isinstance(client.rank, Mapping):
        unknown = sorted(set(client.rank) - set(state.modules))
        if unknown:
            raise HyperparameterError(
                f"client {client.id!r} declares a rank for {unknown[0]!r}, which is not an adapted module. The "
                f"modules are {', '.join(list(state.modules)[:3])}, ..."
            )
    return client.ranks(state.modules)
