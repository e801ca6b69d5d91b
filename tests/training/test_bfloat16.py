"""bfloat16 on a processor without instructions for it. Kind: oracle (float64 products of the same rounded numbers) and
counter-example (torch's own loop). Every test plays such a processor, whatever machine it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlora import build
from fedlora.client import begin_round
from fedlora.core.messages import Client, ClientMemory
from fedlora.server.server import Server
from fedlora.training import bfloat16
from fedlora.training.bfloat16 import bfloat16_products
from fedlora.training.evaluation import ModelEvaluator
from fedlora.training.grouped import GroupedTrainer
from fedlora.training.local import LocalTrainer, TrainSettings
from fedlora.training.models import AdaptedModel, LoRASettings
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import LABELS, classification, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
CPU = torch.device("cpu")
UNIT = 2.0**-8  # half the distance of two bfloat16 numbers beside 1, relative


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Plays the processor; the list gets an entry for each product that was computed in float32."""
    monkeypatch.setattr(bfloat16, "has_instructions", lambda: False)
    seen: list[object] = []
    rewritten = bfloat16._InFloat32.__torch_dispatch__

    def counted(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in bfloat16._PRODUCTS and any(isinstance(a, Tensor) and a.dtype == torch.bfloat16 for a in args):
            seen.append(func)
        return rewritten(self, func, types, args, kwargs)

    monkeypatch.setattr(bfloat16._InFloat32, "__torch_dispatch__", counted)
    return seen


@pytest.mark.parametrize("products", ["mm", "addmm", "bmm", "baddbmm"])
def test_a_product_is_rounded_once(products: str, without_instructions: list[object]) -> None:
    """Within half a distance of two bfloat16 numbers, and float32's sum of 300 terms: the float64 product says so."""
    draw = torch.Generator().manual_seed(0)
    batch = () if products[0] != "b" else (3,)
    a, b = (torch.randn(*batch, *shape, generator=draw).bfloat16() for shape in ((40, 300), (300, 50)))
    add = torch.randn(50, generator=draw).bfloat16()
    with bfloat16_products(CPU, on=True):
        made = {
            "mm": lambda: a @ b,
            "addmm": lambda: torch.addmm(add, a, b),
            "bmm": lambda: torch.bmm(a, b),
            "baddbmm": lambda: torch.baddbmm(add, a, b),
        }[products]()
    exact = a.double() @ b.double() + (add.double() if "add" in products else 0.0)
    assert made.dtype == torch.bfloat16 and without_instructions
    assert bool(((made.double() - exact).abs() <= UNIT * exact.abs() + 300 * 2.0**-24 * 100).all())


def test_a_backward_pass_is_computed_so_too(without_instructions: list[object]) -> None:
    """Two products forward and four backward (the first layer's input needs no gradient: three)."""
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with bfloat16_products(CPU, on=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).square().mean()
        forward = len(without_instructions)
        loss.backward()  # type: ignore[no-untyped-call]
    assert (forward, len(without_instructions)) == (2, 5)


@pytest.mark.parametrize("case", ["not in bfloat16", "has instructions"])
def test_nothing_is_done_where_nothing_is_missing(
    case: str, monkeypatch: pytest.MonkeyPatch, without_instructions: list[object]
) -> None:
    monkeypatch.setattr(bfloat16, "has_instructions", lambda: case == "has instructions")
    a = torch.ones(2, 2).bfloat16()
    with bfloat16_products(CPU, on=case == "has instructions"):
        torch.mm(a, a)
    assert not without_instructions


def test_float32_and_float64_products_stay_as_they_are(without_instructions: list[object]) -> None:
    a = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    with bfloat16_products(CPU, on=True):
        same, wide = a @ a, a.double() @ a.double()
    assert torch.equal(same, a @ a) and torch.equal(wide, a.double() @ a.double()) and not without_instructions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder: Path = save_encoder(tmp_path_factory.mktemp("encoder") / "model")
    return AdaptedModel.load(folder, "classification", LoRASettings("all-linear"), labels=LABELS, dropout=0.0)


@pytest.mark.parametrize("trainer", [LocalTrainer, GroupedTrainer])
def test_every_trainer_and_the_evaluation_use_it(
    trainer: type[LocalTrainer],
    model: AdaptedModel,
    without_instructions: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of six steps, and the score after them, are those of torch's own loop to 2 %: rounding alone differs."""
    seed, _ = model.seed_adapter(4, seed=0)
    server = Server(build("glora"))
    download = server.download(server.init(seed), Client("a", 4))
    found = []
    for on in (True, False):
        monkeypatch.setattr(bfloat16, "has_instructions", lambda on=on: not on)
        before = len(without_instructions)
        job = begin_round(download, ClientMemory())
        settings = TrainSettings(steps=6, batch_size=8, lr=1e-3, max_length=12, bf16=True)
        made = trainer(model, {"a": classification(40, 0)}, settings, seed=0).train(job.download, job.adapter, 0)
        trained = len(without_instructions)
        scores = ModelEvaluator(model, classification(30, 1), [], batch_size=7, bf16=True)
        found.append((made.loss, scores.measure_adapter(made.adapter, {})["loss"]))
        assert ((trained > before), (len(without_instructions) > trained)) == (on, on)
    assert found[0] == pytest.approx(found[1], rel=0.02)
