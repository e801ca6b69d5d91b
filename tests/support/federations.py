"""Small federations without a model: adapters that "train" by a deterministic push, for contracts of every method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Roles, Server, ServerState, Upload, keep, receive, send
from fedlora.seeds import derive_seed

SHAPES = {"attn.q": (30, 22), "attn.v": (18, 22)}  # neither square, and of different d_out
ALL_TRAINED = Roles()
HEADS = {"classifier.weight": (3, 30), "classifier.bias": (3,)}


def noise(shape: Sequence[int], *seed: str | int, dtype: torch.dtype = torch.float64) -> Tensor:
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
    """`adapter` after a stand-in for training: what is not frozen moves by a draw of its own client and round."""

    def push(t: Tensor, *seed: str) -> Tensor:
        return t + 0.3 * noise(t.shape, client, round, *seed, dtype=t.dtype)

    modules = {}
    for name, lora in adapter.modules.items():
        B, A = lora.factors
        B = B if roles.B == "frozen" else push(B, name, "B")
        A = A if roles.A == "frozen" else push(A, name, "A")
        modules[name] = LoRA(B, A)
    heads = {name: head if roles.heads == "frozen" else push(head, name) for name, head in adapter.heads.items()}
    return Adapter(modules, heads)


@dataclass(frozen=True)
class Round:
    """One round: the state before, what everyone downloaded and trained (complete), the uploads, the state after."""

    before: ServerState
    complete: dict[str, Adapter]
    uploads: list[Upload]
    after: ServerState

    def mean(self, module: str) -> Tensor:
        """The dense float64 mean of the updates: sum_i n_i B_i A_i / sum_i n_i. The oracle of exactness."""
        total = sum(u.num_examples for u in self.uploads)
        return sum(
            u.num_examples / total * self.complete[u.client.id].modules[module].map(Tensor.double).delta()
            for u in self.uploads
        )


EQUAL = {"a": 4, "b": 4, "c": 4, "d": 4}
MIXED = {"a": 2, "b": 3, "c": 5, "d": 6}
EXAMPLES = {"a": 10, "b": 25, "c": 40, "d": 15}
FULL = (("a", "b", "c", "d"),) * 3
PARTIAL = (("a", "b", "c"), ("b", "d"), ("a", "c", "d"))  # a and c miss the second round


def rounds(
    server: Server, ranks: dict[str, int], participants: Sequence[Sequence[str]], dtype: torch.dtype = torch.float64
) -> Iterator[Round]:
    """Play the rounds with the client protocol: download, receive, push, send, keep."""
    state = server.init(seed_adapter(max(ranks.values()), dtype))
    kept: dict[str, Adapter | None] = {}
    for t, names in enumerate(participants):
        complete, uploads = {}, []
        for name in names:
            client = Client(name, ranks[name])
            download = server.download(state, client)
            mine = pushed(receive(download, kept.get(name)), name, t, download.roles)
            complete[name], kept[name] = mine, keep(mine, download.roles)
            uploads.append(Upload(client, EXAMPLES[name], send(mine, download.roles)))
        after = server.aggregate(state, uploads)
        yield Round(state, complete, uploads, after)
        state = after
