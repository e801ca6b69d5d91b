"""Small federations without a model: adapters "train" by a deterministic push, for the contracts of every method."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.client import keep, receive, send
from fedlora.core import checkpoint
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Upload
from fedlora.core.method import Roles, Update
from fedlora.linalg import unit_roundoff
from fedlora.seeds import derive_seed
from fedlora.server.server import Server
from fedlora.server.state import ServerState

Ranks = Mapping[str, int]  # client -> r
Who = Sequence[Sequence[str]]  # the clients of each round

SHAPES = {"attn.q": (30, 22), "attn.v": (18, 22)}  # not square, and with different d_out
ALL_TRAINED = Roles()
HEADS = {"classifier.weight": (3, 30), "classifier.bias": (3,)}
EXAMPLES = {"a": 10, "b": 25, "c": 40, "d": 15}
WHO: Who = (("a", "b", "c", "d"), ("b", "d"), ("a", "c", "d"))  # a and c miss the second round
EQUAL: tuple[Ranks, Who] = ({"a": 4, "b": 4, "c": 4, "d": 4}, WHO)
MIXED: tuple[Ranks, Who] = ({"a": 2, "b": 3, "c": 5, "d": 6}, WHO)


def noise(shape: Sequence[int], *seed: str | int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal draws that depend only on `seed`."""
    generator = torch.Generator().manual_seed(derive_seed("toy", *seed))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def seed_adapter(rank: int, dtype: torch.dtype = torch.float64) -> Adapter:
    """A fresh start: B = 0, A drawn, heads drawn."""
    modules = {
        name: LoRA(torch.zeros(d_out, rank, dtype=dtype), noise((rank, d_in), "seed", name, dtype=dtype) / d_in**0.5)
        for name, (d_out, d_in) in SHAPES.items()
    }
    return Adapter(modules, {name: noise(shape, "head", name, dtype=dtype) for name, shape in HEADS.items()})


def pushed(adapter: Adapter, client: str, round: int, roles: Roles = ALL_TRAINED) -> Adapter:
    """`adapter` after simulated training: unfrozen parts move by a random draw for this client and round."""

    def push(t: Tensor, *seed: str) -> Tensor:
        return t + 0.3 * noise(t.shape, client, round, *seed, dtype=t.dtype)

    modules = {}
    for name, lora in adapter.modules.items():
        B, A = lora.factors
        B = B if roles.B == "frozen" else push(B, name, "B")
        A = A if roles.A == "frozen" else push(A, name, "A")
        modules[name] = LoRA(B, A)
    heads = {name: head if roles.heads == "frozen" else push(head, name) for name, head in adapter.heads.items()}
    return replace(adapter, modules=modules, heads=heads)


@dataclass(frozen=True)
class Round:
    """One round: the state before, each client's complete trained adapter, the uploads, the state after."""

    before: ServerState
    complete: dict[str, Adapter]
    uploads: list[Upload]
    after: ServerState

    def weights(self) -> dict[str, float]:
        """Client -> p_i."""
        total = sum(u.num_examples for u in self.uploads)
        return {u.client.id: u.num_examples / total for u in self.uploads}

    def mean(self, module: str) -> Tensor:
        """The dense float64 mean of the updates, sum_i p_i B_i A_i: the oracle of exactness."""
        terms = [p * self.complete[c].modules[module].map(Tensor.double).delta() for c, p in self.weights().items()]
        return torch.stack(terms).sum(0)

    def module(self, name: str) -> tuple[Any, list[Update]]:
        """(the method's state of one matrix before the round, the updates that it was given)."""
        weights = self.weights()
        updates = []
        for u in sorted(self.uploads, key=lambda u: u.client.id):
            lora = u.adapter.modules[name]
            roundoff = unit_roundoff(next(iter(lora.tensors().values())).dtype)
            updates.append(Update(u.client.id, weights[u.client.id], lora.rank, lora, roundoff))
        return self.before.modules[name], updates

    def modules(self) -> Iterator[tuple[str, tuple[Any, list[Update]]]]:
        """Each matrix with `module` of it; none in a round in which only heads travelled."""
        if any(u.adapter.modules for u in self.uploads):
            yield from ((name, self.module(name)) for name in self.before.modules)


def trained(
    server: Server, state: ServerState, ranks: Ranks, names: Sequence[str], kept: dict[str, Adapter | None]
) -> tuple[dict[str, Adapter], list[Upload]]:
    """One round on the clients' side: download, receive, push, send, keep. Local parts are kept in `kept`."""
    complete, uploads = {}, []
    for name in names:
        client = Client(name, ranks[name])
        download = server.download(state, client)
        mine = pushed(receive(download, kept.get(name)), name, state.round, download.roles)
        complete[name], kept[name] = mine, keep(mine, download.roles)
        uploads.append(Upload(client, EXAMPLES[name], send(mine, download.roles)))
    return complete, uploads


def rounds(server: Server, ranks: Ranks, who: Who, dtype: torch.dtype = torch.float64) -> Iterator[Round]:
    """Play the rounds with the client protocol."""
    state = server.init(seed_adapter(max(ranks.values()), dtype))
    kept: dict[str, Adapter | None] = {}
    for names in who:
        complete, uploads = trained(server, state, ranks, names, kept)
        after = server.aggregate(state, uploads)
        yield Round(state, complete, uploads, after)
        state = after


def stored(server: Server, state: ServerState) -> ServerState:
    """The state after a checkpoint round trip. Raises `CheckpointError`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), state.round, state)
        found = checkpoint.load_newest(Path(folder), ServerState, server.method.State)
    assert found is not None, "it was saved"
    return found[1]
