"""A private server's options: public constants, and the keeper of releases. And the options that it excludes.

Under privacy everything that scales or shapes a client's contribution is a public constant: anything that depends on
who took part, or on what others sent, breaks the bound on one client's effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedlora.core.accumulating import Accumulating
from fedlora.core.messages import Missing
from fedlora.core.method import Method
from fedlora.errors import HyperparameterError
from fedlora.privacy.geometry import Geometry
from fedlora.privacy.mechanism import Mechanism, share_of
from fedlora.server.method_faults import blamed_on
from fedlora.server.terms import Weighting

# Server options that privacy excludes -> why.
_BREAKS_THE_BOUND = {
    "quorum": "a private round has no quorum, because a round that counts would reveal who came. A client that "
    "is refused, offline or fails counts as zero",
    "memory": "a private round keeps only one sum, so there are no uploads to add up",
    "rule": "a rule's weights depend on what others sent, so one client's part is not bounded by the clip",
}


class Releases(Protocol):
    """Keeps a run's noised sums, each made once, and the secret draws. All of it outlives this process.

    context: a digest of the round's starting point. A sum with another one is refused: a round has one release.
    """

    def stored(self, round: int, context: str) -> Tensor | None:
        """The noised sum of `round` (from 1), int64 (d,), if it was already made and charged; otherwise None."""

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism, sampling: float) -> Tensor:
        """Store and charge the sum before anything of it is released; returns the sum to release. sampling: q, each
        client's chance to take part.

        Raises:
            BudgetSpent, LedgerError: nothing was released, and nothing may be released.
        """

    def first_drawn(self, round: int, context: str, drawn: Sequence[str]) -> Sequence[str]:
        """Store secretly who was drawn for `round`, and return what the first call for it stored, so that a killed
        round restarts with the same clients. Called before any client is asked, and only if q < 1."""


@dataclass(frozen=True)
class Privacy:
    """Bounds one client's effect on what is released, by public constants.

    Adjacency: one client's contribution to the run is present, or is zero. The server sees every update; whoever gets
    its releases (states, readouts, the model) learns little about any one client.

    Args:
        clip: C, the largest norm of one client's change, over all modules and heads together. noise_multiplier: z, the
            noise's standard deviation in units of one client's largest effect; 0 is for tests and audits.
        geometry: the coordinates in which changes are summed.
        clients: the ids of all clients, taking part or not: n public names. Uploads from anybody else are refused.
        sampling: q, each client's chance to be asked in a round, which makes the draw itself (`PrivateRound.asked`); 1:
            all of them, always. The mean change is the noised sum / (q n), whoever came.
        rank: R of the next state. most_examples: n_max; a client counts min(n_i, n_max) / n_max; None: 1.
        releases: stores and charges noised sums.
        warm_start: the start is a trained adapter, and either it never saw these clients' data, or the ledger was
            charged for it.
        seed: of the public random directions.
        diary: for the server's operator alone: called with (round from 1, client or "" for all of them, what happened)
            for each client that failed or was refused, and once per round. Nothing else reports them. None: no diary.

    Raises:
        HyperparameterError: an impossible value.
    """

    clip: float
    noise_multiplier: float
    geometry: Geometry
    clients: tuple[str, ...]
    rank: int
    releases: Releases
    sampling: float = 1.0
    most_examples: float | None = None
    warm_start: bool = False
    seed: int = 0
    diary: Callable[[int, str, str], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", _population(self.clients))
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise HyperparameterError(f"Privacy: rank is a whole number >= 1; got {self.rank!r}.")
        if not 0 < self.clip < math.inf:
            raise HyperparameterError(f"Privacy: clip is a positive norm; got {self.clip!r}.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise HyperparameterError(f"Privacy: noise_multiplier is a number >= 0; got {self.noise_multiplier!r}.")
        if not 0 < self.sampling <= 1:
            raise HyperparameterError(f"Privacy: sampling is a chance in (0, 1]; got {self.sampling!r}.")
        if self.most_examples is not None and not 0 < self.most_examples < math.inf:
            raise HyperparameterError(f"Privacy: most_examples is a positive number or None; got {self.most_examples}.")

    @property
    def denominator(self) -> float:
        """q n, the public divisor of the sum, whoever came."""
        return self.sampling * len(self.clients)

    def note(self, round: int, client: str, what: str) -> None:
        """Tell the diary, if there is one."""
        if self.diary is not None:
            self.diary(round, client, what)

    def note_end(self, round: int, asked: int, counted: int) -> None:
        """Tell the diary, once per round, how many clients were asked and how many uploads count."""
        if not asked:
            what = "no client was asked: none was drawn, or the round's noised sum existed before the run was killed"
        elif not counted:
            what = (
                f"ALL {asked} clients that were asked failed, were refused or sent nothing: the round releases only "
                f"noise, and is charged like any other. Remove the cause before you spend more rounds"
            )
        else:
            what = f"{counted} of the {asked} clients that were asked count"
        self.note(round, "", what)

    def mechanism(self, size: int) -> Mechanism:
        """The mechanism for vectors of `size` entries. Raises `HyperparameterError` if integers cannot hold sums."""
        mechanism = Mechanism.of(self.clip, self.noise_multiplier, size)
        mechanism.check_room(size, len(self.clients))
        return mechanism

    def weight(self, num_examples: float) -> float:
        """w_i in [0, 1], which depends only on this client's own number and on constants."""
        return 1.0 if self.most_examples is None else share_of(num_examples, self.most_examples)


def _population(clients: Any) -> tuple[str, ...]:
    """The sorted ids. Raises `HyperparameterError`."""
    named = list(clients) if isinstance(clients, Sequence) and not isinstance(clients, str) else []
    if not named or not all(isinstance(name, str) and name for name in named):
        raise HyperparameterError(
            f"Privacy: clients are the ids of all clients, as ('north', 'south'); got {clients!r:.80}. Uploads of "
            f"others do not count, and the mean divides by the number of ids."
        )
    if len(set(named)) < len(named):
        raise HyperparameterError(f"Privacy: {len(named) - len(set(named))} clients are named twice.")
    return tuple(sorted(named))


def require_private(
    privacy: Privacy, method: Method[Any], missing: Missing, weighting: Weighting, beside: Collection[str]
) -> Accumulating[Any]:
    """The method, if it can continue from a released change.

    Args:
        missing, weighting: the server's. beside: the names of its other options that are set.

    Raises:
        HyperparameterError: it cannot, or a server option breaks the privacy guarantee: which, and why.
    """
    if not isinstance(method, Accumulating):
        raise HyperparameterError(
            f"Server: privacy needs a method that makes its next state from the last one and one noised sum of changes "
            f"(`fedlora.core.accumulating.Accumulating`), and {method.name} has no such rule: its server keeps parts "
            f"of single clients' uploads, or part of an update stays with its client. glora, svd, flexlora and "
            f"ffa-lora can."
        )
    with blamed_on(method, "require_accumulating"):
        method.require_accumulating()
    if missing != "zero":
        raise HyperparameterError(
            f"Server: privacy counts a client that lacks a module as a zero change, and missing = {missing!r} "
            f"divides by those who hold it: one client would change everybody's weight. Set missing = 'zero'."
        )
    if weighting == "examples" and privacy.most_examples is None:
        raise HyperparameterError(
            "Server: weighting = 'examples' needs privacy.most_examples: without a public largest number, one client's "
            "count of examples has no bound. Give it, or set weighting = 'uniform'."
        )
    if weighting == "uniform" and privacy.most_examples is not None:
        raise HyperparameterError(
            f"Server: privacy.most_examples = {privacy.most_examples:g} weighs clients by their examples, and "
            f"weighting = 'uniform' does not. Leave one of them out."
        )
    for option, why in _BREAKS_THE_BOUND.items():
        if option in beside:
            raise HyperparameterError(f"Server: {option} and privacy exclude each other: {why}. Leave {option} out.")
    return method
