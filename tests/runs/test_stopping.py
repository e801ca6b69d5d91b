"""Early stopping, and the direction of the metric, in whole runs. Tiny transformers, no network.

Kinds of evidence: *oracle* (score sequences by hand), *end-to-end* (a run that stops early, killed and resumed; the
reference is the one that was never stopped).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from fedlora.runs.stopping import Patience, Ranking
from support.projects import configured, ran, same_run

# No answer changes at this rate: round 1 is best, and rounds 2 and 3 are the two that are not better.
FLAT = (
    "run.rounds=8", "train.learning_rate=1e-12", "train.max_steps=2", "evaluate.early_stopping_patience=2",
    "run.keep_uploads=last",
    "run.checkpoint_every=5", "run.report_to=['tensorboard']",
)  # fmt: skip


def rounds_of(*scores: float | None) -> list[dict[str, Any]]:
    """A run's lines."""
    return [{"round": k, "metrics": {"accuracy": s, "loss": s}} for k, s in enumerate(scores, start=1)]


# ---- by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "metric", "patience", "stops"),
    [
        ((0.5, 0.6, 0.6, 0.6), "accuracy", Patience(2), 4),  # as good is not better
        ((0.5, 0.6, 0.5, 0.7, 0.6, 0.5), "accuracy", Patience(2), 6),  # the count starts again at a better one
        ((0.5, 0.6, 0.5, 0.7), "accuracy", Patience(2), None),
        ((0.5, 0.4, 0.3, 0.3), "loss", Patience(1), 4),  # a loss falls
        ((0.5, 0.4, 0.3), "loss", Patience(1), None),
        ((0.50, 0.51, 0.52, 0.53), "accuracy", Patience(2, 0.015), None),  # 0.52 is better than 0.50 by more
        ((0.50, 0.51, 0.52, 0.53), "accuracy", Patience(2, 0.05), 3),
        ((None, None), "loss", Patience(2), 2),  # NaN: diverged from the start
        ((0.5, None, None), "loss", Patience(2), 3),
    ],
)
def test_when_a_run_stops(scores: tuple[float | None, ...], metric: str, patience: Patience, stops: int | None) -> None:
    found = Ranking(metric).stop(rounds_of(*scores), 100, patience)
    assert (found["round"] if found else None) == stops


def test_rounds_without_evaluation_do_not_count_and_the_last_round_is_no_early_one() -> None:
    lines: list[dict[str, Any]] = []
    for line in rounds_of(0.5, 0.4, 0.4):
        lines += [{"round": 2 * line["round"] - 1, "metrics": {}}, {**line, "round": 2 * line["round"]}]
    found = Ranking("accuracy").stop(lines, 8, Patience(2))
    assert found is not None
    assert (found["round"], found["of"], found["best_round"], found["best"]) == (6, 8, 2, 0.5)
    assert re.search("2 evaluations on validation .*accuracy than round 2's", found["why"])
    assert Ranking("accuracy").stop(lines, 6, Patience(2)) is None
    between = rounds_of(0.5, 0.4, 0.6, 0.55)  # every second round counts; the others were a shorter run's last
    assert Ranking("accuracy").stop(between, 100, Patience(1, every=2)) is None


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return ran(configured(project, *FLAT), tmp_path_factory.mktemp("stopped") / "run")


def test_the_round_that_it_stops_with_is_the_last_in_every_respect(stopped: RunFolder) -> None:
    """Uploads, gauge check and checkpoint of round 3, though checkpoints are every fifth round and rounds are 8."""
    s, lines = stopped.read_json("summary.json"), stopped.metrics()
    assert [line["round"] for line in lines] == [1, 2, 3] and s["rounds"] == 3 and s["best_round"] == 1
    why = s["stopped_early"].pop("why")
    assert s["stopped_early"] == {"round": 3, "of": 8, "best_round": 1, "best": lines[0]["metrics"]["accuracy"]}
    assert re.search("2 evaluations on validation .*accuracy than round 1's", why)
    assert [path.name for path in (stopped.path / "uploads").iterdir()] == ["round-00003"]
    assert [line["gauge_drift"] is None for line in lines] == [True, True, False]
    assert [p.name[:11] for p in stopped.checkpoints.glob("*.safetensors")] == ["round-00003"]
    assert (stopped.path / "adapter").exists() and s["test"]["last"]["accuracy"] > 0


@pytest.mark.parametrize("rounds", [2, 3])
def test_stopped_by_hand_before_it_stops_by_itself_it_is_the_same_run(
    stopped: RunFolder, project: Path, tmp_path: Path, rounds: int
) -> None:
    """After round 3 only the results are missing; after round 2 there is no checkpoint yet."""
    folder = ran(configured(project, *FLAT), tmp_path / "run", rounds)
    assert not folder.finished()
    same_run(ran(configured(project, *FLAT), folder.path, resume=True), stopped)


def test_what_cannot_be_measured_is_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"patience = 2 .*data\.validation = 0"):
        prepare(configured(project, "evaluate.early_stopping_patience=2", "data.validation=0"))
    with pytest.raises(ConfigError, match=r"'rouge-l' is for generated text.*accuracy, macro-f1"):
        prepare(configured(project, "evaluate.metric=rouge-l"))
