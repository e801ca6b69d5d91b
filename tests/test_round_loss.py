"""What "the loss of a round" is, wherever one number stands for it: the mean over the clients that count, weighted by
their examples. Kind of evidence: *by hand* (three clients of unequal losses and examples).

The mean by hand is (10 * 0.25 + 50 * 1.0 + 40 * 0.5) / 100 = 0.725. No other reading gives it: the plain mean is 0.583,
the last client's 0.5, the middle one 0.5.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlora import Adapter, Download, Kept, Server, build
from fedlora.core.messages import Client
from fedlora.core.trainer import Trained, round_loss
from fedlora.server.server import start
from fedlora.simulation import RoundRecord, simulate
from support import flower_grid
from support.federations import seed_adapter

LOSSES, EXAMPLES = {"one": 0.25, "two": 1.0, "three": 0.5}, {"one": 10, "two": 50, "three": 40}
MEAN = 0.725


class Told(flower_grid.Toy):
    """A trainer whose losses and examples are those above; a fourth client's upload is refused, whatever its loss."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        name = download.client.id
        done = super().train(download, adapter, position)
        if name == "ill":
            bad = done.adapter.map(lambda t: t * float("nan"))
            return replace(done, adapter=bad, num_examples=500, loss=9.0)
        return replace(done, num_examples=EXAMPLES[name], loss=LOSSES[name])


@pytest.fixture(scope="module")
def record() -> RoundRecord:
    server = Server(build("glora"), round=Kept(weighting="uniform", quorum=1))
    clients = [Client(name, 2) for name in (*EXAMPLES, "ill")]
    return next(simulate(server, clients, Told(), start(server, seed_adapter(2)), rounds=1))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any, list[str]]:
    """Of a federation on Flower: its folder, the round's line, Flower's result and what the log said."""
    from fedlora.flower.server import journal as module

    folder = tmp_path_factory.mktemp("flower")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.log, "info", lambda words, *a, **_: said.append(words % a))
        ranks = dict.fromkeys((*EXAMPLES, "ill"), 2)
        server = Server(build("glora"), round=Kept(weighting="uniform", quorum=1))
        strategy, grid = flower_grid.federation(folder, server, ranks, trainer=Told())
        result = flower_grid.play(strategy, grid, 1)
    [line] = strategy.journal.lines()
    return folder / "server", line, result, said


def test_the_mean_is_by_examples_and_over_those_that_count() -> None:
    assert round_loss({**LOSSES, "ill": 9.0}, EXAMPLES) == MEAN
    assert round_loss({"a": 1.0, "abstained": float("nan")}, {"a": 5.0, "abstained": 0.0}) == 1.0
    assert round_loss({}, {"a": 1.0}) is None and round_loss({"a": 1.0}, {"a": 0.0}) is None
    assert str(round_loss({"a": 1.0, "b": float("nan")}, {"a": 1, "b": 1})) == "nan"  # none is left out in silence


def test_in_the_engine_its_line_and_its_trackers(record: RoundRecord) -> None:
    from fedlora.runs.storing import describe
    from fedlora.runs.tracking import numbers

    assert record.refused.keys() == {"ill"} and record.losses["ill"] == 9.0
    line = describe(record)
    assert [record.loss, line["loss"], numbers(line)["loss"]] == [MEAN] * 3


def test_on_flower(played: tuple[Path, dict[str, Any], Any, list[str]]) -> None:
    """rounds.jsonl, what trackers get, Flower's own result, serve's line, the log."""
    from fedlora.flower.server.journal import round_line
    from fedlora.runs import tracking

    _, line, result, said = played
    assert line["fates"]["ill"]["fate"] == "refused" and line["losses"] == LOSSES
    assert {
        "rounds.jsonl": line["loss"],
        "tracker": tracking.numbers(line)["loss"],
        "Flower": result.train_metrics_clientapp[1]["train_loss"],
    } == dict.fromkeys(("rounds.jsonl", "tracker", "Flower"), MEAN)
    assert "  loss 0.725  " in round_line(line)
    assert round_line(line) in said, said
