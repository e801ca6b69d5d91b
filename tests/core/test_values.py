"""Values are immutable, also after they travelled to another process. Kind of evidence: contract, structural."""

from __future__ import annotations

import pickle
import pkgutil
from dataclasses import is_dataclass
from importlib import import_module

import pytest
import torch

from fedlora import Adapter, LoRA


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
