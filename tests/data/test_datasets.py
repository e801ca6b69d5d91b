"""Data of the library `datasets`: its objects, its Parquet files, its addresses on the hub; no network.

Kinds of evidence: *oracle* (by hand), *contract* (bad input is one line).
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import TextData, from_dataset, read_answers, read_chat, read_classes, read_classification
from fedlora.data.hub import hub_source, load_split
from fedlora.errors import DataError
from support.stand_in_hub import Hub, HubRows

datasets = pytest.importorskip("datasets")

NAMES = ["world", "sports", "business"]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def news() -> Any:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
    return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [2, 0]}, features=features)


def named(news: Any) -> TextData:
    return TextData("classification", ("a", "b"), labels=(2, 0), label_names=tuple(NAMES))


class TestObjects:
    def test_classes_have_their_names(self, news: Any) -> None:
        assert from_dataset(news, text="text", label="label") == named(news)

    def test_names_that_hold_the_own_ones_go_by_name_and_others_rename(self, news: Any) -> None:
        """business is 2 in the column, 0 in ("business", "science", "sports", "world"); ("x", "y", "z") is by index."""
        more = ("business", "science", "sports", "world")
        assert from_dataset(news, text="text", label="label", label_names=more).labels == (0, 3)
        renamed = from_dataset(news, text="text", label="label", label_names=("x", "y", "z"))
        assert (renamed.labels, renamed.label_names) == ((2, 0), ("x", "y", "z"))

    def test_instructions_and_conversations(self) -> None:
        rows = datasets.Dataset.from_dict({"q": ["Hi"], "a": ["Hello"], "messages": [TALK]})
        want = TextData("instruction", ("Hi",), responses=("Hello",))
        assert from_dataset(rows, prompt="q", response="a") == from_dataset(rows, messages="messages") == want

    @pytest.mark.parametrize(
        ("values", "names"),
        [
            ([True, False], None), ([True, False], ["no", "yes"]), (["10", "9"], None), ([1, 0], ["1", "0"]),
            (["b", "a "], None), ([2, 0], None), (["pos", "1"], None), ([0.0, 1.0], None), ([1, -1], None),
        ],
    )  # fmt: skip
    def test_labels_are_read_as_a_file_with_them_is(self, values: list[Any], names: Any, tmp_path: Path) -> None:
        """One rule: what `read_classification` makes of the JSONL of the same rows, errors included."""
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": values})
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))

        def read(read_it: Any, source: Any) -> Any:
            try:
                return read_it(source, text="text", label="label", label_names=names)
            except DataError as error:
                return re.sub(r", line \d", "", str(error).replace(str(source), "the data set"))

        assert read(from_dataset, rows) == read(read_classification, tmp_path / "d.jsonl")

    def test_a_data_set_in_numpys_format_is_the_same(self, news: Any) -> None:
        assert from_dataset(news.with_format("numpy"), text="text", label="label") == named(news)

    @pytest.mark.parametrize(
        ("columns", "said"),
        [
            ({}, "got none"),
            ({"text": "text"}, "text and label, .*missing"),
            ({"text": "text", "label": "label", "messages": "m"}, "label beside messages"),
            ({"messages": "text", "pair": "text"}, "pair and label_names belong"),
            ({"text": "txt", "label": "label"}, r"no column 'txt'.* \['text', 'label'\]"),
            ({"messages": "text"}, "row 1: 'text' .*list of messages"),
        ],
    )
    def test_columns_of_one_task(self, news: Any, columns: dict[str, str], said: str) -> None:
        with pytest.raises(DataError, match=said) as error:
            from_dataset(news, **columns)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)

    def test_a_dictionary_of_splits_and_a_stream(self, news: Any) -> None:
        with pytest.raises(DataError, match=r"splits \['train'\]"):
            from_dataset(datasets.DatasetDict({"train": news}), text="text", label="label")
        with pytest.raises(DataError, match="without streaming=True"):
            from_dataset(news.to_iterable_dataset(), text="text", label="label")

    def test_an_empty_cell_is_named(self) -> None:
        rows = datasets.Dataset.from_dict({"q": ["Hi", None], "a": ["Hello", "x"]})
        with pytest.raises(DataError, match="row 2: 'q' is missing"):
            from_dataset(rows, prompt="q", response="a")


class TestParquet:
    def test_a_file_of_the_library_brings_its_class_names(self, news: Any, tmp_path: Path) -> None:
        """In their own order, and through other names by name."""
        news.to_parquet(tmp_path / "news.parquet")
        assert read_classification(tmp_path / "news.parquet", text="text", label="label") == named(news)
        more = ("business", "science", "sports", "world")
        assert read_classes(tmp_path / "news.parquet", text="text", label="label", label_names=more).labels == (0, 3)

    def test_a_name_with_a_blank_at_its_edge(self, tmp_path: Path) -> None:
        """The names are as the file has them, through the file and through the object."""
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=[" x", "y "])}
        )
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
        rows.to_parquet(tmp_path / "a.parquet")
        want = TextData("classification", ("a", "b"), labels=(1, 0), label_names=(" x", "y "))
        assert read_classification(tmp_path / "a.parquet", text="text", label="label") == want
        assert from_dataset(rows, text="text", label="label") == want

    def test_a_column_that_is_there_twice_and_a_broken_note_of_the_library(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        twice = pyarrow.table([["a"], ["b"], [0]], names=["text", "text", "label"])
        parquet.write_table(twice, tmp_path / "twice.parquet")
        with pytest.raises(DataError, match=r"cannot be read as Parquet: .*text"):
            read_classification(tmp_path / "twice.parquet", text="text", label="label")
        broken = pyarrow.table({"text": ["a"], "label": [0]}).replace_schema_metadata({"huggingface": "{"})
        parquet.write_table(broken, tmp_path / "broken.parquet")
        with pytest.raises(DataError, match="library datasets"):
            read_classification(tmp_path / "broken.parquet", text="text", label="label")

    def test_conversations_and_instructions(self, tmp_path: Path) -> None:
        rows = datasets.Dataset.from_dict({"prompt": ["Hi"], "response": ["Hello"], "talk": [TALK]})
        rows.to_parquet(tmp_path / "a.parquet")
        want = TextData("instruction", ("Hi",), responses=("Hello",))
        assert read_chat(tmp_path / "a.parquet", messages="talk") == want
        assert read_answers(tmp_path / "a.parquet", prompt="prompt", response="response") == want

    def test_a_plain_file_without_names(self, tmp_path: Path) -> None:
        """As CSV: whole numbers by size, words by the alphabet."""
        datasets.Dataset.from_dict({"t": ["a", "b"], "n": [1, 0], "w": ["x", "c"]}).to_parquet(tmp_path / "a.parquet")
        assert read_classification(tmp_path / "a.parquet", text="t", label="n").label_names == ("0", "1")
        assert read_classification(tmp_path / "a.parquet", text="t", label="w").labels == (1, 0)

    def test_an_unlabelled_row_is_named(self, tmp_path: Path) -> None:
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [2, -1]}, features=features)
        rows.to_parquet(tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"row 2: 'label' is -1.* 0\.\.2 .*unlabelled"):
            read_classification(tmp_path / "a.parquet", text="text", label="label")

    def test_what_is_no_parquet_and_without_the_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.parquet").write_bytes(b"PAR1 or not")
        with pytest.raises(DataError, match="cannot be read as Parquet") as error:
            read_classification(tmp_path / "a.parquet", text="text", label="label")
        assert "\n" not in str(error.value)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(DataError, match=r"pip install 'fedlora\[hub\]'"):
            read_classification(tmp_path / "a.parquet", text="text", label="label")


class TestAddresses:
    def test_parts(self) -> None:
        assert hub_source("hf://me/films") == {"name": "me/films", "config": None, "split": "train", "revision": None}
        assert hub_source("hf://me/films?config=en&split=train[:10%]&revision=abc") == {
            "name": "me/films", "config": "en", "split": "train[:10%]", "revision": "abc",
        }  # fmt: skip

    @pytest.mark.parametrize(
        "wrong", ["hf://", "hf://a/b?splits=x", "hf://a/b?split=", "hf://a/b?x", "hf://a?split=a&split=b"]
    )
    def test_what_is_none(self, wrong: str) -> None:
        with pytest.raises(DataError, match=r"hf://owner/name"):
            hub_source(wrong)

    def test_the_hub_is_asked_as_written(self, hub: Hub) -> None:
        asked = hub({"train": HubRows([{"messages": TALK}]), "test": HubRows([{"text": "a", "label": "x"}])})
        assert read_answers("hf://me/chat?revision=abc", prompt="prompt", response="response").text == ("Hi",)
        assert read_classes("hf://me/chat?config=c&split=test", text="text", label="label").label_names == ("x",)
        assert asked == [("me/chat", None, "train", "abc"), ("me/chat", "c", "test", None)]

    def test_without_a_network_it_is_said_in_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not offline mode, but a hub that nobody answers for: a port where nothing listens. `datasets` itself would
        try again for 23 seconds."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        began = time.monotonic()
        with pytest.raises(DataError, match=r"me/films, split 'train' .*local files.*HF_HUB_OFFLINE=1"):
            load_split("me/films", None, "train")
        assert time.monotonic() - began < 8
