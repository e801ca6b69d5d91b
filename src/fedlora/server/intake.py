"""How one round's uploads get to the server, and what happens to each client.

    intake = server.open(state)
    intake.add(upload)             each client's, in any order
    state = intake.close()

An engine never needs to know which intake it has: the server decides whether uploads are kept or added up (`uploads`),
or become one clipped and noised sum (`private_round`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fedlora.core.messages import Upload
from fedlora.errors import QuorumNotMet, UploadRefused
from fedlora.server.checks import check_types
from fedlora.server.state import ServerState, Tally
from fedlora.server.terms import Terms


class Intake(Protocol):
    """One round at the server. Mutable; `close` ends it.

    keeps: whether the uploads themselves stay available, so that a record may show them. stored: whether the round's
    sum was stored before this (a private one, before a kill): then nobody is asked. asked: the clients to ask, if the
    round itself decides (a private one); None: the engine decides.
    """

    keeps: bool
    stored: bool

    @property
    def asked(self) -> tuple[str, ...] | None: ...

    def add(self, upload: Upload) -> None:
        """Count one client's upload. Raises `UploadRefused`; then nothing of it reaches the state."""

    def refuse(self, refusal: UploadRefused) -> None:
        """Record an answer that could not become an upload. A robust rule counts it as a liar's, like uploads that the
        round itself refuses, but unlike a missing answer."""

    def close(self) -> ServerState:
        """The next state. Raises `QuorumNotMet`."""


@dataclass(frozen=True, eq=False)
class Taken:
    """The fate of one client's upload. refusal: why it does not count; None: it counts, or the client abstained.
    up_modules, up_heads: the bytes that it took, even if it was refused."""

    upload: Upload
    refusal: UploadRefused | None
    up_modules: int = 0
    up_heads: int = 0


def take_in(intake: Intake, uploads: Iterable[Upload]) -> Iterator[Taken]:
    """Add uploads one by one as they arrive; afterwards the intake can be closed."""
    for upload in uploads:
        refusal, modules, heads = None, 0, 0
        try:
            check_types(upload)
            modules, heads = upload.nbytes_modules, upload.nbytes_heads
            intake.add(upload)
        except UploadRefused as error:
            refusal = error
        yield Taken(upload, refusal, modules, heads)


@dataclass(eq=False)
class Attendance:
    """Who counts in a round: checks each upload once and records every client's fate.

    counts: client -> n_i, of accepted uploads. abstained: sent 0 examples. refused: client -> reason.
    """

    terms: Terms
    counts: dict[str, float] = field(default_factory=dict)
    abstained: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)

    def take(self, upload: Upload) -> bool:
        """Count the upload; False if the client abstained. Raises `UploadRefused`."""
        check_types(upload)
        client = upload.client.id
        try:
            if client in self.counts or client in self.abstained:
                raise UploadRefused(client, "a second upload in the same round; the first one counts.")
            if not self.terms.check(upload):
                self.abstained.add(client)
                return False
        except UploadRefused as refusal:
            self.refused.setdefault(client, refusal.reason)
            raise
        self.counts[client] = self.terms.count(upload)
        return True

    def refuse(self, refusal: UploadRefused) -> None:
        """Record a refusal by another check; an upload that already counted is removed."""
        self.counts.pop(refusal.client, None)
        self.refused.setdefault(refusal.client, refusal.reason)

    def require_quorum(self) -> None:
        """Raises `QuorumNotMet` if too few uploads were accepted."""
        quorum = self.terms.quorum or 1
        if len(self.counts) < quorum:
            raise QuorumNotMet(
                f"round {self.terms.number}: {len(self.counts)} usable uploads, the quorum is {quorum} "
                f"({len(self.abstained)} abstained; refused: {self.refused_said()}). The state is unchanged.",
                self.refused,
            )

    def refused_said(self) -> str:
        """Who was refused, and why, for an error."""
        return "; ".join(f"{client}: {why}" for client, why in sorted(self.refused.items())) or "none"

    def tally(self, weights: dict[str, float]) -> Tally:
        """Every client's fate, with the weights p_i of those that count."""
        return Tally(weights, tuple(sorted(self.abstained)), dict(sorted(self.refused.items())))
