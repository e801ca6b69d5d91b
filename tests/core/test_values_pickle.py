"""Values travel between processes: adapters, messages, states and methods pickle, and come back equal and read-only.

Kind of evidence: contract, over all methods; a process of its own that was given nothing but the bytes.
"""

from __future__ import annotations

import pickle
import pkgutil
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Server, build
from fedlora.core.checkpoint import _encode
from fedlora.core.messages import ClientMemory
from fedlora.core.parcels import held_after, pack, remember
from fedlora.core.read_only import ReadOnly
from fedlora.server.state import RunState
from support.federations import EQUAL, FULL, rounds


def tensors_of(value: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    _encode(value, "", found)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_states_and_messages_come_back_bit_for_bit(name: str) -> None:
    """After two rounds: the run's state, the method, a download, a parcel, a cache, the uploads."""
    server = Server(build(name))
    *_, played = (r for r, _ in zip(rounds(server, EQUAL, FULL), range(2), strict=False))
    download = server.download(played.after, Client("a", EQUAL["a"]))
    memory = ClientMemory(position=3, held=held_after(download))
    state = RunState(2, played.after, ReadOnly({"a": memory}))
    for value in (state, remember(download)):
        again = pickle.loads(pickle.dumps(value))
        got, want = tensors_of(again), tensors_of(value)
        assert set(got) == set(want) and all(torch.equal(got[path], want[path]) for path in want)
    assert pickle.loads(pickle.dumps(server)) == server
    for other in (download, pack(download, None), played.uploads):
        assert pickle.dumps(pickle.loads(pickle.dumps(other)))
    again = pickle.loads(pickle.dumps(state)).clients["a"]
    assert (again.held, again.position) == (memory.held, 3)


def test_what_came_back_cannot_be_changed() -> None:
    adapter = pickle.loads(pickle.dumps(Adapter({"m": LoRA(torch.ones(3, 2), None)})))
    for change in (
        lambda: adapter.modules.update({}),
        lambda: adapter.modules.__setitem__("n", None),
        lambda: adapter.modules.pop("m"),
        lambda: adapter.modules.__delitem__("m"),
        lambda: adapter.modules.clear(),
        lambda: adapter.modules.setdefault("n", None),
        lambda: adapter.modules.__ior__({"n": None}),
    ):
        with pytest.raises(TypeError, match="belongs to a value"):
            change()
    assert {**adapter.modules, "n": 1}.keys() == {"m", "n"}


@pytest.mark.parametrize("room", ["core", "privacy", "server"])
def test_every_value_is_frozen(room: str) -> None:
    home = import_module(f"fedlora.{room}")
    found = [
        value
        for module in pkgutil.iter_modules(home.__path__, f"{home.__name__}.")
        for value in vars(import_module(module.name)).values()
        if isinstance(value, type) and is_dataclass(value)
    ]
    assert len(found) > 4 and all(value.__dataclass_params__.frozen for value in found)  # type: ignore[attr-defined]
