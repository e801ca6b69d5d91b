"""A round by the two exchanges of `sketch`, over all modules and heads: what the server holds, what a client computes.

    opened = SketchedRound(server, state, Sketch(rank=64))
    opened.add_first(first_messages(upload, opened.plans, n))                   each client, then
    bases = opened.bases()                                                      sent to all of them
    opened.add_second(second_messages(upload, bases, opened.plans, n))          each client again
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
from types import MappingProxyType
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fedlora.checks import check_count
from fedlora.client import Upload
from fedlora.errors import HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.seeds import derive_seed
from fedlora.server import Server, ServerState, Tally, warn_of_losses
from fedlora.sketch import (
    CoreMessage,
    RangeMessage,
    Sketched,
    SketchPlan,
    core_message,
    range_basis,
    range_message,
    sketched,
)

log = logging.getLogger(__name__)

M = TypeVar("M", RangeMessage, CoreMessage)
S = TypeVar("S")


@runtime_checkable
class SketchedMethod(Protocol[S]):
    """A method whose aggregation a sketch can stand in for."""

    def require_sketching(self) -> None:
        """Raises `HyperparameterError` for options that a sketched round could not keep."""

    def aggregate_sketched(self, state: S, sketched: Sketched, rank: int) -> S:
        """The next state from a round's sketch of one matrix, at most `rank` directions of it."""


@dataclass(frozen=True)
class Sketch:
    """rank: R, what the server keeps of each module. oversample: directions beyond it that are sketched along.
    least_captured: the share of the clients' subspaces under which a round is refused. most_error: the relative error
    of the mean over which it is.
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


@dataclass(frozen=True, eq=False)
class SecondMessages:
    """Module -> message; heads: n_i times each head, float64; examples: n_i."""

    modules: Mapping[str, CoreMessage]
    heads: Mapping[str, Tensor]
    examples: float

    def __add__(self, other: SecondMessages) -> SecondMessages:
        heads = {name: head + other.heads[name] for name, head in self.heads.items()}
        return SecondMessages(_added(self.modules, other.modules), heads, self.examples + other.examples)


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
    modules = upload.adapter.modules
    heads = {name: examples * head.detach().double() for name, head in upload.adapter.heads.items()}
    return SecondMessages(
        {name: core_message(x, examples, bases[name], plans[name]) for name, x in modules.items()}, heads, examples
    )


class SketchedRound:
    """The server's side of one round. Mutable, used up by `close`.

    Raises:
        HyperparameterError: the method is none that a sketch can stand in for.
    """

    def __init__(self, server: Server, state: ServerState, sketch: Sketch) -> None:
        if not isinstance(server.method, SketchedMethod):
            raise HyperparameterError(f"a sketch stands in for glora's consensus; {server.method.name} has none.")
        server.method.require_sketching()
        if server.missing == "zero" or server.memory is not None:
            raise HyperparameterError("a sketch renormalises over who holds a module and keeps no uploads: leave out "
                                      "missing = 'zero' and memory.")  # fmt: skip
        self._server, self._state, self._sketch, self._method = server, state, sketch, server.method
        shapes = {name: (B.shape[0], A.shape[1]) for name, (B, A) in _factors(state).items()}
        self.plans: Mapping[str, SketchPlan] = MappingProxyType({
            name: SketchPlan(
                d_out, d_in, min(sketch.rank, d_out), derive_seed(server.seed, "sketch", state.round, name),
                sketch.oversample,
            )
            for name, (d_out, d_in) in shapes.items()
        })  # fmt: skip
        self._first: FirstMessages | None = None
        self._second: SecondMessages | None = None
        self._bases: Mapping[str, Tensor] = {}
        self._clients = 0
        self._examples: dict[str, float] = {}

    def add_first(self, messages: FirstMessages) -> None:
        """One client's messages of the first exchange, or the sum of several clients'."""
        self._first = messages if self._first is None else self._first + messages

    def bases(self) -> Mapping[str, Tensor]:
        """Module -> Q (d_out, width), for everybody. Ends the first exchange."""
        if self._first is None:
            raise QuorumNotMet(f"round {self._state.round + 1}: nobody took part in the first exchange.")
        self._bases = MappingProxyType(
            {name: range_basis(x, self.plans[name]) for name, x in self._first.modules.items()}
        )
        self._examples = {name: float(x.examples) for name, x in self._first.modules.items()}
        self._first = None
        return self._bases

    def add_second(self, messages: SecondMessages) -> None:
        """One client's messages of the second exchange; each call counts as one client for the quorum."""
        self._second = messages if self._second is None else self._second + messages
        self._clients += 1

    @property
    def held(self) -> int:
        """Bytes of all that the server holds for the round: the running sums and the bases."""
        sums = [x for part in (self._first, self._second) if part is not None for x in part.modules.values()]
        tensors = [getattr(x, f.name) for x in sums for f in fields(x)] + list(self._bases.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def close(self) -> ServerState:
        """The next state.

        Raises:
            QuorumNotMet: too few in the second exchange. RankMismatch: the clients share too little to be sketched.
        """
        server, state, total = self._server, self._state, self._second
        quorum = server.quorum or 1
        if total is None or self._clients < quorum:
            raise QuorumNotMet(
                f"round {state.round + 1}: {self._clients} clients in the second exchange, the quorum is {quorum}. "
                f"The state is unchanged."
            )
        stayed = {name: float(x.examples) / self._examples[name] for name, x in total.modules.items()}
        least = min(stayed, key=lambda name: stayed[name])
        if stayed[least] < 1 - 1e-6:
            log.warning(
                "round %d: clients with %.0f%% of the examples of %s took part in the first exchange and are missing "
                "from the second: the mean is of those who stayed, in a subspace that is of all.",
                state.round + 1, 100 * (1 - stayed[least]), least,
            )  # fmt: skip
        modules = dict(state.modules)
        for name, message in total.modules.items():
            result = sketched(
                message, self._bases[name], self.plans[name],
                least_captured=self._sketch.least_captured, most_error=self._sketch.most_error,
            )  # fmt: skip
            modules[name] = self._method.aggregate_sketched(state.modules[name], result, self.plans[name].rank)
        roles, made = server.roles(state), state.round + 1
        warn_of_losses(server.method, made, modules)
        heads = dict(state.heads)
        if roles.heads == "shared":
            heads = {name: (total.heads[name] / total.examples).to(head.dtype) for name, head in state.heads.items()}
        replaced = {part: made for part in state.changed if getattr(roles, part) == "shared"}
        return replace(
            state,
            round=made,
            modules=MappingProxyType(modules),
            heads=MappingProxyType(heads),
            changed={**state.changed, **replaced},
            tally=Tally({}),
        )


class BothSides:
    """A round with both sides in one process, for the engine: what clients keep between the exchanges is kept here.

    sent, sent_heads, received: bytes of the messages so far, all clients together.
    """

    def __init__(self, server: Server, state: ServerState, sketch: Sketch) -> None:
        self._round = SketchedRound(server, state, sketch)
        self._checks = server.open(state)
        self._at_clients: list[Upload] = []
        self._alike = server.weighting == "uniform"
        self.sent = self.sent_heads = self.received = 0

    def add(self, upload: Upload) -> None:
        """A client's first message, once its own check of its update has passed."""
        if not self._checks.check(upload):
            return
        message = first_messages(upload, self._round.plans, self._examples(upload))
        self.sent += _bytes(message.modules.values())
        self._round.add_first(message)
        self._at_clients.append(upload)

    def close(self) -> ServerState:
        """The second exchange with all who took part in the first."""
        bases = self._round.bases()
        exact = {name: basis.double() for name, basis in bases.items()}  # once for all clients here
        for upload in self._at_clients:
            message = second_messages(upload, exact, self._round.plans, self._examples(upload))
            self.sent += _bytes(message.modules.values())
            self.sent_heads += sum(head.numel() * head.element_size() for head in message.heads.values())
            self.received += sum(bases[name].numel() * bases[name].element_size() for name in message.modules)
            self._round.add_second(message)
        return self._round.close()

    def _examples(self, upload: Upload) -> float:
        return 1.0 if self._alike else float(upload.num_examples)


def _bytes(messages: Iterable[RangeMessage | CoreMessage]) -> int:
    tensors = [getattr(message, f.name) for message in messages for f in fields(message)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _factors(state: ServerState) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: lora.factors for name, lora in state.start.modules.items()}


def _added(a: Mapping[str, M], b: Mapping[str, M]) -> dict[str, M]:
    """Sums by module; a module that only one of them has is that one's."""
    return {
        name: a[name] + b[name] if name in a and name in b else (a.get(name) or b[name]) for name in sorted({*a, *b})
    }
