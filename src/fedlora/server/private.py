"""Private rounds: their uploads are used only in one noised sum of clipped changes.

    v_i = w_i (what client i changed)                     ||v_i|| <= C
    S   = sum_i round(v_i / gamma) + discrete Gaussian    integers; stored, charged, then used
    M  <- M + gamma S / (q n), products cut to R          M: what a client of any rank would start from

The round draws the clients to ask, and takes one upload from each. A client that is refused, offline, fails or abstains
counts as zero: there is no quorum, no second draw and no retry, and the `Tally` is empty. What a kill at each step
costs: `privacy.journal`. The server sees every update, and tells refusals to its operator's log alone; whoever gets its
releases (states, readouts, the model) learns little about any one client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fedlora.core.lora import Adapter
from fedlora.core.method import Method, Roles
from fedlora.errors import HyperparameterError
from fedlora.privacy.mechanism import Mechanism
from fedlora.server.private_round import PrivateRound
from fedlora.server.rounds import RoundKind, Weighting, require_sums
from fedlora.server.state import ServerState

if TYPE_CHECKING:
    from fedlora.server.server import Server


class Releases(Protocol):
    """Keeps a run's noised sums, each made once; they outlive this process.

    context: a digest of the round's starting point. A sum with another one is refused: a round has one release.
    """

    def stored(self, round: int, context: str) -> Tensor | None:
        """The noised sum of `round` (from 1), int64 (d,), charged by the time it returns; None if none was made."""

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism, sampling: float) -> Tensor:
        """Store and charge the sum before anything of it is released; returns the sum to release. sampling: q, each
        client's chance to take part.

        Raises:
            BudgetSpent, LedgerError: nothing was released, and nothing may be released.
        """


@dataclass(frozen=True)
class Private(RoundKind):
    """Bounds one client's effect on what is released, by public constants.

    Adjacency: one client's contribution to the run is present, or is zero. Everything that scales or shapes a
    contribution is a public constant: anything that depends on who took part, or on what others sent, would break the
    bound. So there is no quorum and no rule.

    Args:
        clipping_norm: C, the largest norm of one client's change, over all modules and heads together.
        noise_multiplier: z, the noise's standard deviation in units of one client's largest effect; 0 is for tests and
            audits.
        clients: the ids of all clients, taking part or not: n public names. Uploads from anybody else are refused.
        rank: R of the term that the method gets: noised products are cut to it.
        releases: stores and charges noised sums.
        dims: how many directions of each side of a module changes of products are summed in (`privacy.geometry`); None:
            all.
        sampling: q, each client's chance to be asked in a round, which makes the draw itself (`OpenRound.asked`); 1:
            all of them, always. The mean change is the noised sum / (q n), whoever came.
        most_examples: n_max; a client counts min(n_i, n_max) / n_max; None: 1.
        warm_start: the start is a trained adapter, and either it never saw these clients' data, or the ledger was
            charged for it. seed: of the public random directions.

    Raises:
        HyperparameterError: an impossible value.

    Example:
        >>> class InMemory:
        ...     def stored(self, round, context):
        ...         return None
        ...     def settle(self, round, context, noised, mechanism, sampling):
        ...         return noised  # a real one stores it, and charges a ledger
        >>> private = Private(1.0, 0.0, ("site-1", "site-2"), rank=4, releases=InMemory())
        >>> server = Server(build("glora"), round=private)
        >>> server.aggregate(server.init(seed_adapter), uploads).tally.weights
        {}
    """

    clipping_norm: float
    noise_multiplier: float
    clients: tuple[str, ...]
    rank: int
    releases: Releases
    dims: int | None = None
    sampling: float = 1.0
    most_examples: float | None = None
    warm_start: bool = False
    seed: int = 0

    quorum = 0  # no number of uploads is too few, and a bad one does not end the round

    def __post_init__(self) -> None:
        if isinstance(self.clients, str) or not 0 < len(set(self.clients)) == len(self.clients):
            raise HyperparameterError(
                f"Private: clients are the ids of all clients, each once, as ('north', 'south'); got "
                f"{self.clients!r:.80}. Uploads of others do not count, and the mean divides by the number of ids."
            )
        object.__setattr__(self, "clients", tuple(sorted(self.clients)))
        for name, value in (("rank", self.rank), ("dims", 1 if self.dims is None else self.dims)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise HyperparameterError(f"Private: {name} is a whole number >= 1; got {value!r}.")
        Mechanism.of(self.clipping_norm, self.noise_multiplier, 1)  # refuses an impossible clip or noise
        if not 0 < self.sampling <= 1:
            raise HyperparameterError(f"Private: sampling is a chance in (0, 1]; got {self.sampling!r}.")
        if self.most_examples is not None and not 0 < self.most_examples < math.inf:
            raise HyperparameterError(f"Private: most_examples is a positive number or None; got {self.most_examples}.")

    @property
    def weighs_by(self) -> Weighting:
        return "uniform" if self.most_examples is None else "examples"

    @property
    def denominator(self) -> float:
        """q n, the public divisor of the sum, whoever came."""
        return self.sampling * len(self.clients)

    def require(self, method: Method[Any], roles: Roles) -> None:
        require_sums("Private", method)
        if method.linear_in == "factors" and self.dims is not None:
            raise HyperparameterError(
                f"{method.name} sums the changes of factors, which have no directions to choose: leave dims out."
            )

    def require_start(self, start: Adapter) -> None:
        """Raises `HyperparameterError` if the start would release what was learned from somebody."""
        trained = [name for name, lora in start.modules.items() if bool(lora.factors[0].any())]
        if trained and not self.warm_start:
            raise HyperparameterError(
                f"Server: the start is a trained adapter ({trained[0]!r} and {len(trained) - 1} more have B != 0), and "
                f"the first download releases what it learned. If it never saw these clients' data, or the ledger was "
                f"charged for it, set Private(warm_start=True); otherwise start from B = 0."
            )

    def mechanism(self, size: int) -> Mechanism:
        """The mechanism for vectors of `size` entries. Raises `HyperparameterError` if integers cannot hold sums."""
        mechanism = Mechanism.of(self.clipping_norm, self.noise_multiplier, size)
        mechanism.check_room(size, len(self.clients))
        return mechanism

    def open(self, server: Server, state: ServerState) -> PrivateRound:
        return PrivateRound(server, state, self)
