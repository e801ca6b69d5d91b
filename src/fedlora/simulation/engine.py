"""`simulate`: rounds one after another, each from the previous one's state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from fedlora.core.messages import Client
from fedlora.core.sent import Tamperer
from fedlora.core.trainer import OneByOne, Trainer, Workers
from fedlora.doing import doing
from fedlora.errors import HyperparameterError, repeated
from fedlora.server.private import Private
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.simulation.records import Evaluator, RoundRecord
from fedlora.simulation.round import Round, UploadHook

log = logging.getLogger(__name__)


def simulate(
    server: Server,
    clients: Sequence[Client],
    trainer: Trainer | Workers,
    state: RunState,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    evaluate_every: int = 1,
    hooks: Sequence[UploadHook] = (),
    adversary: Tamperer | None = None,
    on_client: Callable[[str], None] = lambda client: None,
) -> Iterator[RoundRecord]:
    """Run from `state` until `rounds` rounds are done, yielding each round's record.

    Args:
        trainer: trains one client at a time; or `Workers`, which choose where, such as `workers.Pool`.
        participation: share of clients per round, at least one client; must be 1 for a private server, which samples
            secretly itself. seed: for client sampling.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        hooks: applied in order to each upload, for experiments such as `analysis.audit.GaugeStress`. adversary:
            byzantine clients that know all uploads of a round, before any hook, for experiments such as
            `attacks.Adversary`.
        on_client: called with each client that is done, for progress bars; never in a private round.

    Raises:
        HyperparameterError: two clients have one id, or a private round would be played otherwise than it is charged.
        ClientFailed: a client's work raised, and the server has no quorum. With one, the round continues without it.
        UploadRefused, QuorumNotMet: as in `Server.aggregate`. The records yielded so far are unaffected.

    Example:
        >>> for record in simulate(server, clients, trainer, start(server, seed_adapter), rounds=2):
        ...     print(record.round, record.losses)
        1 {'site-1': 0.5, 'site-2': 0.5}
        2 {'site-1': 0.5, 'site-2': 0.5}
    """
    by_id = {client.id: client for client in clients}
    if len(by_id) < len(clients):
        twice = repeated(client.id for client in clients)
        raise HyperparameterError(
            f"{len(twice)} client ids occur more than once, such as {twice[0]!r}. A client's memory and its part in "
            f"the mean follow its id: give each client its own."
        )
    if server.privacy is not None:
        _check_private(server.privacy, by_id, participation, adversary)
    workers = trainer if isinstance(trainer, Workers) else OneByOne(trainer)
    if adversary is not None:
        log.warning("clients of this federation are byzantine on purpose: do not use its results: %s", adversary)
    with doing("rounds", rounds, closed=server.privacy is not None) as step:
        while state.round < rounds:
            step.done = state.round
            round = Round(server, state, hooks, adversary)
            chosen = round.asked
            if chosen is None:
                chosen = sample_clients(list(by_id), participation, seed=seed, round=state.round)
            record = round.play([by_id[c] for c in chosen], workers, on_client)
            state = record.state
            if evaluator is not None and (state.round % evaluate_every == 0 or state.round == rounds):
                with round.timed("evaluate"):
                    metrics = evaluator.evaluate(server, state)
                record = replace(record, metrics=metrics, seconds={} if server.privacy else dict(round.seconds))
            yield record


def _check_private(privacy: Private, clients: Iterable[str], participation: float, adversary: Tamperer | None) -> None:
    """Raise `HyperparameterError` if the engine would play other rounds than the ledger charges."""
    if participation != 1.0:
        raise HyperparameterError(
            f"participation = {participation:g} draws clients by a public seed, but privacy relies on a secret draw: "
            f"leave participation out and set Private(sampling={participation:g})."
        )
    apart = sorted(set(clients) ^ set(privacy.clients))
    if apart:
        who = "is not among the clients given" if apart[0] in privacy.clients else "is not in Private(clients=...)"
        raise HyperparameterError(
            f"the clients given and the {len(privacy.clients)} of Private(clients=...) differ in {len(apart)}: "
            f"{apart[0]!r} {who}. The round draws from those, and the mean divides by their number: name the same "
            f"clients in both."
        )
    if adversary is not None:
        raise HyperparameterError("an adversary's acts are reported, but a private round reports on no single client.")
