"""LoRA for any nn.Module: the trainer against hand-made autograd, every method to the bit, and refusals. Kind: oracle,
contract.

The oracles are dense: W0 + scaling * B @ A written out and differentiated by torch itself, in float64.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlora import Adapter, Client, Kept, LoRA, Server, build, write_adapter
from fedlora.core import checkpoint
from fedlora.core.lora import named_tensors
from fedlora.errors import ClientFailed, ConfigError, UploadRefused
from fedlora.methods.registry import METHODS
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord, simulate, start
from fedlora.training import LoRAModule, ModuleEvaluator, ModuleTrainer, TrainSettings

IDS = ("a", "b", "c")
CLIENTS = [Client(name, 3) for name in IDS]
SGD = TrainSettings(lr=0.1, optimizer="sgd", steps=1, batch_size=6, clip=0.0)
Batch = tuple[Tensor, Tensor]


class Tiny(nn.Module):
    """Two linear layers, dropout and a head: x (n, 5) -> (n, 2)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(5, 4), nn.Dropout(dropout), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.tanh(self.first(x))))
        return out


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().to(dtype)


def examples(dtype: torch.dtype = torch.float32) -> dict[str, list[Batch]]:
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(18, 5, generator=g, dtype=dtype), torch.randint(0, 2, (18,), generator=g)
    return {name: list(zip(x[k::3], y[k::3], strict=True)) for k, name in enumerate(IDS)}


def loss(network: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(network(x), y)


def tiny(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> LoRAModule:
    return LoRAModule(seeded(lambda: Tiny(dropout), dtype), ["first"], heads=["head"])


def trained(
    model: LoRAModule, adapter: Adapter, settings: TrainSettings = SGD, name: str = "fedit", **data: Any
) -> Any:
    """One client's round of `name`, from `adapter`."""
    server = Server(build(name))
    download = server.download(server.init(adapter), Client("a", 3))
    return ModuleTrainer(model, data or examples(next(named_tensors(adapter))[1].dtype), loss, settings, seed=0).train(
        download, adapter, 0
    )


def some_adapter(model: LoRAModule, rank: int = 3) -> Adapter:
    """One whose B is not zero."""
    adapter, _ = model.seed_adapter(rank, seed=0)
    g = torch.Generator().manual_seed(5)
    return Adapter(
        {
            name: LoRA(torch.randn(lora.factors[0].shape, generator=g, dtype=lora.factors[0].dtype), lora.A)
            for name, lora in adapter.modules.items()
        },
        adapter.heads,
    )


def by_hand(adapter: Adapter, network: nn.Module, data: list[Batch], scaling: float = 2.0) -> dict[str, Tensor]:
    """One SGD step of rate 0.1 on all examples, with the update written out as a dense matrix."""
    base = {name: p.detach() for name, p in network.named_parameters()}
    B, A = (t.clone().requires_grad_() for t in adapter.modules["first"].factors)
    W, b = (adapter.heads[f"head.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    x, y = torch.stack([x for x, _ in data]), torch.stack([y for _, y in data])
    hidden = torch.tanh(x @ (base["first.weight"] + scaling * B @ A).T + base["first.bias"])
    value = nn.functional.cross_entropy(hidden @ W.T + b, y)
    value.backward()
    leaves = {"B": B, "A": A, "W": W, "b": b}
    return {name: (t - 0.1 * t.grad).detach() for name, t in leaves.items() if t.grad is not None} | {"loss": value}


def test_one_step_is_that_of_hand_made_autograd() -> None:
    """float64, all of the client's six examples in one batch: to rounding."""
    model = tiny(dtype=torch.float64)
    adapter = some_adapter(model)
    want = by_hand(adapter, seeded(Tiny, torch.float64), examples(torch.float64)["a"])
    got = trained(model, adapter)
    B, A = got.adapter.modules["first"].factors
    for mine, theirs in (
        (B, want["B"]), (A, want["A"]), (got.adapter.heads["head.weight"], want["W"]),
        (got.adapter.heads["head.bias"], want["b"]), (torch.tensor(got.loss).double(), want["loss"].float().double()),
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    assert (got.num_examples, got.position) == (6, 6)


def test_micro_batches_give_the_same_gradient() -> None:
    model = tiny(dtype=torch.float64)
    adapter = some_adapter(model)
    whole = trained(model, adapter)
    parts = trained(
        model, adapter, TrainSettings(lr=0.1, optimizer="sgd", steps=1, batch_size=6, clip=0, accumulation=4)
    )
    for (name, a), (_, b) in zip(named_tensors(whole.adapter), named_tensors(parts.adapter), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize(("method", "still"), [("ffa-lora", "A"), ("fedsa-lora", None)])
def test_frozen_parts_stay_as_they_are(method: str, still: str | None) -> None:
    """FFA-LoRA freezes A; FedSA-LoRA trains both."""
    model = tiny()
    adapter = some_adapter(model)
    after = trained(model, adapter, name=method).adapter.modules["first"].tensors()
    same = {name: torch.equal(after[name], t) for name, t in adapter.modules["first"].tensors().items()}
    assert same == {"B": False, "A": still == "A"}


def test_a_changed_base_is_trained_on() -> None:
    """FedEx-LoRA's residual is in the base weight: the step is by hand's with W0 moved by scaling * delta."""
    model = tiny(dtype=torch.float64)
    adapter = some_adapter(model)
    delta = LoRA(torch.ones(4, 1).double(), torch.arange(5.0).double()[None] / 10)
    model.activate(replace(adapter, base={"first": delta}))
    x = examples(torch.float64)["a"][0][0][None]
    network = seeded(Tiny, torch.float64)
    B, A = adapter.modules["first"].factors
    with torch.no_grad():
        network.first.weight += 2.0 * (delta.delta() + B @ A)  # type: ignore[operator, union-attr]
        torch.testing.assert_close(model.network(x), network(x), rtol=1e-12, atol=1e-13)
        model.activate(adapter)
        assert not torch.allclose(model.network(x), network(x))


def federation(name: str) -> tuple[Server, LoRAModule, ModuleTrainer, ModuleEvaluator, RunState]:
    """Three clients of ranks 3 with dropout, Adam, and another optimiser step count than an epoch has."""
    model, server = tiny(dropout=0.3), Server(build(name))
    adapter, _ = model.seed_adapter(3, seed=0)
    state = start(server, adapter)
    target = "server" if server.has_global_model(state.server) else "clients"
    trainer = ModuleTrainer(model, examples(), loss, TrainSettings(lr=0.01, steps=2, batch_size=4), seed=0)
    everything = [row for part in examples().values() for row in part]
    held = torch.stack([x for x, _ in everything]), torch.stack([y for _, y in everything])
    evaluator = ModuleEvaluator(
        model,
        lambda network: {"loss": float(loss(network, held))},
        CLIENTS if target == "clients" else (),
        target=target,
    )
    return server, model, trainer, evaluator, state


def bits(record: RoundRecord, folder: Path) -> tuple[bytes, Mapping[str, float], Mapping[str, float]]:
    """A state's file, losses and metrics."""
    checkpoint.save(folder, record.round, record.state, keep=1)
    (file,) = (path for path in folder.rglob("*") if path.is_file())
    return file.read_bytes(), record.losses, record.metrics


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    """Three rounds at once; and one round, its state stored and read in, and two more with everything new."""
    server, _, trainer, evaluator, state = federation(name)
    whole = list(simulate(server, CLIENTS, trainer, state, rounds=3, evaluator=evaluator))
    checkpoint.save(tmp_path / "one", 1, whole[0].state, keep=1)

    server, _, trainer, evaluator, _ = federation(name)
    loaded = checkpoint.load_newest(tmp_path / "one", RunState, server.method.State)
    assert loaded is not None
    *_, last = simulate(server, CLIENTS, trainer, loaded[1], rounds=3, evaluator=evaluator)
    assert bits(last, tmp_path / "resumed") == bits(whole[-1], tmp_path / "whole")
    assert all(math.isfinite(x) for x in last.metrics.values()) and last.metrics


def test_the_server_is_measured_as_its_dense_update() -> None:
    """Two rounds of GLoRA: the measured loss is that of W0 + scaling * the server's update, written out."""
    server, _, trainer, evaluator, state = federation("glora")
    *_, record = simulate(server, CLIENTS, trainer, state, rounds=2, evaluator=evaluator)
    network = seeded(Tiny)
    heads = record.state.server.heads
    with torch.no_grad():
        network.first.weight += 2.0 * server.global_update(record.state.server)["first"].delta()  # type: ignore
        network.head.load_state_dict({name.removeprefix("head."): t for name, t in heads.items()})  # type: ignore
        rows = [row for part in examples().values() for row in part]
        want = float(loss(network, (torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))))
    assert record.metrics["loss"] == pytest.approx(want, rel=1e-5)


def test_the_adapter_is_a_peft_directory(tmp_path: Path) -> None:
    """peft's own loader puts it on a new network, which then says the same."""
    from peft import PeftModel

    model = tiny()
    adapter = some_adapter(model)
    _, spec = model.seed_adapter(3, seed=0)
    write_adapter(tmp_path / "adapter", adapter, spec)
    loaded = PeftModel.from_pretrained(seeded(Tiny), str(tmp_path / "adapter"))
    model.activate(adapter)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model.network.eval()(x))


def test_torchs_fused_encoder_does_not_go_past_lora() -> None:
    """In evaluation nn.TransformerEncoderLayer may call one kernel on the base weights; it must not."""
    model = LoRAModule(seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)), "all-linear")
    assert model.targets == ("linear1", "linear2")
    model.activate(some_adapter(model))
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.network.eval()(x), model.network.train()(x))


def test_the_base_stays_as_it_is_whoever_trains() -> None:
    """Batch norm's running statistics are of the base: two clients one after the other leave them alone."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    model = LoRAModule(seeded(make), ["0"], heads=["2"])
    before = {name: t.clone() for name, t in seeded(make).state_dict().items()}
    trained(model, model.seed_adapter(3, seed=0)[0])
    after = {name.replace("base_layer.", ""): t for name, t in model.network.state_dict().items()}
    for name in ("0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "1.weight"):
        assert torch.equal(after[f"base_model.model.{name}"], before[name]), name


def test_a_buffer_that_training_moves_is_refused() -> None:
    class Counting(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)  # type: ignore[operator]
            return super().forward(x)

    model = LoRAModule(seeded(Counting), ["first"], heads=["head"])
    with pytest.raises(ConfigError, match="changed the buffer 'seen'"):
        trained(model, model.seed_adapter(3, seed=0)[0])


def test_a_layer_whose_weight_is_read_past_lora_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Past(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(nn.functional.linear(x, self.first.weight))
            return out

    model = LoRAModule(seeded(Past), ["first"], heads=["head"])
    with caplog.at_level(logging.WARNING, "fedlora.training.modules"):
        trained(model, model.seed_adapter(3, seed=0)[0])
    assert "the LoRA of 'first'" in caplog.text


@pytest.mark.parametrize(
    ("targets", "heads", "says"),
    [
        (
            ["q"],
            ["head"],
            "'q' (lora.targets of a run)",
        ),
        (["first"], ["classifier"], "top-level modules are ['first', 'drop', 'head']"),
        (["first", "head"], ["head"], "'head' is in targets"),
        (["drop"], [], "'drop', a Dropout"),
        ("((", [], "'((' must be a regular expression"),
        (r"layer\d", [], "matches no module"),
        ([], [], "at least one target"),
        ("all-linear", ["first", "head"], "'all-linear' matches only heads"),
    ],
)
def test_wrong_names_are_told_at_once(targets: Any, heads: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LoRAModule(Tiny(), targets, heads=heads)
    assert says in str(refused.value)


def test_what_cannot_be_adapted_or_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inside nn\.MultiheadAttention"):
        LoRAModule(nn.TransformerEncoderLayer(4, 2, 8), ["out_proj"])
    with pytest.raises(ConfigError, match="num_batches_tracked"):
        LoRAModule(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), ["0"], heads=["1"])


def test_a_regular_expression_means_whole_paths() -> None:
    assert LoRAModule(seeded(Tiny), "fir.*").targets == ("first",)
    assert LoRAModule(seeded(Tiny), "all-linear", heads=["head"]).targets == ("first",)


def test_a_loss_that_cannot_be_trained_on_is_told() -> None:
    """It stops the run, with or without a quorum: no client can do better. An exception is the client's failure, and
    the server refuses the upload of a model that diverged."""
    model, server = tiny(), Server(build("fedit"), round=Kept(quorum=1))
    state = start(server, model.seed_adapter(3, seed=0)[0])

    def played(wrong: Any, server: Server = server) -> None:
        next(simulate(server, CLIENTS, ModuleTrainer(model, examples(), wrong, SGD, seed=0), state, rounds=1))

    wrong: dict[str, Any] = {
        r"got a tensor of shape \(6, 2\)": lambda network, batch: network(batch[0]),
        r"of one number; got 0\.": lambda network, batch: loss(network, batch).item(),
        "got None": lambda network, batch: None,
        "has no gradient": lambda network, batch: loss(network, batch).detach(),
        r"torch\.int64": lambda network, batch: torch.tensor(1),
    }
    for says, function in wrong.items():
        with pytest.raises(ConfigError, match=says):
            played(function)
    strict = Server(build("fedit"))
    with pytest.raises(ClientFailed, match=r"'a'.*TypeError"):
        played(lambda network, batch: batch["x"], strict)
    with pytest.raises(UploadRefused, match="NaN or Inf"):
        played(lambda network, batch: loss(network, batch) * math.nan, strict)


def test_a_measure_that_gives_no_numbers_is_told() -> None:
    server, model, trainer, _, state = federation("fedit")
    for found, says in (
        (0.5, r"got 0\.5 of type float"),
        ({}, "got {} of type dict"),
        ({"accuracy": torch.ones(2)}, "a metric is one number"),
        ({"accuracy": "good"}, "a metric is one number"),
    ):
        evaluator = ModuleEvaluator(model, lambda network, found=found: found)  # type: ignore[misc]
        with pytest.raises(ConfigError, match=says):
            next(simulate(server, CLIENTS, trainer, state, rounds=1, evaluator=evaluator))


def test_each_client_is_measured_by_its_own_measure() -> None:
    server, model, trainer, _, state = federation("fedit")
    own = {"b": lambda network: {"score": 4.0}}
    evaluator = ModuleEvaluator(model, lambda network: {"score": 1.0}, CLIENTS, target="clients", own=own)
    record = next(simulate(server, CLIENTS, trainer, state, rounds=1, evaluator=evaluator))
    assert record.metrics == {"score": 2.0, "client/a/score": 1.0, "client/b/score": 4.0, "client/c/score": 1.0}


def test_contradictions_of_an_evaluator_are_told() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "'server' or 'clients'": {"target": "both"},
        "hand in the clients": {"target": "clients"},
        "target='server' uses none": {"own": {"a": None}},
        "'z'": {"own": {"z": None}, "target": "clients", "clients": CLIENTS},
    }
    for says, options in wrong.items():
        with pytest.raises(ConfigError, match=says):
            ModuleEvaluator(tiny(), lambda network: {}, **options)


def test_settings_of_text_are_not_ignored() -> None:
    with pytest.raises(ConfigError, match=r"TrainSettings\.max_length is for text"):
        ModuleTrainer(tiny(), examples(), loss, TrainSettings(max_length=64), seed=0)


def test_batches_of_any_shape_reach_the_loss() -> None:
    """Dicts through torch's default collate; and a collate of one's own."""
    model = tiny()
    rows = [{"x": x, "y": y} for x, y in examples()["a"]]
    adapter = some_adapter(model)
    server = Server(build("fedit"))
    download = server.download(server.init(adapter), Client("a", 3))
    plain = trained(model, adapter)
    named = ModuleTrainer(model, {"a": rows}, lambda n, b: loss(n, (b["x"], b["y"])), SGD, seed=0)
    own = ModuleTrainer(
        model, {"a": rows}, loss, SGD, seed=0,
        collate=lambda part: [torch.stack([row[key] for row in part]) for key in ("x", "y")],
    )  # fmt: skip
    for trainer in (named, own):
        got = trainer.train(download, adapter, 0)
        assert all(
            torch.equal(a, b)
            for (_, a), (_, b) in zip(named_tensors(got.adapter), named_tensors(plain.adapter), strict=True)
        )


class Tied(nn.Module):
    """Two layers of one weight, as a language model's output layer and its embedding: x (n, 5) -> (n, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def test_a_client_without_examples_and_one_without_a_name_are_told_apart() -> None:
    model = tiny()
    adapter, _ = model.seed_adapter(3, seed=0)
    with pytest.raises(ConfigError, match=r"'a' has no training data: "):
        trained(model, adapter, a=[], b=[1])
    with pytest.raises(ConfigError, match=r"'a' has no training data; .*\['b', 'c'\]\.$"):
        trained(model, adapter, b=[1], c=[1])
    with pytest.raises(ConfigError, match=r"for \['b', 'c', 'd', 'e', 'f'\] and 1 more\.$"):
        trained(model, adapter, **{name: [1] for name in "bcdefg"})


@pytest.mark.parametrize("targets", [["first"], ["second"], ["first", "second"]])
def test_an_update_of_a_layer_stays_on_it_where_another_has_the_same_weight(targets: list[str]) -> None:
    """Added to the base it is the same function as an adapter on that layer, which peft computes beside the weight; and
    both weights are one again when it is taken off."""
    model = LoRAModule(seeded(Tied, torch.float64), targets, heads=["head"])
    adapter = some_adapter(model)
    nothing = Adapter({name: LoRA(lora.B * 0, lora.A) for name, lora in adapter.modules.items()}, adapter.heads)
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    def output(adapter: Adapter) -> Tensor:
        model.activate(adapter)
        with torch.no_grad():
            return model.network(x)

    plain, wanted = output(nothing), output(adapter)
    assert (plain - wanted).abs().max() > 1e-3
    torch.testing.assert_close(output(replace(nothing, base=adapter.modules)), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(output(nothing), plain)
    assert model.network.first.weight is model.network.second.weight  # type: ignore[union-attr]
