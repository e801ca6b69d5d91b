"""How one round's uploads get to the server: one or more exchanges of messages with every client, then a close.

    intake = server.open(state)
    question = intake.ask()                       what all clients get before they answer
    intake.add(question.answer(upload))           each client; `answer` runs where the client is
    ...                                           again, `intake.exchanges` times in all
    state = intake.close()

Plain uploads are one exchange whose answer is the upload itself, so that `add(upload)` and `close()` are all of it. An
engine plays the exchanges and never asks which intake it got.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedlora.core.messages import Upload
from fedlora.errors import QuorumNotMet, UploadRefused
from fedlora.server.checks import check_types
from fedlora.server.state import ServerState, Tally
from fedlora.server.terms import Terms


class Message(Protocol):
    """What a client sends: its size on the wire, apart for modules and heads."""

    @property
    def nbytes_modules(self) -> int: ...

    @property
    def nbytes_heads(self) -> int: ...


class Question(Protocol):
    """What the server sends before an exchange, beside the download: for plain uploads nothing."""

    def nbytes(self, upload: Upload) -> int:
        """Of what the client of this upload is sent."""

    def answer(self, upload: Upload) -> Message | None:
        """The client's message; None: it has nothing to say, and takes no part in what follows.

        Raises:
            UploadRefused: its own check failed, so that it stays out of the round.
        """


class Intake(Protocol):
    """One round at the server. Mutable, used up by `close`.

    exchanges: how many there are. keeps: whether it hands the uploads themselves on, so that a record may show them.
    asked: whom to ask, where the round itself decides that (a private one); None: whoever plays it decides.
    """

    exchanges: int
    keeps: bool

    @property
    def asked(self) -> tuple[str, ...] | None: ...

    def ask(self) -> Any:
        """The next exchange's `Question`; ends the one before."""

    def add(self, message: Any) -> None:
        """One client's answer. Raises `UploadRefused`, and nothing of it reaches the state."""

    def close(self) -> ServerState:
        """The next state. Raises `QuorumNotMet`."""


class WholeUpload:
    """The question of an intake that takes uploads as they are."""

    def nbytes(self, upload: Upload) -> int:
        return 0

    def answer(self, upload: Upload) -> Upload:
        return upload


@dataclass(frozen=True, eq=False)
class Taken:
    """What became of one client's part in one exchange. refusal: why it does not count; None: it does, or it abstained.
    up_modules, up_heads, down: bytes that travelled for it, also of a refused message."""

    upload: Upload
    exchange: int
    refusal: UploadRefused | None
    up_modules: int = 0
    up_heads: int = 0
    down: int = 0


def take_in(intake: Intake, uploads: Iterable[Upload]) -> Iterator[Taken]:
    """All exchanges of a round, with both sides in this process; then the intake can be closed.

    Uploads are drawn one by one, and kept beyond their turn only where another exchange asks for them again.
    """
    for exchange in range(intake.exchanges):
        question, again = intake.ask(), []
        last = exchange + 1 == intake.exchanges
        for upload in uploads:
            message, refusal = None, None
            try:
                check_types(upload)
                message = question.answer(upload)
                if message is not None:
                    intake.add(message)
            except UploadRefused as error:
                refusal = error
            modules, heads = (message.nbytes_modules, message.nbytes_heads) if message is not None else (0, 0)
            down = question.nbytes(upload) if isinstance(upload, Upload) else 0
            yield Taken(upload, exchange, refusal, modules, heads, down)
            if message is not None and refusal is None and not last:
                again.append(upload)
        uploads = again


@dataclass(eq=False)
class Attendance:
    """Who counts in a round: each upload is looked at once, and nobody's fate is forgotten.

    counts: client -> n_i of those that were accepted. abstained: sent 0 examples. refused: client -> why.
    """

    terms: Terms
    counts: dict[str, float] = field(default_factory=dict)
    abstained: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)

    def take(self, upload: Upload) -> bool:
        """Whether the upload counts (False: it abstained), and from now on it does. Raises `UploadRefused`."""
        check_types(upload)
        client = upload.client.id
        try:
            if client in self.counts or client in self.abstained:
                raise UploadRefused(client, "a second upload in the same round; the first one stands.")
            if not self.terms.check(upload):
                self.abstained.add(client)
                return False
        except UploadRefused as refusal:
            self.refused.setdefault(client, refusal.reason)
            raise
        self.counts[client] = self.terms.count(upload)
        return True

    def refuse(self, refusal: UploadRefused) -> None:
        """Take an upload back that was counted: another check than ours refused it."""
        self.counts.pop(refusal.client, None)
        self.refused.setdefault(refusal.client, refusal.reason)

    def require_quorum(self) -> None:
        """Raises `QuorumNotMet` where too few were accepted."""
        quorum = self.terms.quorum or 1
        if len(self.counts) < quorum:
            refused = "; ".join(f"{c}: {why}" for c, why in sorted(self.refused.items())) or "none"
            raise QuorumNotMet(
                f"round {self.terms.number}: {len(self.counts)} usable uploads, the quorum is {quorum} "
                f"({len(self.abstained)} abstained; refused: {refused}). The state is unchanged."
            )

    def tally(self, weights: dict[str, float]) -> Tally:
        """Everybody's fate, with the weights p_i of those who counted."""
        return Tally(weights, tuple(sorted(self.abstained)), dict(sorted(self.refused.items())))
