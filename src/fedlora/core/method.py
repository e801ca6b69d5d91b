"""The protocol: what a federated LoRA method is. Read this file first.

A method is a small state machine on ONE adapted matrix. Its state S is an immutable value, its functions are pure:

    S = init(seed)        S = aggregate(S, updates)        readout(S, client, rank) -> what a client trains next

Methods differ in what they average, in which coordinates, and how they read it out. Three examples:

* FedIT averages the factors B and A as they come, and sends everyone the average. State: one pair.
* FedSA-LoRA averages only A. B is `local`: it never leaves the client, so there is no global model.
* GLoRA averages the products B A in the subspace that the clients' updates span, and sends each client the
  components that suit it, as many as its rank. State: the mean's SVD, and each client's last subspace.

Everything else belongs to the server: checks, weights, heads, rounds, dtypes, copies, and slots that are still empty.
`fedlora.testing` has what every method keeps, as contracts that run on your own (`fedlora methods check`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from fedlora.core.base_change import BaseChange
from fedlora.core.lora import LoRA

Role = Literal["shared", "local", "frozen"]
LinearIn = Literal["products", "factors", "clients"]
S = TypeVar("S")


@dataclass(frozen=True)
class Roles:
    """Who owns each part of the adapter this round.

    shared: trained, uploaded, replaced by the next readout. local: trained, never leaves the client. frozen: received,
    never trained, never uploaded; a server may replace it, and then sends it again. `heads` are fully trained tensors
    such as a classifier. moves_base: rounds may change the base weight W0; the server sets it (`Method.moves_base`).

    Example:
        >>> build("ffa-lora").roles(round=0).shared
        ('B',)
    """

    B: Role = "shared"
    A: Role = "shared"
    heads: Role = "shared"
    moves_base: bool = False

    def parts(self, *roles: Role) -> tuple[str, ...]:
        """Those of "B", "A" and "heads" that have one of these roles."""
        return tuple(part for part in ("B", "A", "heads") if getattr(self, part) in roles)

    @property
    def shared(self) -> tuple[str, ...]:
        """The factors that travel to the server: "B", "A" or both."""
        return tuple(factor for factor in ("B", "A") if getattr(self, factor) == "shared")

    @property
    def both_shared(self) -> bool:
        """Whether both factors travel, so that an upload holds the whole update."""
        return self.B == self.A == "shared"


@dataclass(frozen=True, eq=False)
class Update:
    """One term of a round's sum for one matrix: sum of weight * B A, or of weight * factor.

    Take the weights as they are. They sum to 1, but not under a robust rule of products, whose rest is one more term of
    weight 1, with the weights of its readouts in B (`server.kept`).

    client: whose it is; None for a term that the server adds itself: what a robust rule put in the place of a change, a
    streamed mean, a private mean. Such a term has no vote and no history, and its weight may be negative.
    rank: the client's r_i, which sets GLoRA's R; of a term of nobody, a bound on the rank that it stands for.
    lora: the factors that travelled, in the round's dtype. roundoff: u of the dtype in which they arrived.

    Example:
        >>> update = Update("site-1", 0.5, 2, LoRA(torch.ones(6, 2), torch.ones(2, 5)), roundoff=2.0**-24)
        >>> update.lora
        LoRA(B=(6, 2) float32, A=(2, 5) float32)
    """

    client: str | None
    weight: float
    rank: int
    lora: LoRA
    roundoff: float


class Method(ABC, Generic[S]):
    """A federated LoRA method for one matrix: a frozen dataclass whose fields are its hyper-parameters.

    name, paper: as in tables and the registry. State: the class of S, a `LoRA` or a frozen dataclass that `checkpoint`
    can store: of tensors, LoRAs, numbers, strings, None, other such dataclasses, tuples, and string-keyed mappings,
    whose order counts. one_rank: every client has the start's rank; the server refuses others.

    Example:
        >>> method = build("svd")
        >>> state = method.init(LoRA(torch.zeros(6, 4), torch.ones(4, 5)))
        >>> method.readout(state, "site-1", rank=2).rank <= 2
        True
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    State: ClassVar[type] = LoRA
    one_rank: ClassVar[bool] = False

    @property
    def claims(self) -> frozenset[str]:
        """Which of the contracts "exact", "gauge", "readouts" and "halves" hold, with these hyper-parameters."""
        return frozenset()

    @property
    def linear_in(self) -> LinearIn:
        """What `effective` depends on, and so what a rule may weigh and a server may add up before `aggregate`.

        "products": only sum_i w_i B_i A_i. "factors": only sum_i w_i B_i and sum_i w_i A_i. "clients": on more than
        sums; no rule, no streaming, no privacy. Rules refuse "factors" too if both travel, and streams "products" of
        `one_rank`. It may depend on the hyper-parameters, as in GLoRA.
        """
        return "clients"

    @property
    def moves_base(self) -> bool:
        """Whether rounds may change the base weight W0, on which clients train: it has a `base` of its own."""
        return type(self).base is not Method.base

    def roles(self, round: int) -> Roles:
        """Who owns what in round `round` (from 0), for every module. May change from round to round."""
        return Roles()

    def __init_subclass__(cls, **options: Any) -> None:
        """The server calls `aggregate_all` alone. A subclass of GLoRA with an `aggregate` of its own would inherit
        GLoRA's `aggregate_all`, which never calls it: such a class gets the one below, which does."""
        super().__init_subclass__(**options)
        if "aggregate" in vars(cls) and "aggregate_all" not in vars(cls):
            cls.aggregate_all = Method.aggregate_all  # type: ignore[method-assign] # a function where mypy sees a method

    @abstractmethod
    def init(self, seed: LoRA) -> S:
        """The common start: B = 0, or a trained pair. No slot of `seed` is dead (B[:, k] = 0 and A[k] = 0)."""

    @abstractmethod
    def aggregate(self, state: S, updates: Sequence[Update]) -> S:
        """The next state. `updates` is never empty, in the order of client ids, terms of nobody last."""

    def aggregate_all(self, states: Sequence[S], updates: Sequence[Sequence[Update]]) -> list[S]:
        """`aggregate` of several matrices: override it only where all at once is faster. The result is the same."""
        return [self.aggregate(state, sent) for state, sent in zip(states, updates, strict=True)]

    @abstractmethod
    def readout(self, state: S, client: str | None, rank: int) -> LoRA:
        """What `client` starts from, of at most `rank` slots; None: a stranger. It only selects from the state.

        If both factors are shared, the server fills the remaining slots with B = 0 and fresh rows of A, for each client
        its own. Otherwise all `rank` slots must be here: a frozen factor is common, and only the method knows it. The
        server leaves local factors out.
        """

    @abstractmethod
    def effective(self, state: S) -> LoRA | None:
        """The server's whole update of W0, base included; None if there is no global model."""

    def base(self, state: S) -> BaseChange | None:
        """How far W0 itself has moved since pre-training; clients train on top of it. None: not at all."""
        return None

    def diagnostics(self, state: S) -> Mapping[str, object]:
        """Plain numbers and words about the last aggregation, for logs and reports.

        "dropped" and "rounding", if a method reports them, are shares of the mean's energy: what a 16-bit upload lost,
        and what rounding of the stored factors could make up. The server warns of large ones.
        """
        return {}
