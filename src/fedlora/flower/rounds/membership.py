"""Who takes part by a policy: the clients that a round asks, and everyone else's fate; and whether it can be played."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError, HyperparameterError, RankMismatch
from fedlora.flower.messages.codecs import Codec
from fedlora.flower.rounds.events import Fate
from fedlora.flower.terms.policy import Policy
from fedlora.runs.defence import check_rule
from fedlora.server.rules import Rule
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import ServerState


def least_usable(policy: Policy, quorum: int | None, rule: Rule | None, participation: float) -> int:
    """The usable uploads that the quorum and the rule ask for; 0: a round draws too few.

    Example: six clients, quorum 2, and Krum(f=1), which needs 2 f + 3: 5.
    """

    def enough(count: int) -> bool:
        return count >= (quorum or 1) and (rule is None or count >= rule.least(count))

    drawn = number_drawn(len(policy.clients), participation)
    return min(takewhile(enough, range(drawn, 0, -1)), default=0)


@dataclass(frozen=True)
class Drawn:
    """asked: in the policy's order. not_asked: all other clients of the policy -> (fate, why)."""

    asked: tuple[str, ...]
    not_asked: Mapping[str, tuple[Fate, str]]


def draw(
    policy: Policy, online: Collection[str], draws: int, *, seed: int, finished: int,
    tried: Mapping[str, int] = ReadOnly(),
) -> set[str]:  # fmt: skip
    """The clients of an attempt: a sample of `draws`, and stand-ins.

    Of the clients that are online it asks those that were tried the least; among equals first those of the sample, then
    others. If all are online and none was tried before, it asks the sample, as the engine does. Pure.

    Args:
        seed, finished: of the sample; finished: the number of finished rounds. tried: client -> in how many earlier
            attempts at the round it gave nothing usable.
    """
    names = [*policy.clients]
    sample = {*sample_clients(names, draws / len(names), seed=seed, round=finished)}
    groups: dict[tuple[int, bool], list[str]] = {}
    for name in names:
        if name in online:
            groups.setdefault((tried.get(name, 0), name not in sample), []).append(name)
    chosen = sample - {*online}  # they cannot be asked, and their fate says so
    room = draws
    for _, group in sorted(groups.items()):
        if 0 < room < len(group):
            group = sample_clients(group, room / len(group), seed=seed, round=finished)
        chosen |= {*group[:room]}
        room -= len(group[:room])
    return chosen


def asked_of(policy: Policy, online: Collection[str], chosen: Collection[str]) -> Drawn:
    """Those of the chosen clients that are asked, and the fate of everyone else."""
    fates: dict[str, tuple[Fate, str]] = {}
    for name in policy.clients:
        if name not in chosen:
            fates[name] = ("not drawn", "")
        elif name not in online:
            fates[name] = ("offline", "it is not online")
    return Drawn(tuple(name for name in policy.clients if name not in fates), fates)


def check_playable(policy: Policy, server: Server, state: ServerState, codec: Codec, participation: float) -> None:
    """Raises `FedLoRAError` for a policy under which no round could be played: its ranks, its number of sites or its
    limits do not fit the method, the quorum or the rule."""
    _check_ranks(policy, server, state)
    codec.require(server, state, policy)
    drawn = number_drawn(len(policy.clients), participation, server.round.quorum)
    if server.round.rule is not None:
        check_rule(server.round.rule, drawn)


def _check_ranks(policy: Policy, server: Server, state: ServerState) -> None:
    """Ask the method for one readout of each rank, and drop it.

    Raises:
        ConfigError: the method cannot serve a rank, or a rank names no module.
    """
    served: list[Any] = []
    for name, rank in policy.clients.items():
        if rank in served:
            continue
        try:
            server.download(state, policy.client(name))
        except (RankMismatch, HyperparameterError) as error:
            said = ", ".join(f"{client} {'by module' if isinstance(r, Mapping) else r}" for client, r in
                             islice(policy.clients.items(), 8))  # fmt: skip
            more = ", ..." if len(policy.clients) > 8 else ""
            raise ConfigError(
                f"{server.method.name} cannot serve the ranks of the policy ({said}{more}): {error}"
            ) from error
        served.append(rank)


def number_drawn(sites: int, participation: float, quorum: int | None = None) -> int:
    """How many sites take part in a round. Raises `ConfigError` for a quorum that they cannot meet."""
    a_round = len(sample_clients([str(k) for k in range(sites)], participation, seed=0, round=0))
    if quorum is not None and quorum > a_round:
        less = f", {a_round} of which take part in a round (run.participation = {participation:g})"
        there = "is one site" if sites == 1 else f"are {sites} sites"
        raise ConfigError(f"server.quorum = {quorum} can never be met: there {there}{less if a_round < sites else ''}.")
    return a_round
