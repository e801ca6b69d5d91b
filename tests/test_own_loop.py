"""A loop of one's own: the tutorial's text gives the bits of `simulate` with every method, and may not forget the base.

Kind: contract.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlora import METHODS, Adapter, Client, Server, Upload, build, write_adapter
from fedlora.adapters.io import load_into_model, read_model
from fedlora.client import receive, send
from fedlora.core.lora import LoRA, named_tensors
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError, ShapeError, UploadRefused
from fedlora.simulation import simulate, start
from fedlora.testing.federations import pushed
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


@pytest.fixture
def moved(page: dict[str, Any]) -> tuple[Server, Any, Adapter]:
    """FLoRA after a round: a server, its state, and what a client receives. The base has moved in both modules."""
    server = Server(build("flora"))
    state = server.init(page["model"].seed_adapter(4, seed=0)[0])
    download = server.download(state, Client("north", 4))
    mine = pushed(receive(download, None), "north", 0, download.roles)
    state = server.aggregate(state, [Upload(Client("north", 4), 1, send(mine, download.roles))])
    return server, state, receive(server.download(state, Client("north", 4)), None)


@torch.no_grad()
def test_a_peft_model_of_ones_own_gets_the_base_too(moved: tuple[Server, Any, Adapter], tmp_path: Path) -> None:
    """Oracle: dense weights W0 + 2 (base + B A) written into a plain network."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def network() -> nn.Module:
        torch.manual_seed(0)
        both = {"first": nn.Linear(64, 128), "second": nn.Linear(128, 128)}
        return nn.Sequential(OrderedDict(both))

    def expected(adapter: Adapter) -> torch.Tensor:
        out, plain = x, dict(network().named_parameters())
        for name, lora in adapter.modules.items():
            base = adapter.base[name].delta() if adapter.base else 0.0
            weight = plain[f"{name}.weight"] + 2 * (base + lora.delta())
            out = nn.functional.linear(out, weight, plain[f"{name}.bias"])
        return out

    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    model: Any = get_peft_model(network(), LoraConfig(r=4, lora_alpha=8, target_modules=["first", "second"]))  # type: ignore[arg-type]
    received = moved[2].map(lambda t: t + 0.01)
    mine = Adapter(received.modules, {}, received.base)
    assert mine.base and float((expected(mine) - expected(replace(mine, base={}))).abs().max()) > 0.1
    for adapter in (mine, replace(mine, base={}), mine, replace(mine, base=None)):
        load_into_model(model, adapter, scaling=2.0)
        torch.testing.assert_close(model(x), expected(adapter), rtol=1e-4, atol=1e-4)
        said = read_model(model, scaling=2.0)[0].base
        assert (said is None) == (adapter.base is None) and dict(said or {}) == dict(adapter.base or {})
    # and as a directory, which is loaded on the pre-trained base
    write_adapter(tmp_path / "mine", mine, read_model(model, scaling=2.0)[1])
    loaded = PeftModel.from_pretrained(network(), tmp_path / "mine")  # type: ignore[arg-type]
    torch.testing.assert_close(loaded(x), expected(mine), rtol=1e-4, atol=1e-4)


def test_an_adapter_with_its_base_is_no_start_and_no_upload(moved: tuple[Server, Any, Adapter]) -> None:
    server, state, mine = moved
    with pytest.raises(ShapeError, match="folded"):
        server.init(mine)
    with pytest.raises(UploadRefused, match="send"):
        server.aggregate(state, [Upload(Client("north", 4), 1, mine)])
    after = server.global_update(server.init(mine.folded()))["first"].delta()
    torch.testing.assert_close(after, server.global_update(state)["first"].delta())
