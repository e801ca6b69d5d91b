"""Work for worker processes: they import it by its name, so it cannot stand in a test file."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import torch
from torch import Tensor

from fedlora import Adapter, Download
from fedlora.core.trainer import Trained
from fedlora.errors import ConfigError, UploadRefused
from support.toy_trainer import Toy


def add(resident: Any, item: int) -> int:
    return int(resident["base"] + item)


def who(resident: Any, item: float) -> tuple[float, int, int, int]:
    """The item, the process, its threads and its number."""
    time.sleep(item)
    return item, os.getpid(), torch.get_num_threads(), resident.get("number", -1)


def number(resident: dict[str, Any], mine: int) -> None:
    resident["number"] = mine


def address(resident: dict[str, Tensor], name: str) -> tuple[bool, float]:
    return resident[name].is_shared(), float(resident[name].sum())


def write(resident: dict[str, Tensor], name: str) -> float:
    resident[name].add_(1)
    return float(resident[name].sum())


def own_megabytes(resident: dict[str, Tensor], item: tuple[str, float]) -> tuple[float, float]:
    """A tensor's sum, and the MB that this process shares with nobody. item: its name, and what to add to it."""
    name, add = item
    total = float(resident[name].sum())
    if add:
        resident[name].add_(add)
    time.sleep(0.2)  # so that the other process takes an item too
    return total, psutil.Process().memory_full_info().uss / 1e6


def trained(resident: Any, item: int) -> float:
    """The size of a gradient through a product large enough for several threads."""
    weight = torch.linspace(-1, 1, 256 * 256).view(256, 256).requires_grad_()
    torch.linalg.svdvals(weight @ weight).sum().backward()
    assert weight.grad is not None
    return float(weight.grad.norm())


def fail(resident: Any, kind: str) -> None:
    raise {
        "ours": UploadRefused("site-1", "no"),
        "value": ValueError("seven"),
        "odd": Unpicklable("x"),
    }[kind]


class Unpicklable(Exception):
    def __init__(self, x: str) -> None:
        super().__init__(f"odd {x}")
        self.lock = lambda: None


def die(resident: Any, name: str) -> str:
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def no_start(resident: Any, mine: int) -> None:
    raise ConfigError("no GPU here")


def die_at_start(resident: Any, mine: int) -> None:
    os._exit(3)


class Deadly(Toy):
    """A toy trainer whose process dies in the work of client b."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        if download.client.id == "b":
            die(None, "dies")
        return super().train(download, adapter, position)


class Raising(Toy):
    """A toy trainer that raises for one client, something that does not pickle in the second round."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        if download.client.id == "b":
            raise ZeroDivisionError("b divides by zero") if download.round == 0 else Unpicklable("x")
        return super().train(download, adapter, position)
