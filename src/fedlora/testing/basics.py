"""What every method must keep: trainable readouts of the requested rank, pure functions, states that can be stored."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedlora.core import checkpoint
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Download
from fedlora.core.method import Method, Readout, Roles, Update
from fedlora.errors import CheckpointError, HyperparameterError
from fedlora.methods.registry import require_method
from fedlora.server.method_faults import blamed_on, checked_readout
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.testing.comparing import changed, differing, leaves, moved_by, seen
from fedlora.testing.contract import Measured
from fedlora.testing.federations import Ranks, Who, rounds, seed_adapter, trained

# Rounding of a sum in another order; some methods then solve for a minimum, which multiplies it.
ORDER = 1e-6


def protocol(server: Server, ranks: Ranks, who: Who) -> Measured:
    """The class has all that `core.method.Method` requires, and it and its state are frozen."""
    cls = type(server.method)
    try:
        require_method(cls, cls.__name__)
    except HyperparameterError as error:
        return Measured(False, str(error))
    for part in (cls, cls.State):
        if not part.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return Measured(False, f"{part.__name__} is a dataclass that can be changed; write @dataclass(frozen=True)")
    return Measured(True, "all functions are there")


def rank(server: Server, ranks: Ranks, who: Who) -> Measured:
    """Each client gets the rank that it requests, in its matrix's shape and the server's dtype, from init on.

    The server itself refuses other shapes (`MethodFault`). Unknown clients, including None, are also served.
    """
    count = 0
    for state in _states(server, ranks, who):
        for client, download in _downloads(server, state, ranks):
            for name, lora in download.adapter.modules.items():
                count += 1
                start = state.start.modules[name].factors[0]
                if lora.rank != client.rank:
                    return Measured(False, f"{_at(client, name, state)} has rank {lora.rank}")
                for factor, tensor in lora.tensors().items():
                    if tensor.dtype != start.dtype:
                        return Measured(
                            False, f"{factor} of {_at(client, name, state)} is {tensor.dtype}, not {start.dtype}"
                        )
                    if not bool(torch.isfinite(tensor).all()):
                        return Measured(False, f"{factor} of {_at(client, name, state)} holds NaN or Inf")
        for name, s in state.modules.items():
            with blamed_on(server.method, "readout"):
                made = server.method.readout(s, None, max(ranks.values()))
            checked_readout(server.method, made, state.start.modules[name], max(ranks.values()), server.roles(state))
    return Measured(True, f"{count} readouts as asked")


def weights(server: Server, ranks: Ranks, who: Who) -> Measured:
    """Other numbers of examples change what clients or evaluation see. `exact` tests that the mean is right."""
    played = next(rounds(server, ranks, who))
    turned = [u.num_examples for u in played.uploads][::-1]
    other = [replace(u, num_examples=n) for u, n in zip(played.uploads, turned, strict=True)]
    want, got = seen(server, played.after, ranks), seen(server, server.aggregate(played.before, other), ranks)
    moved = [path for path in differing(got, want) if "/heads/" not in path]  # the server's own mean
    return Measured(bool(moved), "changing them changes what clients get" if moved else "changing them changes no bit")


def alive(server: Server, ranks: Ranks, who: Who) -> Measured:
    """No slot k of a readout has both B[:, k] == 0 and A[k, :] == 0: its gradient would always be zero."""
    count = 0
    for state in _states(server, ranks, who):
        for client, download in _downloads(server, state, ranks):
            for name, lora in download.adapter.modules.items():
                if lora.B is None or lora.A is None:
                    continue
                count += lora.rank
                dead = int(((lora.B == 0).all(0) & (lora.A == 0).all(1)).sum())
                if dead:
                    return Measured(False, f"{dead} of {lora.rank} slots are dead: {_at(client, name, state)}")
    return Measured(True, f"{count} slots, none dead")


def order(server: Server, ranks: Ranks, who: Who) -> Measured:
    """The order of uploads changes no bit, as the server sorts them; the order of `updates` only changes rounding."""
    moves = []
    method: Any = Turned(server.method)
    turned = Server(method)
    for played in rounds(server, ranks, who):
        again = server.aggregate(played.before, played.uploads[::-1])
        if paths := differing(seen(server, again, ranks), seen(server, played.after, ranks)):
            return Measured(
                False, f"{len(paths)} values changed in a bit when uploads came in another order: {paths[0]}"
            )
        moves.append(moved_by(server, turned.aggregate(played.before, played.uploads), played.after, ranks))
    most = max(moves)
    return Measured(
        most < ORDER, f"no bit differs; the list of updates turned round moves it by {most:.1e}", min(moves), most
    )


def purity(server: Server, ranks: Ranks, who: Who) -> Measured:
    """Inputs stay unchanged, the same inputs give the same bits, and a stored state continues with the same bits.

    A client owns what it gets: training in place does not change the state.
    """
    state = server.init(seed_adapter(max(ranks.values())))
    kept: Mapping[str, Adapter | None] = {}
    for names in who:
        made = trained(server, state, ranks, names, kept)
        before, uploads = leaves(state), leaves(made.uploads)
        after = server.aggregate(state, made.uploads)
        shown, twice = (leaves(seen(server, after, ranks)) for _ in range(2))
        again = server.aggregate(state, made.uploads)
        for what, now, then in (
            ("the state that it was given", leaves(state), before),
            ("the uploads that it was given", leaves(made.uploads), uploads),
            ("the readouts, when read out again,", twice, shown),
            ("the result, when aggregated again from the same inputs,", leaves(seen(server, again, ranks)), shown),
        ):
            if paths := changed(now, then):
                return Measured(False, f"{what} changed in round {state.round + 1}: {len(paths)} values, {paths[0]}")
        _train_in_place(server, after, ranks)
        if paths := changed(leaves(seen(server, after, ranks)), shown):
            return Measured(False, f"a client that trains in place changes the state: {paths[0]} is not its own")
        stored = _stored(server, after)
        if isinstance(stored, str):
            return Measured(False, stored)
        if paths := differing(stored, after):
            return Measured(False, f"a stored state comes back with other bits: {len(paths)} values, {paths[0]}")
        if paths := changed(leaves(seen(server, stored, ranks)), shown):
            return Measured(False, f"a stored state is read out with other bits: {len(paths)} values, {paths[0]}")
        state, kept = stored, made.kept
    return Measured(True, f"no bit differs in {len(who)} rounds, through a checkpoint after each")


@dataclass(frozen=True)
class Turned:
    """A method that sees the updates in the opposite order."""

    name: ClassVar[str] = "turned"
    paper: ClassVar[str] = "none"
    inner: Method[Any]

    @property
    def State(self) -> type:  # the protocol's name
        return self.inner.State

    def init(self, seed: LoRA, key: int) -> Any:
        return self.inner.init(seed, key)

    def roles(self, round: int) -> Roles:
        return self.inner.roles(round)

    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return self.inner.aggregate(state, updates[::-1])

    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        return self.inner.readout(state, client, rank)

    def effective(self, state: Any) -> LoRA | None:
        return self.inner.effective(state)

    def diagnostics(self, state: Any) -> Mapping[str, object]:
        return self.inner.diagnostics(state)


def _states(server: Server, ranks: Ranks, who: Who) -> Iterator[ServerState]:
    """Every state of the federation, each before clients train on it."""
    yield server.init(seed_adapter(max(ranks.values())))
    yield from (played.after for played in rounds(server, ranks, who))


def _downloads(server: Server, state: ServerState, ranks: Ranks) -> Iterator[tuple[Client, Download]]:
    """The download for each client, and for one that never took part."""
    for name, r in (*ranks.items(), ("stranger", max(ranks.values()))):
        client = Client(name, r)
        yield client, server.download(state, client)


def _train_in_place(server: Server, state: ServerState, ranks: Ranks) -> None:
    """Changes the received tensors in place, as an optimiser does, but more."""
    for name, rank in ranks.items():
        for lora in server.download(state, Client(name, rank)).adapter.modules.values():
            for tensor in lora.tensors().values():
                tensor.zero_()


def _stored(server: Server, state: ServerState) -> ServerState | str:
    """The state after a checkpoint round trip, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint.save(Path(folder), state.round, state)
            loaded = checkpoint.load_newest(Path(folder), ServerState, server.method.State)
        except CheckpointError as error:
            return f"the state cannot be stored: {error}"
    return loaded[1] if loaded is not None else "the state was stored and is not there"


def _at(client: Client, module: str, state: ServerState) -> str:
    return (
        f"the readout of module {module!r} for {client.id!r}, which asks for {client.rank}, after {state.round} rounds"
    )
