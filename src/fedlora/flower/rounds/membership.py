"""Who takes part by a policy: the clients that a round asks, and everyone else's fate; and whether it can be played."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError, HyperparameterError, RankMismatch, counted
from fedlora.flower.messages.codecs import Codec
from fedlora.flower.rounds.events import Fate
from fedlora.flower.terms.policy import Policy
from fedlora.runs.defence import check_rule
from fedlora.server.robust_rules import Rule
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.server.terms import ranks_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundSize:
    """How many clients a round takes, while some are in quarantine.

    draws: the number of clients to draw: as many as without quarantine, while enough are free. liars: as many clients
    in quarantine as the round is short of: a robust rule counts them as liars, as it counts refused uploads.
    least: the usable uploads that the quorum and the rule ask for, if no upload is refused and all weigh alike (a
    refused one is a liar that was found, and the rule then needs fewer others); 0: `draws` are too few.
    lack: why they are; "" if they are enough.

    Example: six clients, Krum(liars=1), which needs 2 f + 3 = 5, and one client in quarantine. If a round draws all,
    five are left, and the one in quarantine is the liar: f = 0, `least` is 3. If a round draws five of six, five are
    drawn all the same, and one of them may lie: `least` is 5.
    """

    draws: int
    liars: tuple[str, ...]
    least: int
    lack: str


def round_size(
    policy: Policy, barred: Collection[str], quorum: int | None, rule: Rule | None, participation: float
) -> RoundSize:
    """The size of a round. barred: the policy's clients in quarantine."""
    wanted = number_drawn(len(policy.clients), participation)
    draws = min(wanted, len(policy.clients) - len(barred))
    liars = tuple(barred)[: wanted - draws]

    def lack(count: int) -> str:
        """Why this many usable uploads are too few; "" if they are enough."""
        if count < (quorum or 1):
            return f"{count} are left for a round, and server.quorum = {quorum}" if count else "nobody is left"
        alike = [1 / count] * count
        return (rule.without(len(liars), alike).overcome(alike) or "") if rule is not None else ""

    enough = takewhile(lambda count: not lack(count), range(draws, 0, -1))
    return RoundSize(draws, liars, min(enough, default=0), lack(draws))


def check_enough(size: RoundSize, barred: Mapping[str, str]) -> None:
    """Raises `ConfigError` if quarantine leaves fewer clients than a round needs, so that nobody trains in vain."""
    if barred and size.lack:
        said = "; ".join(f"{name}: {why}" for name, why in barred.items())
        raise ConfigError(
            f"too few sites are left, because some are in quarantine: {size.lack}. {said}. First let the site repair "
            f"what was refused; or remove the site, or ask for fewer in federation.toml. This attempt asks nobody."
        )


@dataclass(frozen=True)
class Drawn:
    """asked: in the policy's order. not_asked: all other clients of the policy -> (fate, why)."""

    asked: tuple[str, ...]
    not_asked: Mapping[str, tuple[Fate, str]]


def draw(
    policy: Policy, barred: Mapping[str, str], online: Collection[str], draws: int, *, seed: int, finished: int,
    tried: Mapping[str, int] = ReadOnly(),
) -> set[str]:  # fmt: skip
    """The clients of an attempt: a sample of `draws` of those that are not in quarantine, and stand-ins.

    Of the clients that are online it asks those that were tried the least; among equals first those of the sample, then
    others. If all are online and none was tried before, it asks the sample, as the engine does. Pure.

    Args:
        barred: client -> why it is in quarantine. seed, finished: of the sample; finished: the number of finished
            rounds. tried: client -> in how many earlier attempts at the round it gave nothing usable.
    """
    free = [name for name in policy.clients if name not in barred]
    sample = {*sample_clients(free, draws / len(free), seed=seed, round=finished)} if free else set()
    groups: dict[tuple[int, bool], list[str]] = {}
    for name in free:
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


def asked_of(policy: Policy, barred: Mapping[str, str], online: Collection[str], chosen: Collection[str]) -> Drawn:
    """Those of the chosen clients that are asked, and the fate of everyone else."""
    fates: dict[str, tuple[Fate, str]] = {}
    for name in policy.clients:
        if name in barred:
            fates[name] = ("quarantined", barred[name])
        elif name not in chosen:
            fates[name] = ("not drawn", "")
        elif name not in online:
            fates[name] = ("offline", "it is not online")
    return Drawn(tuple(name for name in policy.clients if name not in fates), fates)


def quarantine(policy: Policy, refusals: Mapping[str, int], name: str) -> str:
    """Why a client is no longer asked, and the way back; "" if it is asked. refusals: as in `FlowerState`."""
    count = refusals.get(name, 0)
    if not 0 < policy.quarantine <= count:
        return ""
    return (
        f"it is in quarantine after {counted(count, 'round')} with refused uploads and none with an accepted one; to "
        f"ask it again, set quarantine = {count + 1} in policy.toml"
    )


def quarantined(policy: Policy, refusals: Mapping[str, int]) -> dict[str, str]:
    """The policy's clients that are no longer asked -> why, as in `quarantine`."""
    return {name: why for name in policy.clients if (why := quarantine(policy, refusals, name))}


def check_playable(policy: Policy, server: Server, state: ServerState, codec: Codec, participation: float) -> None:
    """Raises `FedLoRAError` for a policy under which no round could be played: its ranks, its number of sites or its
    limits do not fit the method, the quorum or the rule."""
    ranks = _served_ranks(policy, server, state)
    codec.require(server, state, policy)
    drawn = number_drawn(len(policy.clients), participation, server.quorum)
    if server.rule is not None:
        most = 1 / drawn if server.weighs_by == "uniform" else 1.0  # by examples a client has what it claims
        if near := check_rule(server.rule, server.method, ranks, [most] * drawn):
            log.warning("%s", near)


def _served_ranks(policy: Policy, server: Server, state: ServerState) -> list[dict[str, int]]:
    """Module -> r, for each client. Asks the method for one readout of each rank, and drops it.

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
    return [ranks_of(policy.client(name), state) for name in policy.clients]


def number_drawn(sites: int, participation: float, quorum: int | None = None) -> int:
    """How many sites take part in a round. Raises `ConfigError` for a quorum that they cannot meet."""
    a_round = len(sample_clients([str(k) for k in range(sites)], participation, seed=0, round=0))
    if quorum is not None and quorum > a_round:
        less = f", {a_round} of which take part in a round (run.participation = {participation:g})"
        there = "is one site" if sites == 1 else f"are {sites} sites"
        raise ConfigError(f"server.quorum = {quorum} can never be met: there {there}{less if a_round < sites else ''}.")
    return a_round
