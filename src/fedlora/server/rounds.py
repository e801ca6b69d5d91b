"""A round: uploads come in any order, and at close one call makes the next state, `method.aggregate(state, updates)`.

    Kept(rule=None)   every upload is kept; a robust rule may weigh the changes                          (`kept`)
    Streamed()        every upload is added to a float64 sum and forgotten                               (`streamed`)
    Private(...)      every clipped change is added to one integer sum, which is noised at close         (`private`)

The three differ only in what they do with an upload, and in the terms that they hand to the method.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.core.method import Method, Roles, Update
from fedlora.core.read_only import ReadOnly
from fedlora.errors import HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.linalg import unit_roundoff
from fedlora.linalg.own_modes import own_modes
from fedlora.server.checks import check
from fedlora.server.judged import Judged
from fedlora.server.method_faults import call, checked_states
from fedlora.server.rules import Rule
from fedlora.server.state import ServerState, Tally

if TYPE_CHECKING:
    from fedlora.server.server import Server

log = logging.getLogger("fedlora.server")

Weighting = Literal["examples", "uniform"]

_KEEP = "Keep the uploads: round=Kept(), or in a file of settings neither server.stream nor [privacy]"
SECOND_UPLOAD = "a second upload in the same round; the first one counts."
_AT_ONCE = 2**25  # bytes of updates that one `aggregate_all` gets: enough to batch, little beside a round
# What methods report -> the share of the mean's energy that needs no warning, and the warning. The second is only a
# coarse bound.
_LOSSES = {
    "dropped": (1e-3, "is lost to rounding. Send float32."),
    "rounding": (
        1e-2,
        "lies in directions so weak beside the clients' factors that storing these could have made them. The server "
        "keeps them; readouts hold some that depend on the clients' coordinates. Send float32.",
    ),
}  # fmt: skip


class RoundKind(ABC):
    """What `Server(round=...)` takes: a frozen dataclass with the options of this kind of round, and no others."""

    rule: Rule | None = None
    quorum: int | None = None

    @property
    @abstractmethod
    def weighs_by(self) -> Weighting:
        """What sets p_i: the numbers of examples, or the number of clients."""

    @abstractmethod
    def require(self, method: Method[Any], roles: Roles) -> None:
        """Raises `HyperparameterError`, with a way out, if this kind of round is wrong for the method."""

    @abstractmethod
    def open(self, server: Server, state: ServerState) -> OpenRound:
        """A round that starts from `state`."""


class OpenRound(ABC):
    """A round under way: `add` uploads in any order, then `close`.

    p_i is normalised over the round's clients, and again in each module over those that hold it. quorum None: the
    engine that plays the round ends it at the first bad upload, and one good one is enough to close it. A number: bad
    uploads are left out by name (`Tally.refused`), and close raises `QuorumNotMet` if fewer good ones came.

    stored: whether the round's sum was stored before (a private one, before a kill): then nobody is asked.
    """

    stored: bool = False

    def __init__(self, server: Server, state: ServerState) -> None:
        self.method, self.state, self.kind = server.method, state, server.round
        self.roles = server.roles(state)
        self.counts: dict[str, float] = {}  # client -> n_i, or 1 if all count alike
        self.abstained: set[str] = set()
        self.refused: dict[str, str] = {}
        self._closed = False

    @property
    def number(self) -> int:
        """The round's number, from 1."""
        return self.state.round + 1

    @property
    def asked(self) -> tuple[str, ...] | None:
        """The clients to ask, if the round itself decides (a private one); None: the engine decides."""
        return None

    @own_modes()
    def add(self, upload: Upload) -> None:
        """Take one upload. With 0 examples it abstains: a weight of zero reaches no method.

        Its tensors are not copied: do not write to them until the round is closed.

        Raises:
            UploadRefused: it is not what this round asked for. It is left out, and the round goes on.
            HyperparameterError: the round is closed.
        """
        if self._closed:
            raise HyperparameterError(f"round {self.number} is closed: this upload would be in no state.")
        client = upload.client.id
        try:
            self._admit(client)
            examples = check(upload, self.state, self.roles, self.method)
            if not examples:
                self.abstained.add(client)
                return
            count = examples if self.kind.weighs_by == "examples" else 1.0
            self._take(upload, count)
            self.counts[client] = count
        except UploadRefused as refusal:
            self.refuse(refusal)
            raise

    def refuse(self, refusal: UploadRefused) -> None:
        """Record an answer that could not become an upload."""
        self.refused.setdefault(refusal.client, refusal.reason)

    @own_modes()
    def close(self) -> ServerState:
        """The next state.

        Raises:
            QuorumNotMet: too few good uploads came; the state is unchanged. LostUpdate: from the method.
        """
        least = 1 if self.kind.quorum is None else self.kind.quorum
        if len(self.counts) < least:
            self._too_few(f"{len(self.counts)} usable uploads, the quorum is {least}")
        judged = self._settle()
        after = self._aggregated()
        heads = self._mean_heads() if self.roles.heads == "shared" else {}
        modules = {**self.state.modules, **after}  # a module that no client of this round holds stays as it is
        warn_of_losses(self.method, self.number, modules)
        self._closed = True
        return replace(
            self.state, round=self.number, modules=ReadOnly(modules), heads=ReadOnly({**self.state.heads, **heads}),
            tally=self._tally(judged),
        )  # fmt: skip

    def _too_few(self, why: str) -> None:
        refused = "; ".join(f"{client}: {reason}" for client, reason in sorted(self.refused.items())) or "none"
        raise QuorumNotMet(
            f"round {self.number}: {why} ({len(self.abstained)} abstained; refused: {refused}). The state is "
            f"unchanged.",
            self.refused,
        )

    def _tally(self, judged: Judged | None) -> Tally:
        return Tally(
            shares(dict(sorted(self.counts.items()))), tuple(sorted(self.abstained)),
            dict(sorted(self.refused.items())), judged,
        )  # fmt: skip

    def _aggregated(self) -> dict[str, Any]:
        """Module -> its next state, for those that somebody holds; some `_AT_ONCE` bytes of updates at a time."""
        after: dict[str, Any] = {}
        group: dict[str, list[Update]] = {}
        names, size = list(self.state.modules), 0
        for name in names:
            if updates := self._updates(name):
                group[name] = updates
                size += sum(t.nbytes for u in updates for t in u.lora.tensors().values())
            if group and (size >= _AT_ONCE or name == names[-1]):
                states = [self.state.modules[n] for n in group]
                made = call(self.method, "aggregate_all", states, list(group.values()))
                after |= zip(group, checked_states(self.method, "aggregate", made, len(group)), strict=True)
                group, size = {}, 0
        return after

    def _admit(self, client: str) -> None:
        """Raises `UploadRefused` if this client may not send an upload now. After a refused one it may send another."""
        if client in self.counts or client in self.abstained:
            raise UploadRefused(client, SECOND_UPLOAD)

    @abstractmethod
    def _take(self, upload: Upload, count: float) -> None:
        """Keep or add up a checked upload."""

    def _settle(self) -> Judged | None:
        """What must happen once all uploads are in, before anything is aggregated."""
        return None

    @abstractmethod
    def _updates(self, module: str) -> list[Update]:
        """The method's input for one module; none if nobody holds it."""

    @abstractmethod
    def _mean_heads(self) -> dict[str, Tensor]:
        """The next heads, in the dtypes of the server's."""


def require_sums(kind: str, method: Method[Any]) -> None:
    """Raises `HyperparameterError` unless the method can work from one sum instead of its clients."""
    if method.linear_in == "clients":
        raise HyperparameterError(
            f"{kind} rounds have only a sum of the round's uploads, and {method} needs every client's, because it has "
            f"weights or votes of its own. {_KEEP}; or, to cut an exact mean to a rank, use svd with that rank. A "
            f"method of yours that uses only sums says so in `linear_in`."
        )
    if method.linear_in == "products" and method.one_rank:  # fedex-lora
        raise HyperparameterError(
            f"{kind} rounds have only a sum of products, and {method.name} averages the factors of one rank as well. "
            f"{_KEEP}; or use flora, which adds the exact mean to the base weights, too."
        )


def require_counting(kind: RoundKind, weighting: object, quorum: object) -> None:
    """Raises `HyperparameterError` unless these are a weighting (or None) and a quorum."""
    name = type(kind).__name__
    if weighting not in (*get_args(Weighting), None):
        raise HyperparameterError(f"{name}: weighting is one of {get_args(Weighting)}; got {weighting!r}.")
    whole = isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1
    if quorum is not None and not whole:
        raise HyperparameterError(f"{name}: quorum is at least 1 good upload, or None; got {quorum!r}.")


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Client -> its share of the counts."""
    total = math.fsum(counts.values())
    return {client: n / total for client, n in counts.items()}


def roundoff_of(lora: LoRA) -> float:
    """u of the coarser dtype of its factors."""
    return max(unit_roundoff(t.dtype) for t in lora.tensors().values())


def warn_of_losses(method: Method[Any], round: int, modules: Mapping[str, Any]) -> None:
    """Logs a warning if a method reports that its result lacks part of the mean update, apart from its rank budget."""
    facts = {name: call(method, "diagnostics", state) for name, state in modules.items()}
    for key, (silent, what) in _LOSSES.items():
        large = {name: x for name, f in facts.items() if isinstance(x := f.get(key), float) and x > silent}
        if large:
            worst = max(large, key=lambda name: large[name])
            log.warning(
                "round %d: up to %.2g%% of the mean's energy in %s (%d of %d modules) %s",
                round, 100 * large[worst], worst, len(large), len(modules), what,
            )  # fmt: skip
