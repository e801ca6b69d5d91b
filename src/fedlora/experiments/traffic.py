"""The bytes that a run's messages take, from ranks and shapes alone.

The engine itself says what one client sends and gets: it plays a few rounds of one client with one matrix of the real
shape. What each client sends in the run is then a matter of which rounds it takes part in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Download
from fedlora.core.trainer import Trained
from fedlora.runs.config import RunConfig
from fedlora.runs.rank_profiles import is_attention
from fedlora.runs.sections import MethodSection
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Heads, Server, start
from fedlora.simulation import Traffic, simulate
from fedlora.training.skeleton import Shapes

# Whether the client takes part, round by round: the first time; then in even and odd rounds, right after
# its last one (twice) and later. Methods may take turns, and a client need not be sent what it still holds.
_PART = "1110100111"
_FLOAT32 = 4


@dataclass(frozen=True)
class Bytes:
    """A run's tensors over all rounds and clients. most: it may be less, because the ranks of a moved base count, which
    only training shows."""

    total: int
    most: bool


_Kind = tuple[bool, bool]  # of a client's round: whether its number is odd, whether it took part in the one before


@dataclass(frozen=True)
class _Messages:
    """Bytes of one client's messages: its first download; each later one, and each upload, by the kind of its round."""

    first: int
    down: Mapping[_Kind, int]
    up: Mapping[_Kind, int]
    steady: bool

    def of(self, rounds: Sequence[int]) -> int:
        """The sum over the rounds in which it takes part."""
        kinds = Counter(_kind(was, now) for was, now in pairwise(rounds))
        total = sum(count * (self.down[kind] + self.up[kind]) for kind, count in kinds.items())
        return total + (self.first + self.up[rounds[0] % 2 == 1, False] if rounds else 0)


def _kind(was: int, now: int) -> _Kind:
    return now % 2 == 1, now - was == 1


def bytes_of(config: RunConfig, shapes: Shapes, names: Sequence[str]) -> Bytes:
    """The bytes of a run with these clients, on a base model of these shapes."""
    assigned = config.clients.assigned(list(names), config.run.seed)
    turns = turns_of(tuple(names), config.run.participation, config.run.seed, config.run.rounds)
    method = config.method.model_dump_json()
    heads = config.server.heads
    same = Counter((is_attention(module), shape) for module, shape in shapes.modules.items())
    moves_base = config.method.build().moves_base
    total, steady = 0, True
    for attention in sorted({attention for attention, _ in same}):
        ranks = {name: kind.attention if attention else kind.feed_forward for name, kind in assigned.items()}
        for (_, shape), count in ((one, count) for one, count in same.items() if one[0] == attention):
            for name, rank in ranks.items():
                one = _messages(method, heads, rank, max(ranks.values()), shape, 0)
                total, steady = total + count * one.of(turns[name]), steady and one.steady
            if moves_base:
                columns = _columns_of_base(ranks, turns, config.run.rounds, min(shape))
                total, steady = total + count * sum(shape) * _FLOAT32 * columns, False
    bare, full = (_messages(method, heads, 1, 1, (2, 2), size) for size in (0, shapes.head_numbers))
    total += sum(full.of(each) - bare.of(each) for each in turns.values())
    return Bytes(total, not steady)


@lru_cache(maxsize=256)
def turns_of(names: tuple[str, ...], share: float, seed: int, rounds: int) -> Mapping[str, tuple[int, ...]]:
    """Client -> the rounds, from 0, in which it takes part."""
    found: dict[str, list[int]] = {name: [] for name in names}
    for k in range(rounds):
        for name in sample_clients(names, share, seed=seed, round=k):
            found[name].append(k)
    return {name: tuple(each) for name, each in found.items()}


def _columns_of_base(ranks: Mapping[str, int], turns: Mapping[str, Sequence[int]], rounds: int, largest: int) -> int:
    """The most columns of the base weight's change that clients get: of the steps that they missed, or of the total."""
    steps = [0] * rounds
    for name, rank in ranks.items():
        for k in turns[name]:
            steps[k] = min(steps[k] + rank, largest)
    before = [0, *accumulate(steps)]  # of the rounds before each
    found = 0
    for each in turns.values():
        for was, now in pairwise((0, *each)):
            found += min(before[now] - before[was], before[now], largest)
    return found


class Nudged:
    """Stands for training: every tensor changes a little, at full rank."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        generator = torch.Generator().manual_seed(download.round)
        moved = adapter.map(lambda t: t + 0.01 * torch.randn(t.shape, generator=generator))
        return Trained(moved, 1, 0.0, position + 1)


@lru_cache(maxsize=4096)
def _messages(
    method: str, heads: Heads | None, rank: int, largest: int, shape: tuple[int, int], head: int
) -> _Messages:
    """method: its section, as JSON. largest: rank among the clients, with which another one trains in each round. head:
    numbers in all heads together."""
    server = Server(MethodSection(**json.loads(method)).build(), heads=heads)
    B, A = torch.zeros(shape[0], largest), torch.randn(largest, shape[1], generator=torch.Generator().manual_seed(0))
    state = start(server, Adapter({"self_attn": LoRA(B, A)}, {"head": torch.zeros(head)} if head else {}))
    one, other = Client("one", rank), Client("another", largest)
    first, was = 0, 0
    down: dict[_Kind, set[int]] = {}
    up: dict[_Kind, set[int]] = {}
    for now, part in enumerate(_PART):
        without, record = (
            next(simulate(server, clients, Nudged(), state, rounds=now + 1)) for clients in ([other], [other, one])
        )
        if part == "0":
            state = without.state
            continue
        kind, state = _kind(was, now), record.state
        up.setdefault(kind, set()).add(_up(record.bytes) - _up(without.bytes))
        sent = _down(record.bytes) - _down(without.bytes)
        if now:
            down.setdefault(kind, set()).add(sent)
        else:
            first = sent
        was = now
    steady = all(len(sizes) == 1 for sizes in (*down.values(), *up.values()))
    most = [{kind: max(sizes) for kind, sizes in each.items()} for each in (down, up)]
    return _Messages(first, most[0], most[1], steady)


def _up(sent: Traffic) -> int:
    return sent.up_adapter + sent.up_heads


def _down(sent: Traffic) -> int:
    """Without the base's change, which depends on everybody's ranks."""
    return sent.down_adapter + sent.down_heads
