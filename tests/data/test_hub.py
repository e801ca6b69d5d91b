"""Data sets of the hub.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (bad input is one line). No network: the library `datasets` is a stand-in.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from fedlora.data import TextData, read_hub
from fedlora.errors import DataError
from support.benchmark_files import Rows, one_line
from support.stand_in_hub import Hub, HubRows

FILMS: Rows = [{"review": "good", "mood": 1, "by": "a"}, {"review": "bad", "mood": 0, "by": "b"}]


class TestHub:
    def test_columns_and_the_names_of_the_data_set(self, hub: Hub) -> None:
        """Read off the rows; the ask is what `datasets.load_dataset` documents."""
        asked = hub({"train": HubRows(FILMS, {"mood": ("neg", "pos")})})
        data = read_hub("me/films", None, "train", text="review", label="mood", revision="abc")
        assert data == TextData("classification", ("good", "bad"), labels=(1, 0), label_names=("neg", "pos"))
        assert asked == [("me/films", None, "train", "abc")]

    def test_names_that_are_given_win_and_a_pair_is_read(self, hub: Hub) -> None:
        """The docstring: label_names are the classes by index; by default those that the data set names."""
        hub({"train": HubRows(FILMS, {"mood": ("neg", "pos")})})
        data = read_hub("f", "c", "train", text="review", label="mood", pair="by", label_names=("no", "yes"))
        assert data == TextData("classification", ("good", "bad"), ("a", "b"), (1, 0), None, ("no", "yes"))

    def test_classes_without_names_are_called_by_their_numbers(self, hub: Hub) -> None:
        """As `read_classification` does with whole numbers."""
        hub({"train": HubRows(FILMS)})
        assert read_hub("f", None, "train", text="review", label="mood").label_names == ("0", "1")

    @pytest.mark.parametrize("wrong", ["text", "label", "pair"])
    def test_a_missing_column_is_named_with_those_there_are(self, hub: Hub, wrong: str) -> None:
        """Whichever column it is; the message has the data set, its configuration and the split."""
        hub({"test": HubRows(FILMS)})
        columns = {"text": "review", "label": "mood", "pair": "by"} | {wrong: "moood"}
        with pytest.raises(DataError, match=r"f/c, split 'test' .* 'moood'; .*\['review', ") as error:
            read_hub("f", "c", "test", **columns)  # type: ignore[arg-type]
        one_line(error)

    def test_an_unlabelled_split_is_refused(self, hub: Hub) -> None:
        """GLUE's public test sets hold -1 in place of each label."""
        rows = [row | {"mood": -1} for row in FILMS]
        hub({"test": HubRows(rows, {"mood": ("neg", "pos")})})
        with pytest.raises(DataError, match=r"row 1: 'mood' is -1.* 0\.\.1 .*unlabelled") as error:
            read_hub("f", None, "test", text="review", label="mood")
        one_line(error)

    def test_a_label_beyond_the_given_names_is_refused(self, hub: Hub) -> None:
        """Two names are the classes 0 and 1."""
        hub({"train": HubRows([*FILMS, {"review": "so-so", "mood": 2, "by": "c"}])})
        with pytest.raises(DataError, match=r"row 3: label '2' .* 2 label_names"):
            read_hub("f", None, "train", text="review", label="mood", label_names=("neg", "pos"))

    def test_labels_that_are_strings_are_read_or_refused(self, hub: Hub) -> None:
        """Many hub data sets have a string column; the docstring promises classes, or a DataError."""
        hub({"train": HubRows([{"review": "good", "mood": "pos"}, {"review": "bad", "mood": "neg"}])})
        try:
            data = read_hub("f", None, "train", text="review", label="mood")
        except DataError:
            return
        assert (data.labels, data.label_names) == ((1, 0), ("neg", "pos"))

    def test_a_split_without_names_in_which_a_class_does_not_occur(self, hub: Hub) -> None:
        """As `read_classification`: the classes are the whole numbers that occur, and no others."""
        hub({"train": HubRows([row | {"mood": 2 * row["mood"]} for row in FILMS])})
        data = read_hub("f", None, "train", text="review", label="mood")
        assert (data.labels, data.label_names) == ((1, 0), ("0", "2"))

    @pytest.mark.parametrize(
        ("raised", "reason"),
        [
            (ConnectionError("no route to huggingface.co\nand forty lines more"), "no route to huggingface.co. "),
            (FileNotFoundError("Couldn't find 'me/films'"), "Couldn't find 'me/films'. "),
            (TimeoutError(), "TimeoutError. "),
        ],
    )
    def test_whatever_the_transport_raises_is_one_line(self, hub: Hub, raised: Exception, reason: str) -> None:
        """Its first line, or its type where it says nothing; the cause is chained."""
        hub(raised)
        with pytest.raises(DataError, match="me/films/c, split 'train' cannot be loaded") as error:
            read_hub("me/films", "c", "train", text="review", label="mood")
        assert f"from the hub: {reason}" in one_line(error)
        assert error.value.__cause__ is raised

    def test_without_the_library_it_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """None in sys.modules is how Python spells a module that cannot be imported."""
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=re.escape("pip install 'fedlora[hub]'")) as error:
            read_hub("me/films", None, "train", text="review", label="mood")
        one_line(error)

    def test_the_extras_that_error_messages_name_bring_the_library(self) -> None:
        """hub.py and generation.py tell the reader what to install: pyproject.toml must agree."""
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
        extras = project["project"]["optional-dependencies"]
        for extra, library in (("hub", "datasets"), ("train", "rouge-score")):
            assert any(need.startswith(library) for need in extras[extra]), (extra, library)
