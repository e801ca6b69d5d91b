"""The messages between a server and its clients, and what a client remembers between rounds."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedlora.core.base_change import BaseChange
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.method import Roles
from fedlora.core.text import quoted
from fedlora.errors import HyperparameterError, UploadRefused


@dataclass(frozen=True)
class Client:
    """A party of the federation. rank: one r for all modules, or module -> r for the modules it holds.

    Example:
        >>> Client("site-1", rank=4).ranks(["q", "v"])
        {'q': 4, 'v': 4}
        >>> Client("site-2", rank={"q": 8}).ranks(["q", "v"])  # it holds no adapter on v
        {'q': 8}
    """

    id: str
    rank: int | Mapping[str, int]

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise HyperparameterError(f"a client id must be a non-empty string; got {self.id!r}.")
        ranks = self.rank.values() if isinstance(self.rank, Mapping) else [self.rank]
        if not all(isinstance(r, int) and not isinstance(r, bool) and r >= 1 for r in ranks):
            raise HyperparameterError(f"client {self.id!r}: ranks must be integers >= 1; got {self.rank!r}.")

    def ranks(self, modules: Mapping[str, object]) -> dict[str, int]:
        """Module -> r, for the given `modules` that this client holds."""
        if isinstance(self.rank, int):
            return dict.fromkeys(modules, self.rank)
        return {name: self.rank[name] for name in modules if name in self.rank}


@dataclass(frozen=True, eq=False)
class Upload:
    """What a client sends back: its shared factors and heads only; the others are absent (None or missing).

    Its tensors are not copied: do not write to them until the round is closed.

    num_examples: how many it trained on; sets its weight. 0 abstains.

    Example:
        >>> download = server.download(state, clients[0])
        >>> adapter = receive(download, kept=None)  # and train it
        >>> Upload(clients[0], num_examples=100, adapter=send(adapter, download.roles)).adapter
        Adapter(2 modules of rank [2], heads=['head.weight'])
    """

    client: Client
    num_examples: float
    adapter: Adapter


@dataclass(frozen=True, eq=False)
class Download:
    """What a client receives.

    adapter: shared and frozen parts, at the client's ranks. start: initial values for local parts, for a client that
    has kept none yet. base: module -> how its base weight has moved since pre-training; empty if none has. Parts that
    the client already holds need not travel: see `parcels`.

    Example:
        >>> download = server.download(state, Client("site-1", rank=2))
        >>> download.round, download.adapter.ranks, download.roles.B
        (0, {'q': 2, 'v': 2}, 'shared')
    """

    client: Client
    round: int
    adapter: Adapter
    roles: Roles
    start: Adapter
    base: Mapping[str, BaseChange]

    @property
    def base_delta(self) -> dict[str, LoRA]:
        """Module -> a copy of its base weight's total change since pre-training; empty if none has moved."""
        totals = {}
        for name, change in self.base.items():
            came = self.adapter.modules.get(name)
            dtype = torch.float32 if came is None else next(iter(came.tensors().values())).dtype
            totals[name] = LoRA(*(t.to(dtype, copy=True) for t in change.total.factors))
        return totals


@dataclass(frozen=True)
class Held:
    """What a client still holds from its last download.

    round: of that download. parts: each part of "B", "A" and "heads" that it holds as it came -> its digest. local:
    modules and heads with parts that only the client keeps. base: module -> version of its base weight (absent: as
    pre-trained).
    """

    round: int
    parts: Mapping[str, str]
    local: tuple[str, ...]
    base: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class ClientMemory:
    """What a client keeps between rounds.

    kept: local parts of the adapter. position: how far it has read its data. held: what need not be sent to it again
    (the engine has one copy of everything, so it stores only this list).

    Example:
        >>> memory = ClientMemory()  # before a client's first round
        >>> played = play_round(server.download(state, clients[0]), memory, trainer)
        >>> played.memory.position > memory.position
        True
    """

    kept: Adapter | None = None
    position: int = 0
    held: Held | None = None


def checked_examples(upload: Upload) -> float:
    """The upload's num_examples as a finite float >= 0. Raises `UploadRefused`."""
    n = upload.num_examples
    if isinstance(n, bool) or not isinstance(n, numbers.Real) or not 0 <= n <= sys.float_info.max:
        raise UploadRefused(upload.client.id, f"num_examples must be a finite number >= 0; got {quoted(n, 40)}.")
    return float(n)
