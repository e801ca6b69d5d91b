"""What every method keeps, and what it may claim, as equations that run on your own: `check(MyMethod())`.

Always (s a state, us the updates of a round, c a client, r its rank):

    rank      each client gets r slots, from init on, in one dtype; a global model is there in every state or in none
    alive     no slot k of a download has both B[:, k] = 0 and A[k] = 0: its gradient would be zero for ever
    order     uploads in another order change no bit; aggregate(s, us) depends on the order of us up to rounding only
    purity    inputs keep their bits, the same inputs give the same bits, a client owns what it gets, a state that was
              stored continues with the same bits, and the update of a trained start is there before the first round
    sums      what `linear_in` says: one term of nobody with the whole sum in place of all updates gives the same

If `claims` has them:

    exact     effective(aggregate(s, us)) - base(s) = sum_i p_i B_i A_i
    gauge     (B_i Q_i, Q_i^-1 A_i) in place of (B_i, A_i) changes the update by rounding only
    readouts  nor does it change what clients start from
    halves    one client as two of half its weight changes the update by rounding only

The federations have three rounds, missing clients, mixed ranks unless `one_rank`, and float64 factors; in `rank`
float32 ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fedlora.analysis.audit import regauge
from fedlora.core.lora import Adapter, LoRA, stack
from fedlora.core.messages import Client, Download
from fedlora.core.method import Method, Update
from fedlora.core.read_only import ReadOnly
from fedlora.errors import HyperparameterError
from fedlora.methods.fedit import mean_factors
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.testing.comparing import differing, drift, leaves, moved, readout_drift, relative
from fedlora.testing.federations import EQUAL, MIXED, Ranks, Who, pushed, rounds, seed_adapter, stored, trained

# Relative, of float64 federations: a method that keeps a contract is off by rounding, any other by per cents. Some then
# solve for a minimum, which multiplies the rounding.
EXACT, SAME, SAME_READOUTS, SAME_ORDER = 1e-11, 1e-10, 1e-9, 1e-6


@dataclass(frozen=True)
class Measured:
    """What a contract found. holds: None if there is nothing to measure. says: in words, with numbers.

    Example:
        >>> CONTRACTS["rank"](build("svd"), *MIXED).holds
        True
    """

    holds: bool | None
    says: str


@dataclass(frozen=True)
class Finding:
    """One contract of one method. claimed: "always", "yes" or "no". holds: None if it was not claimed, or there was
    nothing to measure. why: what is wrong, and what to do.

    Example:
        >>> [found.contract for found in check(build("fedit")) if found.claimed == "yes"]
        ['halves']
    """

    contract: str
    claimed: str
    measured: str
    holds: bool | None
    why: str | None = None


def check(method: Method[Any]) -> tuple[Finding, ...]:
    """Run every contract on small federations of four clients. Takes a second or two.

    Raises:
        HyperparameterError: it claims a contract that does not exist.

    Example:
        >>> sound(check(build("svd")))
        True
    """
    if unknown := sorted(set(method.claims) - CONTRACTS.keys()):
        raise HyperparameterError(f"{method.name} claims {unknown[0]!r}, but the contracts are {', '.join(CONTRACTS)}.")
    return tuple(_found(method, name) for name in CONTRACTS)


def sound(findings: Sequence[Finding]) -> bool:
    """Whether everything that was claimed, and everything that is required, holds.

    Example:
        >>> sound([Finding("rank", "always", "3 slots", holds=False)])
        False
    """
    return all(finding.holds is not False for finding in findings)


def _found(method: Method[Any], name: str) -> Finding:
    """The worst finding in the federations that the method serves."""
    claimed = "always" if name in ALWAYS else "yes" if name in method.claims else "no"
    found = []
    for play in (EQUAL,) if method.one_rank else (EQUAL, MIXED):
        try:
            found.append(CONTRACTS[name](method, *play))
        except Exception as error:  # a stranger's method can raise anything, and the clients here are sound
            return Finding(name, claimed, f"{type(error).__name__}: {error}", False, f"{name}: {error}")
    worst = min(found, key=lambda m: (m.holds is not False, m.holds is not None))
    if claimed == "no":
        return Finding(name, claimed, worst.says, None)
    why = f"{method.name} breaks the contract {name!r}: {worst.says}. {_ADVICE[name]}" if worst.holds is False else None
    return Finding(name, claimed, worst.says, worst.holds, why)


def rank(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    """The server itself refuses wrong shapes, dtypes and numbers (`MethodFault`)."""
    server, count, models = Server(method), 0, set()
    every = (_handed_out(server, ranks, who, dtype) for dtype in (torch.float64, torch.float32))
    for state, client, name, lora in chain.from_iterable(every):
        count += 1
        if lora.rank != client.rank:
            return Measured(False, f"{name!r} for {client} has {lora.rank} slots after {state.round} rounds")
        models.add(server.has_global_model(state))
        method.readout(state.modules[name], None, max(ranks.values()))
    if len(models) > 1:
        return Measured(False, "`effective` is None in some states and an update in others")
    return Measured(True, f"{count} downloads of the client's rank")


def alive(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    count = 0
    for state, client, name, lora in _handed_out(Server(method), ranks, who):
        if lora.B is None or lora.A is None:
            continue
        count += lora.rank
        if dead := int(((lora.B == 0).all(0) & (lora.A == 0).all(1)).sum()):
            return Measured(False, f"{dead} dead slots in {name!r} for {client} after {state.round} rounds")
    return Measured(True, f"{count} slots, none dead")


def order(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    server, moves = Server(method), []
    for played in rounds(server, ranks, who):
        if differing(server.aggregate(played.before, played.uploads[::-1]).modules, played.after.modules):
            return Measured(False, "uploads in another order changed a bit")
        for name, (state, updates) in played.modules():
            turned = updates[1:] + updates[:1]
            moves.append(moved(method, method.aggregate(state, turned), played.after.modules[name], ranks))
    return _below(SAME_ORDER, moves, "no bit differs; the list of updates in another order moves it by")


def purity(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    server, seed = Server(method), seed_adapter(max(ranks.values()))
    state = server.init(seed)
    if leaves(state.start) != leaves(seed):
        return Measured(False, "`init` changed what it was given")
    if server.has_global_model(state):
        start = pushed(seed, "a start", 0)
        update = server.global_update(server.init(start))
        if any(relative(update[name].delta(), lora.delta()) > EXACT for name, lora in start.modules.items()):
            return Measured(False, "the update of a trained start is not what `effective` gives after `init`")
    kept: dict[str, Adapter | None] = {}
    for names in who:
        _, uploads = trained(server, state, ranks, names, kept)
        before = leaves(state), leaves(uploads)
        after = server.aggregate(state, uploads)
        shown = leaves(_seen(server, after, ranks))
        if (leaves(state), leaves(uploads)) != before:
            return Measured(False, f"`aggregate` changed what it was given in round {state.round + 1}")
        if leaves(_seen(server, server.aggregate(state, uploads), ranks)) != shown:
            return Measured(False, "the same inputs gave other bits")
        for _, download in _downloads(server, after, ranks):
            for lora in download.adapter.modules.values():
                lora.map(Tensor.zero_)
        if leaves(_seen(server, after, ranks)) != shown:
            return Measured(False, "reading out twice, or a client that trains in place, changed the state")
        loaded = stored(server, after)
        if leaves(loaded) != leaves(after) or leaves(_seen(server, loaded, ranks)) != shown:
            return Measured(False, "a stored state came back with other bits")
        state = loaded
    return Measured(True, f"no bit differs in {len(who)} rounds, through a checkpoint after each")


def sums(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    if method.linear_in == "clients":
        return Measured(None, "it depends on more than sums")
    moves = []
    for _, state, updates, after in _matrices(method, ranks, who):
        # A robust rule's terms: one client's update twice, and once more taken away by nobody.
        first, *others = updates
        given = [[replace(first, weight=2 * first.weight), *others, replace(first, client=None, weight=-first.weight)]]
        if method.linear_in == "factors":
            given.append([_mean(updates, r) for r in sorted({u.rank for u in updates})])
        elif not method.one_rank:
            whole = stack([u.lora for u in updates], [u.weight for u in updates])
            given.append([Update(None, 1.0, whole.rank, whole, first.roundoff)])
            # A rule's rest is one more term of weight 1: who divides by the weights is wrong there.
            rest = stack([first.lora], [0.75 * first.weight])
            less = replace(first, weight=0.25 * first.weight)
            given.append([less, *others, Update(None, 1.0, rest.rank, rest, first.roundoff)])
        moves += [drift(method, method.aggregate(state, terms), after, ranks) for terms in given]
    return _below(SAME, moves, f"linear in {method.linear_in}: sums in place of updates move it by")


def exact(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    errors = []
    for mean, state, _, after in _matrices(method, ranks, who):
        update, base = method.effective(after), method.base(state)
        if update is None:
            return Measured(False, "there is no global model, so no mean of it")
        errors.append(relative(update.delta() if base is None else update.delta() - base.total.delta(), mean))
    return _below(EXACT, errors, "off the mean update by")


def gauge(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    return _regauged(method, ranks, who, drift, SAME, "in other coordinates it moves by")


def readouts(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    return _regauged(method, ranks, who, readout_drift, SAME_READOUTS, "in other coordinates what clients get moves by")


def halves(method: Method[Any], ranks: Ranks, who: Who) -> Measured:
    moves = []
    for _, state, (first, *others), after in _matrices(method, ranks, who):
        half = replace(first, weight=first.weight / 2)
        split = [half, replace(half, client=f"{first.client}-2"), *others]
        moves.append(drift(method, method.aggregate(state, split), after, ranks))
    return _below(SAME, moves, "one client as two halves moves it by")


ALWAYS = ("rank", "alive", "order", "purity", "sums")
CONTRACTS: Mapping[str, Callable[[Method[Any], Ranks, Who], Measured]] = ReadOnly(
    {f.__name__: f for f in (rank, alive, order, purity, sums, exact, gauge, readouts, halves)}
)
_ADVICE = {
    "rank": "`readout` gives at most the client's rank, and exactly that where a factor is frozen.",
    "alive": "A slot of a frozen factor must keep a row of A, or a column of B, that is not zero.",
    "order": "Do not pick updates by their place, and draw no random numbers.",
    "purity": "Make new tensors instead of changing those you get, and keep only what a checkpoint can hold.",
    "sums": "Use `u.weight` as it is, and the updates through these sums only; or leave `linear_in` at its default.",
    "exact": "Average products, not factors, with `u.weight`; or do not claim it.",
    "gauge": "Use B_i and A_i through their product or its subspaces only; or do not claim it.",
    "readouts": "Read out of what the product determines, and fix signs and ties; or do not claim it.",
    "halves": "Use `u.weight` and nothing that counts clients; or do not claim it.",
}


def _mean(updates: Sequence[Update], rank: int) -> Update:
    """The mean factors of the clients of one rank, as one term of nobody with their weight."""
    some = [u for u in updates if u.rank == rank]
    share = sum(u.weight for u in some)
    mean = mean_factors([replace(u, weight=u.weight / share) for u in some])
    return Update(None, share, rank, mean, some[0].roundoff)


def _handed_out(
    server: Server, ranks: Ranks, who: Who, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[ServerState, Client, str, LoRA]]:
    """(state, client, matrix, what the client gets of it), of every state of the federation, from its start on."""
    first = server.init(seed_adapter(max(ranks.values()), dtype))
    for state in (first, *(played.after for played in rounds(server, ranks, who, dtype))):
        for client, download in _downloads(server, state, ranks):
            yield from ((state, client, name, lora) for name, lora in download.adapter.modules.items())


def _matrices(method: Method[Any], ranks: Ranks, who: Who) -> Iterator[tuple[Tensor, Any, list[Update], Any]]:
    """Each matrix of each round: (the dense mean update, the state before, the updates, the state after)."""
    for played in rounds(Server(method), ranks, who):
        for name, (state, updates) in played.modules():
            yield played.mean(name), state, updates, played.after.modules[name]


def _downloads(server: Server, state: ServerState, ranks: Ranks) -> Iterator[tuple[Client, Download]]:
    """The download for each client, and for one that never took part."""
    for name, r in (*ranks.items(), ("stranger", max(ranks.values()))):
        yield Client(name, r), server.download(state, Client(name, r))


def _seen(server: Server, state: ServerState, ranks: Ranks) -> dict[str, Any]:
    """All that clients and evaluation can see of a state."""
    update = server.global_update(state) if server.has_global_model(state) else None
    return {"downloads": [download for _, download in _downloads(server, state, ranks)], "update": update}


def _below(tolerance: float, moves: Sequence[float], what: str) -> Measured:
    return Measured(max(moves) < tolerance, f"{what} {max(moves):.1e}") if moves else Measured(None, "nothing travels")


def _regauged(method: Method[Any], ranks: Ranks, who: Who, measure: Any, tolerance: float, what: str) -> Measured:
    """`measure` of each round's state if every upload comes in random coordinates of condition 10."""
    moves = []
    for t, played in enumerate(rounds(Server(method), ranks, who)):
        if any(len(lora.tensors()) < 2 for u in played.uploads for lora in u.adapter.modules.values()):
            return Measured(None, "one factor travels: no gauge to change")
        other = replace(played, uploads=[regauge(u, 10.0, seed=t) for u in played.uploads])
        for name, (state, turned) in other.modules():
            moves.append(measure(method, method.aggregate(state, turned), played.after.modules[name], ranks))
    return _below(tolerance, moves, what)
