"""Who takes part by a policy: the clients that a round asks, and everyone else's fate; and whether it can be played."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

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
class Drawn:
    """asked: in the policy's order. not_asked: all other clients of the policy -> (fate, why). liars: the clients in
    quarantine that the rule counts as liars: all, if a round draws all that are free; otherwise others are drawn in
    their place, and none."""

    asked: tuple[str, ...]
    not_asked: Mapping[str, tuple[Fate, str]]
    liars: tuple[str, ...] = ()


def draw(
    policy: Policy,
    refusals: Mapping[str, int],
    online: Collection[str],
    *,
    participation: float,
    seed: int,
    finished: int,
    chosen: Collection[str] | None = None,
    idle: Collection[str] = (),
) -> Drawn:
    """The clients of a round: a share of those that are not in quarantine; the ones among them that are online are
    asked.

    Quarantine does not change the number drawn while enough are free, only the clients to draw from. finished: the
    number of finished rounds, by which `sample_clients` draws. chosen: the clients to ask, if the round itself decides
    (`Intake.asked`). idle: who gave nothing usable in an earlier attempt at the round. For each drawn client that is
    not online, and then for each idle one, another one is drawn that is online, while there are such. Pure.
    """
    barred = quarantined(policy, refusals)
    free = [name for name in policy.clients if name not in barred]
    all_drawn = chosen is not None and {*free} <= {*chosen}  # a private round decides by itself
    if chosen is None:
        count, liars = _drawn_and_liars(policy, barred, participation)
        chosen = sample_clients(free, count / len(free), seed=seed, round=finished) if free else []
        all_drawn = liars == len(barred)
        lacking = sorted({*chosen} - ({*online} - {*idle}), key=lambda name: (name in online, name))
        spare = sorted({*free} & ({*online} - {*idle}) - {*chosen})
        if number := min(len(lacking), len(spare)):
            others = sample_clients(spare, number / len(spare), seed=seed, round=finished)
            replaced = {*lacking[:number]} & {*online}  # who is offline stays among the chosen, for its fate
            chosen = [*({*chosen} - replaced), *others]
    fates: dict[str, tuple[Fate, str]] = {}
    for name in policy.clients:
        if name in barred:
            fates[name] = ("quarantined", barred[name])
        elif name not in chosen:
            fates[name] = ("not drawn", "")
        elif name not in online:
            fates[name] = ("offline", "it is not online")
    return Drawn(tuple(name for name in policy.clients if name not in fates), fates, tuple(barred) if all_drawn else ())


def quarantine(policy: Policy, refusals: Mapping[str, int], name: str) -> str:
    """Why a client is no longer asked, and the way back; "" if it is asked. refusals: client -> the number of rounds in
    a row in which its uploads were refused."""
    count = refusals.get(name, 0)
    if not 0 < policy.quarantine <= count:
        return ""
    return (
        f"it is in quarantine after {counted(count, 'round')} in a row with refused uploads; to ask it again, set "
        f"quarantine = {count + 1} in policy.toml"
    )


def quarantined(policy: Policy, refusals: Mapping[str, int]) -> dict[str, str]:
    """The policy's clients that are no longer asked -> why, as in `quarantine`."""
    return {name: why for name in policy.clients if (why := quarantine(policy, refusals, name))}


def check_enough(policy: Policy, server: Server, refusals: Mapping[str, int], participation: float) -> None:
    """Raises `ConfigError` if quarantine leaves fewer clients than a round needs, so that nobody trains in vain."""
    barred = quarantined(policy, refusals)
    few = _too_few(*_drawn_and_liars(policy, barred, participation), server.quorum, server.rule)
    if barred and few:
        said = "; ".join(f"{name}: {why}" for name, why in barred.items())
        raise ConfigError(
            f"too few sites are left, because some are in quarantine: {few}. {said}. First let the site repair what "
            f"was refused; or remove the site, or ask for fewer in federation.toml. Nobody was asked to train."
        )


def needed(
    policy: Policy, barred: Collection[str], quorum: int | None, rule: Rule | None, participation: float
) -> int | None:
    """The usable uploads that a round needs: the quorum, and as many as the robust rule needs. None: more than can be
    drawn, because some clients are barred.

    It counts clients: if they suffice, their weights may still make the round fail.
    """
    drawn, liars = _drawn_and_liars(policy, barred, participation)
    return min(takewhile(lambda n: not _too_few(n, liars, quorum, rule), range(drawn, 0, -1)), default=None)


def _drawn_and_liars(policy: Policy, barred: Collection[str], participation: float) -> tuple[int, int]:
    """How many clients a round draws; and how many the rule counts as liars although nobody asks them (`Drawn`)."""
    free = len(policy.clients) - len(barred)
    drawn = min(free, number_drawn(len(policy.clients), participation))
    return drawn, len(barred) if drawn == free else 0


def _too_few(count: int, liars: int, quorum: int | None, rule: Rule | None) -> str | None:
    """Why this many usable uploads are too few; None if they are enough. liars: as in `_drawn_and_liars`."""
    if count < (quorum or 1):
        return f"{count} are left for a round, and server.quorum = {quorum}" if count else "nobody is left"
    alike = [1 / count] * count
    return rule.without(liars, alike).overcome(alike) if rule is not None else None


def check_playable(policy: Policy, server: Server, state: ServerState, codec: Codec, participation: float) -> None:
    """Raises `FedLoRAError` for a policy under which no round could be played: its ranks, its number of sites or its
    limits do not fit the method, the quorum or the rule."""
    ranks = _served_ranks(policy, server, state)
    codec.require(server, state, policy)
    with_largest_share(server, policy)
    drawn = number_drawn(len(policy.clients), participation, server.quorum)
    if server.rule is not None:
        shares = policy.largest_shares(server.weighs_by, drawn)
        if near := check_rule(server.rule, server.method, ranks, shares):
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


def with_largest_share(server: Server, policy: Policy) -> Server:
    """The server with the policy's largest share. A private one has none, because clipping bounds its clients.

    Raises:
        ConfigError: the server cannot enforce it.
    """
    if server.privacy is not None or (server.memory is not None and server.weighs_by == "uniform"):
        return server
    if server.memory is not None and policy.share < 1:
        raise ConfigError(
            f"server.memory = {server.memory:g} adds uploads up as they come, and the policy's max_weight_share = "
            f"{policy.share:g} weighs them beside each other when all are in. Write max_weight_share = 1 into the "
            f'policy (max_examples bounds what one client can claim), set server.weighting = "uniform", or leave '
            f"server.memory out."
        )
    return replace(server, max_weight_share=policy.share)
