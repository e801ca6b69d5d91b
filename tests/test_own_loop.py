"""A loop of one's own: the tutorial's text gives the bits of `simulate` with every method, and may not forget the base.

Kind: contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlora import METHODS, Adapter, Client, Server, build
from fedlora.client import receive, send
from fedlora.core.lora import LoRA, named_tensors
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError
from fedlora.simulation import simulate, start
from fedlora.training import AdaptedModel, LocalTrainer, LoRASettings, TrainSettings
from support.tutorials import cells

PAGE = Path(__file__).parent.parent / "docs" / "tutorials" / "own-training-loop.md"
MOVES = [name for name in METHODS if build(name).moves_base]
# They move the base, keep a half at home, freeze one half in turns; the others are like one of these.
SOME = ("fedex-lora", "fedsa-lora", "rolora")
ROUNDS = {
    "rolora": 4
}  # two of each half of an alternating method; of others two: a change of the base is there in the second


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page has once its round is defined: model, data, `local_training`, `one_round`."""
    found: dict[str, Any] = {}
    for cell in cells(PAGE.read_text(encoding="utf-8")):
        if "import _page" not in cell.code:
            exec(compile(cell.code, PAGE.name, "exec"), found)
        if "def one_round" in cell.code:
            return found
    raise AssertionError("the page defines no one_round")


class SameBatches(LocalTrainer):
    """The library's own loop, on the examples that the page's loop draws."""

    def order(self, client: str, position: int) -> Iterator[int]:
        draw = torch.Generator().manual_seed(1000 * (position // 640) + sorted(self._data).index(client))
        for _ in range(20):
            yield from torch.randint(len(self.examples(client)), (32,), generator=draw).tolist()


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in SOME else pytest.mark.exhaustive) for name in METHODS]
)
def test_the_tutorials_loop_gives_the_bits_of_the_engine(page: dict[str, Any], method: str) -> None:
    """Expected: `simulate` with a trainer of the library, on the same examples, in a model of its own."""
    model = AdaptedModel(
        page["Reader"](), LoRASettings(target_modules=["first", "second"], modules_to_save=["head"], scaling=2.0)
    )
    model.network.load_state_dict(page["base"].state_dict())
    sets = {name: list(zip(*pair, strict=True)) for name, pair in page["data"].items()}
    settings = TrainSettings(learning_rate=1e-2, max_steps=20, batch_size=32, max_grad_norm=0)
    trainer = SameBatches(
        model, sets, settings, loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]), seed=0
    )
    clients, server = [Client(name, rank=4) for name in page["data"]], Server(build(method))
    seed, _ = model.seed_adapter(4, seed=0)
    *_, last = simulate(server, clients, trainer, start(server, seed), rounds=ROUNDS.get(method, 2))

    page["model"].seed_adapter(4, seed=0)
    state, kept = server.init(seed), {}  # type: ignore[var-annotated]
    for _ in range(ROUNDS.get(method, 2)):
        state = page["one_round"](server, state, clients, kept)
    for client in clients:
        mine = receive(server.download(state, client), kept[client.id])
        theirs = receive(server.download(last.state.server, client), last.state.clients[client.id].kept)
        assert _bits(mine) == _bits(theirs)
        assert bool(mine.base) == (method in MOVES)


def _bits(adapter: Adapter) -> dict[str, list[float]]:
    named = [*named_tensors(adapter), *named_tensors(Adapter(adapter.base or {"": LoRA(torch.zeros(1, 1), None)}))]
    return {f"{k} {name}": tensor.flatten().tolist() for k, (name, tensor) in enumerate(named)}


# ---- the change of the base cannot be left behind --------------------------------------------------------------------


class Fresh:
    """A trainer that builds a new adapter, and forgets what it belongs to."""

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        return Trained(Adapter(adapter.modules, adapter.heads), 10, 0.5, position + 10)


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_that_lost_the_base_is_refused_at_once(page: dict[str, Any], method: str) -> None:
    """The old mistake, in three forms: a network that got the factors only, a new adapter, a trainer that makes one.
    In round 1 already, where no base has moved yet; and never where none will."""
    server, model, client = Server(build(method)), page["model"], Client("north", 4)
    seed, _ = model.seed_adapter(4, seed=0)
    download = server.download(server.init(seed), client)
    mine = receive(download, None)
    model.activate(Adapter(mine.modules, mine.heads))
    if method not in MOVES:
        send(model.read(), download.roles)
        return
    for lost in (model.read(), Adapter(mine.modules, mine.heads)):
        with pytest.raises(HyperparameterError, match=r"moves the base weights.*model.activate\(mine\)"):
            send(lost, download.roles)
    with pytest.raises(HyperparameterError, match="moves the base weights"):
        list(simulate(server, [client], Fresh(), start(server, seed), rounds=1))
    send(replace(mine, modules=mine.modules), download.roles)
