"""Classes and scores by name, on the screen and in the card. Kinds: contract; end-to-end on the fixture `finished`."""

from __future__ import annotations

import support.command_line  # noqa: F401 - first, for it expects what typer's import warns of

# isort: split
from fedlora.cli.measures import (
    byte_size,
    label_cell,
    label_title,
    megabytes,
    number,
    other_scores,
    worst_client,
)
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import Finished

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

SCORES = {"accuracy": 0.5, "macro_f1": 0.25, "loss": None, "worst": 0.1}


def test_classes_stand_in_the_title_and_counts_in_its_order() -> None:
    """A class above the largest that occurs has no column in the counts: it has none of the examples either."""
    assert label_title(["news", "sport", "[bold]"]) == "news / sport / [bold]"
    assert label_cell([48, 96], ["news", "sport", "film"]) == "48 / 96 / 0"
    names = [f"c{k}" for k in range(20)]
    assert label_title(names) == "by label"
    assert label_cell([0, 3, 0, 9], names) == "2 of 20 classes, most: c3 9, c1 3"


def test_bytes_in_a_unit_that_shows_them() -> None:
    shown = [byte_size(n) for n in (0, 999, 30_161, 999_940, 1_500_000)]
    assert shown == ["0 bytes", "999 bytes", "30.2 KB", "999.9 KB", "1.5 MB"]


def test_a_small_models_megabytes_are_not_nothing() -> None:
    """Written by hand: one digit from 1 MB on, three below it."""
    assert [megabytes(n) for n in (0, 23_400, 999_000, 1_000_000, 14_123_000)] == [
        "0.000",
        "0.023",
        "0.999",
        "1.0",
        "14.1",
    ]


def test_scores_in_words_and_what_is_no_number() -> None:
    assert other_scores(SCORES, "accuracy") == "macro f1 0.250, loss no number"
    assert number(None) == "no number"
    each = {"x": {"loss": 0.5, "accuracy": 0.5}, "y": {"loss": 0.75, "accuracy": 0.75}}
    assert worst_client(each, "accuracy") == "x, 0.500" and worst_client(each, "loss") == "y, 0.750"


def test_a_run_shows_its_classes_by_name(finished: Finished) -> None:
    """Screen, summary and card agree."""
    s = finished.folder.read_json("summary.json")
    assert s["classes"] == ["blue", "green", "red"]
    assert "blue" in finished.out and "macro f1" in finished.out
    card = (finished.folder.path / "adapter" / "README.md").read_text()
    assert f"macro_f1 {s['test']['last']['macro_f1']:.4f}" in card
    counts = finished.folder.read_json("manifest.json")["data"]["label_counts"].values()
    trained = [sum(row[k] for row in counts) for k in range(3)]
    assert f"| training examples by class | blue {trained[0]}, green {trained[1]}, red {trained[2]} |" in card
