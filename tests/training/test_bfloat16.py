"""bfloat16 on a processor without instructions for it. Kind: oracle (float64 products of the same rounded numbers) and
counter-example (torch's own loop). Every test plays such a processor, whatever machine it runs on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlora import build
from fedlora.client import begin_round
from fedlora.core.messages import Client, ClientMemory
from fedlora.server.server import Server
from fedlora.training import bfloat16
from fedlora.training.bfloat16 import bfloat16_autocast
from fedlora.training.evaluation import ModelEvaluator
from fedlora.training.local import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import LABELS, classification, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
CPU = torch.device("cpu")
UNIT = 2.0**-8  # half the distance of two bfloat16 numbers beside 1, relative


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Plays the processor; the list gets an entry for each tensor that was rounded for a product in float32."""
    monkeypatch.setattr(bfloat16, "has_instructions", lambda: False)
    seen: list[object] = []
    rounded = bfloat16._rounded

    def counted(one: object) -> object:
        seen.append(one)
        return rounded(one)

    monkeypatch.setattr(bfloat16, "_rounded", counted)
    return seen


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda a, b: nn.functional.linear(a, b.mT),
    "linear, named": lambda a, b: nn.functional.linear(input=a, weight=b.mT, bias=None),
    "@": lambda a, b: a @ b,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "Tensor.bmm": lambda a, b: a[None].bmm(b[None])[0],
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_is_rounded_once(product: str, without_instructions: list[object]) -> None:
    """Within half a distance of two bfloat16 numbers, and float32's sum of 300 terms: the float64 product says so."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=draw) for shape in ((40, 300), (300, 50)))
    with bfloat16_autocast(CPU, on=True):
        made = PRODUCTS[product](a, b)
    a, b = a.bfloat16().double(), b.bfloat16().double()
    exact = a @ b
    assert made.dtype == torch.bfloat16 and without_instructions
    assert bool(((made.double() - exact).abs() <= UNIT * exact.abs() + 300 * 2.0**-24 * (a.abs() @ b.abs())).all())


def test_a_layer_is_rounded_behind_its_bias() -> None:
    """(1 + 2^-7)(1 + 3 2^-7) - 1 = 2^-5 (1 + 1.5 2^-8) rounds up; rounded before the bias too, it is 2^-5."""
    a, b, add = torch.full((1, 1), 1 + 2.0**-7), torch.full((1, 1), 1 + 3 * 2.0**-7), torch.full((1,), -1.0)
    with bfloat16_autocast(CPU, on=True):
        made = nn.functional.linear(a, b, add)
    assert made.item() == 2.0**-5 * (1 + 2.0**-7)


def test_gradients_are_those_of_torchs_own_autocast(without_instructions: list[object]) -> None:
    """Of two layers and what lies between. torch's loop adds up in another order: some last bits differ."""
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 4))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = []
    for precision in (bfloat16_autocast(CPU, on=True), torch.autocast("cpu", dtype=torch.bfloat16)):
        net.zero_grad()
        x.grad = None
        with precision:
            loss = net(x).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None])
    assert len(found[0]) == 5 and without_instructions
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 2 * UNIT


@pytest.mark.parametrize("case", ["not in bfloat16", "has instructions"])
def test_nothing_is_done_where_nothing_is_missing(
    case: str, monkeypatch: pytest.MonkeyPatch, without_instructions: list[object]
) -> None:
    monkeypatch.setattr(bfloat16, "has_instructions", lambda: case == "has instructions")
    a = torch.ones(2, 2)
    with bfloat16_autocast(CPU, on=case == "has instructions"):
        made = torch.mm(a, a)
    assert not without_instructions and made.dtype == (torch.bfloat16 if case == "has instructions" else torch.float32)


def test_float64_products_stay_as_they_are(without_instructions: list[object]) -> None:
    a = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with bfloat16_autocast(CPU, on=True):
        same = a @ a
    assert torch.equal(same, a @ a) and not without_instructions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder: Path = save_encoder(tmp_path_factory.mktemp("encoder") / "model")
    return AdaptedModel.load(folder, "classification", LoRASettings(targets="all-linear"), labels=LABELS, dropout=0.0)


def test_training_and_evaluation_use_it(
    model: AdaptedModel, without_instructions: list[object], monkeypatch: pytest.MonkeyPatch
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
        made = LocalTrainer(model, {"a": classification(40, 0)}, settings, seed=0).train(job.download, job.adapter, 0)
        trained = len(without_instructions)
        scores = ModelEvaluator(model, classification(30, 1), [], batch_size=7, bf16=True)
        found.append((made.loss, scores.measure_adapter(made.adapter)["loss"]))
        assert ((trained > before), (len(without_instructions) > trained)) == (on, on)
    assert found[0] == pytest.approx(found[1], rel=0.02)
