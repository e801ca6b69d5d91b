"""Files that older code wrote are still good: states of every method, federations on Flower, rounds by hand, runs.

Kind of evidence: contract. `older/` holds what fedlora wrote at commit 0f7645a (its README says how). What is loaded is
compared with the file's own tensors, bit for bit; what is played on from it, with what that code played. Bits of
played rounds are those of one machine's BLAS, so against the old result there is a tolerance, and bit for bit the
trajectory is compared with the one that starts from the same state stored again by today's code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedlora import METHODS, Server, build
from fedlora.core import checkpoint
from fedlora.core.checkpoint import _encode
from fedlora.flower.rounds.strategy import FlowerState
from fedlora.runs.config import load_config
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from fedlora.server.state import RunState
from fedlora.simulation import simulate
from support.command_line import Said
from support.federations import EQUAL, MIXED
from support.flower_grid import federation
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.toy_trainer import Toy, clients

OLDER = Path(__file__).parent / "older"
STATES = sorted(path.name for path in (OLDER / "states").iterdir())
HPARAMS: dict[str, dict[str, Any]] = {
    "hetlora-pruning": {"pruning": True},
    "glora-history": {"history_lag": 1, "rank": 5},
}


def server_of(label: str) -> Server:
    return Server(build(label if label in METHODS else label.partition("-")[0], **HPARAMS.get(label, {})))


def tensors_of(value: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    _encode(value, "", found)
    return found


def loaded(folder: Path, kind: type, *extra: type, upto: int | None = None) -> Any:
    found = checkpoint.load_newest(folder, kind, *extra, upto=upto)
    assert found is not None
    return found[1]


def file_of(folder: Path, round: int) -> Path:
    (path,) = folder.glob(f"round-{round:05d}.*.safetensors")
    return path


@pytest.mark.parametrize("label", STATES)
def test_a_state_of_every_method_is_loaded_bit_for_bit(label: str) -> None:
    """Every tensor of the file is in the value, at its place, and nothing else is."""
    folder = OLDER / "states" / label
    state = loaded(folder, RunState, server_of(label).method.State, upto=2)
    want, got = load_file(file_of(folder, 2)), tensors_of(state)
    assert set(got) == set(want)
    assert all(torch.equal(got[path], want[path]) for path in want)
    assert state.round == state.server.round == 2


@pytest.mark.parametrize("label", STATES)
def test_a_run_goes_on_from_it_with_the_same_bits(label: str, tmp_path: Path) -> None:
    """Round 3 from the old file, from the same state stored anew, and as the old code played it."""
    server, name = server_of(label), label.partition("-")[0] if label not in METHODS else label
    ranks = MIXED if name in ("glora", "flexlora", "flora", "svd", "hetlora") else EQUAL
    state = loaded(OLDER / "states" / label, RunState, server.method.State, upto=2)
    checkpoint.save(tmp_path, 2, state)
    anew = loaded(tmp_path, RunState, server.method.State)
    ends = []
    for begin in (state, anew):
        (record,) = simulate(server, clients(ranks), Toy(), begin, rounds=3, participation=0.75, seed=4)
        ends.append(tensors_of(record.state))
    assert set(ends[0]) == set(ends[1])
    assert all(torch.equal(ends[0][path], ends[1][path]) for path in ends[0])
    want = load_file(file_of(OLDER / "states" / label, 3))
    assert set(ends[0]) == set(want)
    for path, tensor in want.items():
        torch.testing.assert_close(ends[0][path], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, at=path: f"{at}: {m}")


@pytest.mark.parametrize("method", ["fedex-lora", "fedsa-lora"])
def test_a_federation_on_flower_goes_on(method: str, tmp_path: Path) -> None:
    """Server and nodes from their old folders, against three rounds without a stop."""
    ranks = dict.fromkeys(("one", "two", "three"), 3)
    shutil.copytree(OLDER / "flower" / method, tmp_path / "old")
    strategy, grid = federation(tmp_path / "old", Server(build(method)), ranks, resume=True)
    assert strategy.round == 2
    strategy.start(grid, num_rounds=3)
    assert not strategy.refused
    whole, other = federation(tmp_path / "new", Server(build(method)), ranks)
    whole.start(other, num_rounds=3)
    got, want = tensors_of(strategy.memory.state.server), tensors_of(whole.memory.state.server)
    assert set(got) == set(want)
    for path, tensor in want.items():
        torch.testing.assert_close(got[path], tensor, rtol=1e-4, atol=1e-5)
    assert isinstance(strategy.memory, FlowerState)


def test_rounds_by_hand_go_on(tmp_path: Path, main: Callable[..., Said]) -> None:
    """The second round on the state after the first is what the old code made of it."""
    shutil.copytree(OLDER / "by_hand" / "state-before", tmp_path / "state")
    folders = [OLDER / "by_hand" / "uploads" / name for name in ("a", "b")]
    done = main("merge", *folders, "--weights-from", "num_examples", "--method", "glora", "--state",
                  tmp_path / "state", "--readout", "same", "-o", tmp_path / "out")  # fmt: skip
    assert done.code == 0, done.err
    got, want = (load_file(file_of(f, 2)) for f in (tmp_path / "state", OLDER / "by_hand" / "state"))
    assert set(got) == set(want)
    for path, tensor in want.items():
        torch.testing.assert_close(got[path], tensor, rtol=1e-4, atol=1e-6)


@FUTURE_NAMES
@NOT_ON_THE_HUB
def test_a_run_folder_is_resumed(tmp_path: Path) -> None:
    """Stopped by the old code after two of four rounds; its end is that of the old code, and so are its lines."""
    shutil.copytree(OLDER / "run" / "stopped", tmp_path / "run")
    sets = json.loads((OLDER / "run" / "sets.json").read_text())
    config = load_config(OLDER / "run" / "config.toml", [*sets, "train.accumulation=1"])  # as the default was
    folder = RunFolder(tmp_path / "run")
    assert [record.round for record in execute(prepare(config), folder, resume=True)] == [3, 4]
    old = [json.loads(line) for line in (OLDER / "run" / "finished" / "metrics.jsonl").read_text().splitlines()]
    for got, want in zip(folder.metrics(), old, strict=True):
        assert set(got) - {"loss"} == set(want)  # of the round, which old lines lack
        assert got["bytes"] == want["bytes"] and got["weights"] == want["weights"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-3)
    final = loaded(folder.checkpoints, RunState, METHODS["glora"].State)
    want = load_file(file_of(OLDER / "run" / "finished", 4))
    got = tensors_of(final)
    assert set(got) == set(want)
    sizes = [path for path in want if path.endswith("/spectrum/s")]
    assert len(sizes) == 1  # of the one adapted module
    torch.testing.assert_close(got[sizes[0]], want[sizes[0]], rtol=1e-3, atol=1e-6)
