"""Inputs that a stranger broke the server with, each a class of failure. Kind: contract; expected values by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import pytest
import torch

from fedlora import Adapter, Client, LoRA, Readout, Roles, Server, Upload, build
from fedlora.client import keep, receive
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError, MethodFault
from fedlora.methods import METHODS
from fedlora.methods.fedit import FedIT, FedITState
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.federations import EQUAL, seed_adapter
from support.toy_trainer import Toy, clients


class InPlace:
    """Adds one to what it was given, in place."""

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        for lora in adapter.modules.values():
            for tensor in lora.tensors().values():
                tensor.add_(1.0)
        return Trained(adapter, 10, 0.0, position + 1)


def test_training_in_place_reaches_no_state_and_no_other_client() -> None:
    """FedSA-LoRA's B begins as zeros and grows by one a round, for each client by itself."""
    server = Server(build("fedsa-lora"))
    begun = server.init(Adapter({"m": LoRA(torch.zeros(3, 2), torch.ones(2, 4))}))
    state = start(server, begun.start)
    three = [Client(name, 2) for name in "abc"]
    *_, last = simulate(server, three, InPlace(), state, rounds=2)
    for memory in last.state.clients.values():
        assert memory.kept is not None and torch.equal(memory.kept.modules["m"].tensors()["B"], torch.full((3, 2), 2.0))
    once, twice = (next(iter(simulate(server, three, InPlace(), last.state, rounds=3))).state for _ in range(2))
    assert _bits(once.clients) == _bits(twice.clients)
    assert not bool(state.server.start.modules["m"].factors[0].any())


def _bits(value: Any) -> list[bytes]:
    """Of every tensor within a value, in order."""
    found: list[bytes] = []

    def walk(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.append(one.detach().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(one, Mapping):
            for key in sorted(one, key=str):
                walk(one[key])
        elif isinstance(one, list | tuple):
            for each in one:
                walk(each)
        elif is_dataclass(one):
            for field in fields(one):
                walk(getattr(one, field.name))

    walk(value)
    return found


def _overwritten(value: Any) -> None:
    """Every tensor that somebody was handed, written over."""
    loras = [value] if isinstance(value, LoRA) else [*value.modules.values(), *(value.base or {}).values()]
    for lora in loras:
        for tensor in lora.tensors().values():
            tensor.fill_(7.0)
    for head in getattr(value, "heads", {}).values():
        head.fill_(7.0)


@pytest.mark.quick(14)
@pytest.mark.parametrize("heads", [None, "local"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_is_handed_out_reaches_no_state_and_no_memory(name: str, heads: Any) -> None:
    """Whoever writes into a download, a received adapter, a kept part or the global update writes into copies: the
    state and each client's memory keep their bits, and a round played again from them has the same."""
    server = Server(build(name), heads=heads)
    begun = start(server, seed_adapter(4, torch.float32))
    *_, last = simulate(server, clients(EQUAL), Toy(), begun, rounds=2)
    before = _bits(last.state)
    assert before
    (once,) = simulate(server, clients(EQUAL), Toy(), last.state, rounds=3)
    for client in clients(EQUAL):
        download = server.download(last.state.server, client)
        mine = receive(download, last.state.clients[client.id].kept)
        kept = keep(mine, download.roles)
        _overwritten(mine)
        _overwritten(download.adapter)
        assert kept is None or not any(bool((t == 7.0).all()) for t in kept.heads.values())
    if server.has_global_model(last.state.server):
        for update in server.global_update(last.state.server).values():
            _overwritten(update)
    assert _bits(last.state) == before
    (again,) = simulate(server, clients(EQUAL), Toy(), last.state, rounds=3)
    assert _bits(again.state) == _bits(once.state)


@pytest.mark.parametrize("heads", ["local", "frozen", "average"])
def test_added_up_uploads_take_any_role_of_heads(heads: str) -> None:
    server = Server(build("svd"), memory=0.01, heads=heads)  # type: ignore[arg-type]
    before = start(server, seed_adapter(4, torch.float32))
    (record,) = simulate(server, clients(EQUAL), Toy(), before, rounds=1)
    moved = [not torch.equal(head, before.server.heads[name]) for name, head in record.state.server.heads.items()]
    assert all(moved) if heads == "average" else not any(moved)


@dataclass(frozen=True, eq=False)
class MoreState(FedITState):
    """A class that no checkpoint could read back as a FedITState."""


@dataclass(frozen=True)
class Mine(FedIT):
    name: ClassVar[str] = "mine"


class Inherits(Mine):
    def init(self, seed: LoRA, key: int) -> Any:
        return MoreState(key, 0, seed)


class HandsOutLocals(Mine):
    def roles(self, round: int) -> Roles:
        return Roles(B="local")


class SaysNothing(Mine):
    def diagnostics(self, state: Any) -> Any:
        return None


class NoAdapter(Mine):
    def readout(self, state: Any, client: str | None, rank: int) -> Any:
        return Readout(None)  # type: ignore[arg-type]


class TextBase(Mine):
    def readout(self, state: Any, client: str | None, rank: int) -> Any:
        return Readout(state.mean, base="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [Inherits, HandsOutLocals, SaysNothing, NoAdapter, TextBase], ids=lambda c: c.__name__)
def test_what_a_method_returns_wrongly_is_its_own_fault(cls: type[FedIT]) -> None:
    server = Server(cls(), quorum=1)
    with pytest.raises(MethodFault, match=r"^mine"):
        list(simulate(server, clients(EQUAL), Toy(), start(server, seed_adapter(4)), rounds=1))


@pytest.mark.parametrize("options", [{"quorum": 1.5}, {"quorum": True}, {"workers": 1.5}, {"memory": float("inf")}])
def test_options_of_the_server_are_of_their_types(options: dict[str, Any]) -> None:
    with pytest.raises(HyperparameterError, match=next(iter(options))):
        Server(build("glora"), **options)


def test_a_closed_round_takes_no_upload() -> None:
    """It would be in no state, and its client would hear nothing."""
    server = Server(build("flora"))
    round = server.open(server.init(Adapter({"m": LoRA(torch.zeros(3, 1), torch.ones(1, 4))})))
    sent = Adapter({"m": LoRA(torch.ones(3, 1), torch.ones(1, 4))})
    round.add(Upload(Client("a", 1), 1, sent))
    round.close()
    with pytest.raises(HyperparameterError, match="closed"):
        round.add(Upload(Client("late", 1), 1, sent))
