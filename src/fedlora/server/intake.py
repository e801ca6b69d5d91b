"""How one round's uploads get to the server, and whose fate is what.

    intake = server.open(state)
    intake.add(upload)             each client's, in any order
    state = intake.close()

An engine never asks which intake it got: whether uploads are kept or added up (`uploads`) or one clipped and noised
sum (`private_round`) is the server's affair.
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
    """One round at the server. Mutable, used up by `close`.

    keeps: whether it hands the uploads themselves on, so that a record may show them. asked: whom to ask, where the
    round itself decides that (a private one); None: whoever plays it decides.
    """

    keeps: bool

    @property
    def asked(self) -> tuple[str, ...] | None: ...

    def add(self, upload: Upload) -> None:
        """One client's upload. Raises `UploadRefused`, and nothing of it reaches the state."""

    def refuse(self, refusal: UploadRefused) -> None:
        """An answer of which no upload could be made. A robust rule counts it with the liars, as it does whom the round
        itself refuses; not who did not answer."""

    def close(self) -> ServerState:
        """The next state. Raises `QuorumNotMet`."""


@dataclass(frozen=True, eq=False)
class Taken:
    """What became of one client's upload. refusal: why it does not count; None: it does, or it abstained. up_modules,
    up_heads: bytes that travelled for it, also of a refused one."""

    upload: Upload
    refusal: UploadRefused | None
    up_modules: int = 0
    up_heads: int = 0


def take_in(intake: Intake, uploads: Iterable[Upload]) -> Iterator[Taken]:
    """Adds uploads one by one, as they are drawn; then the intake can be closed."""
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
        """Another check than ours refused it. An upload that was counted is taken back."""
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
