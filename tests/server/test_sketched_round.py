"""Rounds by the two exchanges of sums, through the engine.

Kind of evidence: oracle (a sketch as wide as the matrix loses nothing, so it is plain GLoRA; dense means), contract
(what travels, what the server holds, who is refused), property (the bits after a resume).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, Download, LoRA, Server, Upload, build
from fedlora.core import checkpoint
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.server.server import start
from fedlora.server.sketched_round import Sketch, first_messages, second_messages
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord, simulate
from support.command_line import Said
from support.federations import EQUAL, EXAMPLES, HEADS, MIXED, SHAPES, noise, pushed, seed_adapter

WIDE = Sketch(rank=30, oversample=0)  # as wide as the largest d_out of SHAPES: nothing is left out


class Toy:
    """Trains by a push that depends on client and round alone; `ill` diverges."""

    def __init__(self, ill: str | None = None) -> None:
        self._ill = ill

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        client = download.client.id
        moved = pushed(adapter, client, download.round)
        if client == self._ill:
            moved = moved.map(lambda t: t * torch.nan)
        return Trained(moved, EXAMPLES[client], 1.0, position + 1)


def run(
    sketch: Sketch | None, ranks: Mapping[str, int] = MIXED, *, rounds: int = 2, ill: str | None = None,
    state: RunState | None = None, **server: Any,
) -> tuple[Server, Iterator[RoundRecord]]:  # fmt: skip
    s = Server(build("glora"), sketch=sketch, **server)
    state = state or start(s, seed_adapter(max(ranks.values()), torch.float32))
    clients = [Client(name, rank) for name, rank in ranks.items()]
    return s, simulate(s, clients, Toy(ill), state, rounds=rounds)


def update(s: Server, record: RoundRecord, module: str) -> Tensor:
    return s.global_update(record.state.server)[module].map(Tensor.double).delta()


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_sketch_that_leaves_nothing_out_is_plain_glora(weighting: str) -> None:
    """One round: the update, and the mean of the heads; the next downloads are of the asked ranks."""
    s, sketched = run(WIDE, weighting=weighting, rounds=1)
    plain, whole = run(None, weighting=weighting, rounds=1)
    (got,), (want,) = list(sketched), list(whole)
    for module in SHAPES:
        a, b = update(s, got, module), update(plain, want, module)
        assert float(torch.linalg.matrix_norm(a - b) / torch.linalg.matrix_norm(b)) < 2e-6
        facts = s.diagnostics(got.state.server)[module]
        assert facts["approximation"] == "two-pass sketch"
        assert facts["kept"] == pytest.approx(1.0, abs=1e-5)
    for name in HEADS:
        assert torch.allclose(got.state.server.heads[name], want.state.server.heads[name], atol=1e-6)
    for name, rank in MIXED.items():
        assert set(s.download(got.state.server, Client(name, rank)).adapter.ranks.values()) == {rank}
    assert (got.weights, got.uploads) == ({}, ())


def test_what_travels() -> None:
    """By hand: Y and Z at the sketch's width and the small ones up, the readout and Q down; heads as float64 sums."""
    sketch = Sketch(rank=4, oversample=2, least_captured=0.0, most_error=1.0)
    _, records = run(sketch, EQUAL, rounds=1)
    (record,) = records
    r, width, clients = next(iter(EQUAL.values())), 6, len(EQUAL)
    up = sum(4 * width * (d_out + d_in) + 8 * width**2 + 8 * (2 + 5) for d_out, d_in in SHAPES.values())
    down = sum(4 * r * (d_out + d_in) + 4 * width * d_out for d_out, d_in in SHAPES.values())
    heads = sum(torch.Size(shape).numel() for shape in HEADS.values())
    assert (record.bytes.up_adapter, record.bytes.down_adapter) == (clients * up, clients * down)
    assert (record.bytes.up_heads, record.bytes.down_heads) == (clients * heads * 8, clients * heads * 4)


def test_the_server_holds_as_much_for_many_as_for_few() -> None:
    s = Server(build("glora"))
    state = s.init(seed_adapter(4, torch.float32))
    held = []
    for count in (2, 40):
        sketch = Sketch(rank=4, least_captured=0.0, most_error=1.0)
        opened = Server(build("glora"), sketch=sketch).open(state)
        ups = [Upload(Client(f"c{k}", 4), 1, pushed(seed_adapter(4, torch.float32), f"c{k}", 0)) for k in range(count)]
        for upload in ups:
            opened.add(first_messages(upload, opened.plans, 1.0))
        bases = opened.bases()
        for upload in ups:
            opened.add(second_messages(upload, bases, opened.plans, 1.0))
        held.append(opened.held)
        opened.close()
    assert held[0] == held[1] < 200_000


def test_who_is_gone_by_the_second_exchange_is_missing_from_that_one_alone() -> None:
    """The mean is over those who stayed; dense, by a sketch as wide as the matrix."""
    s = Server(build("glora"))
    state = s.init(seed_adapter(4, torch.float32))
    opened = Server(build("glora"), sketch=WIDE).open(state)
    ups = [Upload(Client(f"c{k}", 4), 1, pushed(seed_adapter(4, torch.float32), f"c{k}", 0)) for k in range(5)]
    for upload in ups:
        opened.add(first_messages(upload, opened.plans, 2.0))
    bases = opened.bases()
    for upload in ups[:3]:
        opened.add(second_messages(upload, bases, opened.plans, 2.0))
    after = opened.close()
    for module in SHAPES:
        want = sum(u.adapter.modules[module].map(Tensor.double).delta() for u in ups[:3]) / 3
        got = s.global_update(after)[module].map(Tensor.double).delta()
        assert float(torch.linalg.matrix_norm(got - want) / torch.linalg.matrix_norm(want)) < 2e-6


def test_a_client_checks_itself() -> None:
    """NaN never reaches a sum: the round goes on without it where there is a quorum, and stops where there is none."""
    _, records = run(WIDE, rounds=1, ill="b", quorum=2)
    (record,) = records
    assert "NaN" in record.refused["b"]
    _, records = run(WIDE, rounds=1, ill="b")
    with pytest.raises(UploadRefused, match="NaN"):
        list(records)
    _, records = run(WIDE, rounds=1, ill="b", quorum=len(MIXED))
    with pytest.raises(QuorumNotMet, match=f"the quorum is {len(MIXED)}"):
        list(records)


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    sketch = Sketch(rank=6, oversample=4, least_captured=0.0, most_error=1.0)
    s, whole = run(sketch, rounds=3)
    states = [record.state for record in whole]
    checkpoint.save(tmp_path / "a", 1, states[0])
    loaded = checkpoint.load_newest(tmp_path / "a", RunState, s.method.State)
    assert loaded is not None
    _, rest = run(sketch, rounds=3, state=loaded[1])
    last = list(rest)[-1].state
    names = [checkpoint.save(tmp_path / x, 3, state).name for x, state in (("b", states[-1]), ("c", last))]
    assert names[0] == names[1]


def test_a_module_that_a_client_lacks_is_averaged_over_its_holders() -> None:
    s = Server(build("glora"))
    state = s.init(seed_adapter(4, torch.float32))
    name, (d_out, d_in) = next(iter(SHAPES.items()))
    opened = Server(build("glora"), sketch=WIDE).open(state)
    full = pushed(seed_adapter(4, torch.float32), "x", 0)
    only = Adapter({name: LoRA(noise((d_out, 4), "B").float(), noise((4, d_in), "A").float())}, full.heads)
    ups = [Upload(Client("x", 4), 1, full), Upload(Client("y", {name: 4}), 1, only)]
    for upload in ups:
        opened.add(first_messages(upload, opened.plans, 1.0))
    bases = opened.bases()
    for upload in ups:
        opened.add(second_messages(upload, bases, opened.plans, 1.0))
    got = s.global_update(opened.close())
    for module in SHAPES:
        holders = [u.adapter.modules[module].map(Tensor.double).delta() for u in ups if module in u.adapter.modules]
        want = sum(holders) / len(holders)
        assert float(torch.linalg.matrix_norm(got[module].map(Tensor.double).delta() - want) / want.norm()) < 2e-6


def test_what_cannot_be_sketched_says_so() -> None:
    for method, options, match in (
        ("fedit", {}, "fedit cannot"),
        ("glora", {"missing": "zero"}, "renormalises"),
        ("glora", {"memory": 100.0}, "renormalises"),
    ):
        with pytest.raises(HyperparameterError, match=match):
            Server(build(method), sketch=WIDE, **options)  # type: ignore[arg-type]
    server = Server(build("glora"), sketch=WIDE)
    with pytest.raises(QuorumNotMet, match="nobody took part"):
        server.open(server.init(seed_adapter(4, torch.float32))).bases()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ from the command line


@pytest.mark.parametrize(
    "sets", [("server.sketch_rank=4", "server.sketch_oversample=2"), ("server.memory=0.02",)], ids=str
)
def test_a_run_of_a_real_model_by_sketch_or_in_little_memory(
    sets: tuple[str, ...], project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """From the configuration to the folder, its plots and summary: nothing there needs uploads or union ranks."""
    out = tmp_path / "run"
    said = main(
        "run", project / "config.toml", "--out", out, *(x for s in (*sets, "run.rounds=2") for x in ("--set", s))
    )
    assert said.code == 0, said.err
    facts = json.loads((out / "summary.json").read_text())["diagnostics"]
    assert {f["approximation"] for f in facts.values()} <= {"two-pass sketch", "incremental", None}
    assert (out / "plots" / "spectrum.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("server.sketch_rank=4", "run.keep_uploads=all"), "sketch_rank keeps none"),
        (("server.memory=10", "run.keep_uploads=all"), "server.memory keeps none"),
        (("server.sketch_rank=4", "method.name=flexlora"), "flexlora cannot"),
        (("server.sketch_rank=4", "server.missing=zero"), "renormalises"),
        (("server.sketch_rank=4", "method.weighting=uniform"), "leave out weighting"),
        (("server.sketch_rank=4", "method.rho=0.5", "method.basis=energy"), "leave out rho=0.5, basis=energy"),
        (("server.memory=10", "method.weighting=rank-partition"), "all uploads at once"),
        (("server.memory=10", "method.name=flexlora"), "flexlora cannot"),
        (("server.memory=0.001",), "leave room for"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_one_line(
    sets: tuple[str, ...], why: str, project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    said = main("run", project / "config.toml", "--out", tmp_path / "run", *(x for s in sets for x in ("--set", s)))
    assert said.code == 2
    assert why in said.err
    assert not (tmp_path / "run").exists()
