"""Data of the library `datasets`: its objects, its Parquet files, and models of the hub; no network.

Kinds of evidence: *oracle* (by hand), *contract* (bad input is one line).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlora.data import TextData, read_classification
from fedlora.data.demo import model_location
from fedlora.data.hub import model_snapshot
from fedlora.errors import DataError
from support.local_hub import serving

NAMES = ["world", " sports ", "business"]
NAMED = TextData("classification", ("a", "b"), labels=(2, 1), label_names=tuple(NAMES))


def news(*labels: int, **columns: list[Any]) -> Any:
    datasets = pytest.importorskip("datasets")
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)}
    features |= {name: datasets.Value("string") for name in columns}
    rows = {"text": list("abcd"[: len(labels)]), "label": list(labels), **columns}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.mark.parametrize("form", ["torch", "parquet"])
def test_a_class_label_brings_its_names_and_goes_by_them(form: str, tmp_path: Path) -> None:
    """In their own order, blanks at the edge included; among other names by name; never by index through others."""

    def read(*labels: int, names: tuple[str, ...] | None = None) -> TextData:
        source, rows = tmp_path / "news.parquet", news(*labels)
        rows.to_parquet(source)
        source = source if form == "parquet" else rows.with_format("torch")
        return read_classification(source, text="text", label="label", label_names=names)

    assert read(2, 1) == NAMED
    assert read(2, 1, names=("business", " sports ", "science", "world")).labels == (0, 1)
    with pytest.raises(DataError, match=r"row 1.*'business'.*'x', 'y', 'z'"):
        read(2, 1, names=("x", "y", "z"))
    with pytest.raises(DataError, match=r"row 2: 'label' is -1.*unlabelled"):
        read(2, -1)


def test_an_empty_cell_a_dictionary_of_splits_and_a_stream() -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(DataError, match="row 2: 'more' is empty"):
        read_classification(news(0, 1, more=["x", None]), text="more", label="label")
    with pytest.raises(DataError, match=r"is a DatasetDict, .*one split"):
        read_classification(datasets.DatasetDict({"train": news(0)}), text="text", label="label")
    with pytest.raises(DataError, match="without streaming=True"):
        read_classification(news(0).to_iterable_dataset(), text="text", label="label")


def test_a_model_is_fetched_in_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own weights only where there are no safetensors. A hub on this machine; its files are what is there."""
    forms = {"a/both": ["config.json", "model.safetensors", "pytorch_model.bin"], "a/old": ["pytorch_model.bin"]}
    for name, files in forms.items():
        (tmp_path / name).mkdir(parents=True)
        for file in files:
            (tmp_path / name / file).write_text("{}")
    with serving({name: tmp_path / name for name in forms}, tmp_path / "home", monkeypatch):
        found = {name: {file.name for file in model_snapshot(name, None).iterdir()} for name in forms}
        assert model_location("a/old@main") == model_snapshot("a/old", "main")
    assert found == {"a/both": {"config.json", "model.safetensors"}, "a/old": {"pytorch_model.bin"}}
