"""An intake by the two exchanges of `sketch`, over all modules and heads: the server's side and the clients'.

    opened = Server(method, sketch=Sketch(rank=64)).open(state)
    opened.add(first_messages(upload, opened.plans, n))                         each client, then
    bases = opened.bases()                                                      sent to all of them
    opened.add(second_messages(upload, bases, opened.plans, n))                 each client again
    state = opened.close()

The server keeps sums only: its memory does not grow with the clients, and secure aggregation can compute them in its
place. What it cannot do then is look at one client's message, so a client checks its own update before it adds it, and
shares and refusals of single clients are not known. Who is gone by the second exchange is missing from that one alone:
both are divided by their own examples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlora.core.messages import Upload
from fedlora.core.pairing import FromPair, Pair
from fedlora.core.read_only import ReadOnly
from fedlora.errors import HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.linalg.own_modes import own_modes
from fedlora.seeds import derive_seed
from fedlora.server.checks import check_count
from fedlora.server.closing import closed
from fedlora.server.heads import HeadSums
from fedlora.server.method_faults import blamed_on
from fedlora.server.sketch import (
    CoreMessage,
    RangeMessage,
    Sketched,
    SketchPlan,
    core_message,
    range_basis,
    range_message,
    sketched,
)
from fedlora.server.state import ServerState, Tally
from fedlora.server.terms import Terms

log = logging.getLogger("fedlora.server")

M = TypeVar("M", RangeMessage, CoreMessage)


@dataclass(frozen=True)
class Sketch:
    """rank: R, what the server keeps of each module. oversample: directions beyond it that are sketched along.
    least_captured: the share of the clients' subspaces under which a round is refused. most_error: the relative error
    of the mean over which it is.

    Example:
        >>> server = Server(build("glora"), sketch=Sketch(rank=4))
    """

    rank: int
    oversample: int = 16
    least_captured: float = 0.5
    most_error: float = 0.8


@dataclass(frozen=True, eq=False)
class FirstMessages:
    """Module -> message."""

    modules: Mapping[str, RangeMessage]

    def __add__(self, other: FirstMessages) -> FirstMessages:
        return FirstMessages(_added(self.modules, other.modules))

    @property
    def nbytes_modules(self) -> int:
        return _nbytes(self.modules.values())

    @property
    def nbytes_heads(self) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class SecondMessages:
    """Module -> message; heads: n_i times each head, float64, and n_i."""

    modules: Mapping[str, CoreMessage]
    heads: HeadSums

    def __add__(self, other: SecondMessages) -> SecondMessages:
        return SecondMessages(_added(self.modules, other.modules), self.heads + other.heads)

    @property
    def nbytes_modules(self) -> int:
        return _nbytes(self.modules.values())

    @property
    def nbytes_heads(self) -> int:
        return self.heads.nbytes


def first_messages(upload: Upload, plans: Mapping[str, SketchPlan], examples: float) -> FirstMessages:
    """A client's part in the first exchange. examples: n_i, 1 for everybody where all count alike.

    Raises:
        UploadRefused: numbers that a sum in float32 could not carry: the client stays out of this round.
    """
    check_count(replace(upload, num_examples=examples))
    for name, lora in upload.adapter.modules.items():
        size = math.prod(float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64)) for t in lora.factors)
        if not math.isfinite(size):
            raise UploadRefused(upload.client.id, f"module {name!r} holds NaN or Inf: training diverged there.")
        if 0 < size * examples < 1e-28:
            raise UploadRefused(
                upload.client.id,
                f"examples times the update of module {name!r} are {size * examples:.1e}: messages in float32 end "
                f"there. Give num_examples in larger units.",
            )
        if not size < 1e18:
            raise UploadRefused(
                upload.client.id, f"the update of module {name!r} has size up to {size:.1e}: sums in float32 end there."
            )
    return FirstMessages({name: range_message(x, examples, plans[name]) for name, x in upload.adapter.modules.items()})


def second_messages(
    upload: Upload, bases: Mapping[str, Tensor], plans: Mapping[str, SketchPlan], examples: float
) -> SecondMessages:
    """A client's part in the second exchange."""
    modules = {
        name: core_message(lora, examples, bases[name], plans[name]) for name, lora in upload.adapter.modules.items()
    }
    return SecondMessages(ReadOnly(modules), HeadSums.of(upload.adapter.heads, examples))


@dataclass(frozen=True, eq=False)
class FirstQuestion:
    """What a client needs for its first answer. The plans are derived on both sides and do not travel."""

    terms: Terms
    plans: Mapping[str, SketchPlan]

    def nbytes(self, upload: Upload) -> int:
        return 0

    def answer(self, upload: Upload) -> FirstMessages | None:
        """Once the client's own check of its update has passed; None: it has no examples, and abstains."""
        if not self.terms.check(upload):
            return None
        return first_messages(upload, self.plans, self.terms.count(upload))


@dataclass(frozen=True, eq=False)
class SecondQuestion:
    """What a client needs for its second answer. bases: module -> Q (d_out, width); exact: the same in float64."""

    terms: Terms
    plans: Mapping[str, SketchPlan]
    bases: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]

    def nbytes(self, upload: Upload) -> int:
        return sum(self.bases[name].nbytes for name in upload.adapter.modules)

    def answer(self, upload: Upload) -> SecondMessages:
        return second_messages(upload, self.exact, self.plans, self.terms.count(upload))


class SketchedRound:
    """The server's side of one round: an `Intake` of two exchanges. Mutable, used up by `close`."""

    exchanges = 2
    asked = None
    keeps = False

    def __init__(self, terms: Terms, method: FromPair[Any], sketch: Sketch) -> None:
        self._terms, self._sketch, self._method = terms, sketch, method
        shapes = {name: lora.factors for name, lora in terms.state.start.modules.items()}
        self.plans: Mapping[str, SketchPlan] = ReadOnly({
            name: SketchPlan(
                B.shape[0], A.shape[1], min(sketch.rank, B.shape[0]),
                derive_seed(terms.seed, "sketch", terms.state.round, name), sketch.oversample,
            )
            for name, (B, A) in shapes.items()
        })  # fmt: skip
        self._asked = 0
        self._first: FirstMessages | None = None
        self._second: SecondMessages | None = None
        self._bases: Mapping[str, Tensor] = {}
        self._clients = 0
        self._examples: dict[str, float] = {}

    def ask(self) -> FirstQuestion | SecondQuestion:
        self._asked += 1
        if self._asked == 1:
            return FirstQuestion(self._terms, self.plans)
        bases = self.bases()
        exact = ReadOnly({name: basis.double() for name, basis in bases.items()})  # once for all clients here
        return SecondQuestion(self._terms, self.plans, bases, exact)

    @own_modes()
    def add(self, messages: FirstMessages | SecondMessages) -> None:
        """One client's messages of an exchange, or the sum of several clients' of the first one.

        Each of the second exchange counts as one client for the quorum.
        """
        if isinstance(messages, FirstMessages):
            self._first = messages if self._first is None else self._first + messages
        else:
            self._second = messages if self._second is None else self._second + messages
            self._clients += 1

    def bases(self) -> Mapping[str, Tensor]:
        """Module -> Q (d_out, width), for everybody. Ends the first exchange."""
        if self._first is None:
            raise QuorumNotMet(f"round {self._terms.number}: nobody took part in the first exchange.")
        self._bases = ReadOnly({name: range_basis(x, self.plans[name]) for name, x in self._first.modules.items()})
        self._examples = {name: float(x.examples) for name, x in self._first.modules.items()}
        self._first = None
        return self._bases

    @property
    def held(self) -> int:
        """Bytes of all that the server holds for the round: the running sums and the bases."""
        sums = [part.nbytes_modules for part in (self._first, self._second) if part is not None]
        return sum(sums) + sum(basis.nbytes for basis in self._bases.values())

    @own_modes()
    def close(self) -> ServerState:
        """The next state.

        Raises:
            QuorumNotMet: too few in the second exchange. RankMismatch: the clients share too little to be sketched.
        """
        terms, total = self._terms, self._second
        quorum = terms.quorum or 1
        if total is None or self._clients < quorum:
            raise QuorumNotMet(
                f"round {terms.number}: {self._clients} clients in the second exchange, the quorum is {quorum}. "
                f"The state is unchanged."
            )
        stayed = {name: float(x.examples) / self._examples[name] for name, x in total.modules.items()}
        least = min(stayed, key=lambda name: stayed[name])
        if stayed[least] < 1 - 1e-6:
            log.warning(
                "round %d: clients with %.0f%% of the examples of %s took part in the first exchange and are missing "
                "from the second: the mean is of those who stayed, in a subspace that is of all.",
                terms.number, 100 * (1 - stayed[least]), least,
            )  # fmt: skip
        modules = {}
        for name, message in total.modules.items():
            result = sketched(
                message, self._bases[name], self.plans[name],
                least_captured=self._sketch.least_captured, most_error=self._sketch.most_error,
            )  # fmt: skip
            with blamed_on(terms.method, "from_pair"):
                modules[name] = self._method.from_pair(terms.state.modules[name], _pair(result, self.plans[name].rank))
        heads = total.heads.mean(terms.state.heads) if terms.roles.heads == "shared" else {}
        return closed(terms, modules, heads, Tally({}))


def _pair(result: Sketched, rank: int) -> Pair:
    """A sketch's result as methods take it: it is its own SVD, and of a rank that is chosen."""
    s = result.spectrum
    return Pair(
        s.U, s.s[:, None] * s.Vh, 1.0, spectrum=s, rank=rank, approximation="two-pass sketch", kept=result.captured,
        lost=result.lost, cut=result.cut, least=result.size,
    )  # fmt: skip


def require_plain(method: FromPair[Any]) -> None:
    """Raises `HyperparameterError` for options that a sketched round could not keep."""
    pairing = method.pairing()
    other = list(pairing.choice)
    if pairing.canonical != "product":
        other.append(f"canonical={pairing.canonical}")
    if pairing.weighting != "examples":
        other.append(f"weighting={pairing.weighting}")
    if pairing.rank_tol is not None:
        other.append(f"rank_tol={pairing.rank_tol}")
    if other:
        raise HyperparameterError(
            f"a sketched round has a rank of its own, the projector basis, and weights by the server's choice; leave "
            f"out {', '.join(other)}."
        )


def _nbytes(messages: Iterable[RangeMessage | CoreMessage]) -> int:
    tensors = [getattr(message, f.name) for message in messages for f in fields(message)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _added(a: Mapping[str, M], b: Mapping[str, M]) -> dict[str, M]:
    """Sums by module; a module that only one of them has is that one's."""
    return {
        name: a[name] + b[name] if name in a and name in b else (a.get(name) or b[name]) for name in sorted({*a, *b})
    }
