"""The method protocol: what a federated LoRA method is. Read this page first.

A method is a small state machine on ONE adapted matrix. Its state is an immutable value; its functions are pure:

    S = init(seed)            S = aggregate(S, updates)            readout(S, client, rank) -> what a client receives

Methods differ in (what they average) x (in which coordinates) x (how they read it out). Three examples:

* FedIT averages the factors B and A as they come and sends everyone the average. State: one pair (B, A).
* FedSA-LoRA averages only A. B is declared `local`: it never leaves the client, so there is no global model.
* GLoRA averages the updates B A, in coordinates of the subspace that the clients' updates span. State: that subspace
  and the average in it. Each client reads out the components that suit it, as many as its own rank.

Client code knows no method. A method only declares who owns each factor (`Roles`); `client.receive` and `client.send`
do the rest. `Server` applies a method to all modules, checks uploads, normalises weights and averages heads, so a
method never sees more than one matrix and never sees `alpha / r`.

Contracts (all in `fedlora.testing`; `fedlora methods check` runs them on your own method; s a state, us updates, c a
client, r a rank):

* rank:   readout(s, c, r).lora.rank == r, from init on
* alive:  no slot k of a readout has both B[:, k] == 0 and A[k, :] == 0, since its gradient would be zero for ever
* exact   (if claimed): effective(aggregate(s, us)) - base(s) == sum_i p_i B_i A_i, with base(s) from a readout of s
* gauge   (if claimed): the same state (up to round-off) when each (B_i, A_i) becomes (B_i Q_i, Q_i^-1 A_i)
* order:  the server sorts by client id, so aggregate(s, us) == aggregate(s, permuted us), bitwise
* purity: inputs stay bitwise unchanged; a state round-trips through `checkpoint`
* halves: splitting one client into two of half its weight changes nothing (exact methods; GLoRA at a fixed R)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedlora.core.base_change import BaseChange
from fedlora.core.lora import LoRA
from fedlora.errors import FactorNotShared
from fedlora.linalg.parallel import Each, one_by_one

Role = Literal["shared", "local", "frozen"]
NOBODY = ""  # marks an update that belongs to no client; client ids are not empty


@dataclass(frozen=True)
class Roles:
    """Who owns each part of the adapter this round.

    shared: trained, uploaded, replaced by the next readout. local: trained, never leaves the client. frozen: received,
    never trained, never uploaded; a server may replace it, and then sends it again. `heads` are fully trained tensors
    such as a classifier. moves_base: readouts may change the base weight W0 (`Readout.base`).

    Example:
        >>> build("ffa-lora").roles(round=0).A
        'frozen'
        >>> Roles(A="local").both_shared
        False
    """

    B: Role = "shared"
    A: Role = "shared"
    heads: Role = "shared"
    moves_base: bool = False

    @property
    def both_shared(self) -> bool:
        """Whether both factors travel, so that the upload holds the whole update."""
        return self.B == self.A == "shared"


@dataclass(frozen=True)
class Update:
    """What one client sends for one matrix, as the server passes it to a method.

    client: its id. weight: p_i, summing to 1 over the updates (to less with `Server(missing="zero")`). rank: the
    client's rank r_i. lora: the factors that travelled, in the compute dtype. stored: the dtype in which they arrived,
    which sets the size of their rounding noise.

    After a robust rule the weights may sum to less, and the last update may belong to `NOBODY`: it holds what the
    server sent to clients, in place of changes that do not count. It is already weighted, has weight 1, and has no
    history (`core.multiplied`; only a method that asks for "products" gets it).

    Example:
        >>> update = Update("site-1", 0.5, 2, LoRA(torch.ones(6, 2), torch.ones(2, 5)), torch.float32)
        >>> tuple(update.B.shape), tuple(update.A.shape)
        ((6, 2), (2, 5))
    """

    client: str
    weight: float
    rank: int
    lora: LoRA
    stored: torch.dtype

    @property
    def B(self) -> Tensor:
        """(d_out, r). Raises `FactorNotShared` if B is not shared."""
        return self._present("B")

    @property
    def A(self) -> Tensor:
        """(r, d_in). Raises `FactorNotShared` if A is not shared."""
        return self._present("A")

    def _present(self, name: str) -> Tensor:
        factor = self.lora.tensors().get(name)
        if factor is None:
            raise FactorNotShared(
                f"the method asked for factor {name} of client {self.client!r}, but it did not travel. "
                f"A method can use only the factors that its own `roles` declare shared."
            )
        return factor


@dataclass(frozen=True, eq=False)
class Readout:
    """What one client receives for one matrix.

    lora: of exactly the requested rank; local factors are None. base: how the base weight W0 has moved, or None if it
    never did. It is cumulative: a client that missed rounds applies what it lacks. fresh: lora was made for this call
    and nobody else holds it, so the server need not copy it before sending.

    Example:
        >>> Readout(LoRA(torch.zeros(6, 2), torch.ones(2, 5))).lora.rank
        2
    """

    lora: LoRA
    base: BaseChange | None = None
    fresh: bool = False


S = TypeVar("S")


class Method(Protocol[S]):
    """A federated LoRA method. Implementations are frozen dataclasses: their fields are their hyper-parameters.

    `State` is a frozen dataclass that `checkpoint` can store: its fields are tensors, `LoRA` values, numbers, strings,
    None, other such dataclasses, or tuples and string-keyed mappings of these.

    Example:
        >>> method = build("svd")
        >>> module = method.init(LoRA(torch.zeros(6, 4), torch.ones(4, 5)), key=0)
        >>> method.readout(module, "site-1", rank=2).lora
        LoRA(B=(6, 2) float32, A=(2, 5) float32)
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    State: ClassVar[type]

    def init(self, seed: LoRA, key: int) -> S:
        """The common start from `seed`, of rank r_max: B = 0, or a trained pair. `key` seeds the method's draws."""

    def roles(self, round: int) -> Roles:
        """Who owns what in round `round` (from 0), for every module. May change from round to round."""

    def aggregate(self, state: S, updates: Sequence[Update]) -> S:
        """The next state: all work that is the same for every client. `updates` is never empty."""

    def readout(self, state: S, client: str | None, rank: int) -> Readout:
        """What `client` (None: an unknown one) starts from at `rank`. It only selects from the state."""

    def effective(self, state: S) -> LoRA | None:
        """The server's whole update of W0, base change included; None if there is no global model."""

    def diagnostics(self, state: S) -> Mapping[str, object]:
        """Plain numbers and words about the last aggregation, for logs and reports.

        "dropped" and "rounding", if a method reports them, are shares of the mean's energy, as in
        `linalg.ConsensusMean`; the server warns if either exceeds 1e-3.
        """


class AllAtOnce(ABC, Generic[S]):
    """A method that aggregates several matrices faster together than one by one. The result is the same."""

    @abstractmethod
    def aggregate_all(
        self, states: Sequence[S], updates: Sequence[Sequence[Update]], each: Each = one_by_one
    ) -> list[S]:
        """`aggregate` for each matrix; `each` runs the work that remains one by one."""

    @abstractmethod
    def readout(self, state: S, client: str | None, rank: int) -> Readout:
        """As `Method.readout`."""

    def readouts(self, states: Sequence[S], client: str | None, ranks: Sequence[int]) -> list[Readout]:
        """`readout` of each matrix, for one client."""
        return [self.readout(state, client, rank) for state, rank in zip(states, ranks, strict=True)]


def aggregate_all(
    method: Method[S], states: Sequence[S], updates: Sequence[Sequence[Update]], each: Each = one_by_one
) -> list[S]:
    """`method.aggregate` for several matrices, together if the method can."""
    if isinstance(method, AllAtOnce):
        found: list[S] = method.aggregate_all(states, updates, each)
        return found
    return each(lambda pair: method.aggregate(*pair), list(zip(states, updates, strict=True)))


def readouts(method: Method[S], states: Sequence[S], client: str | None, ranks: Sequence[int]) -> list[Readout]:
    """`method.readout` of several matrices for one client, all at once where the method can."""
    if isinstance(method, AllAtOnce):
        return method.readouts(states, client, ranks)
    return [method.readout(state, client, rank) for state, rank in zip(states, ranks, strict=True)]
