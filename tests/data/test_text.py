"""Text data: readers on hand-written files, the value type, and splits that neither leak nor lose examples."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data.splits import split
from fedlora.data.text import TextData, read_classification, read_instructions
from fedlora.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, content: str | bytes):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write_file


def sentences(labels, names=("no", "yes"), prefix="s"):
    return TextData(
        "classification", tuple(f"{prefix}{i}" for i in range(len(labels))), None, tuple(labels), None, names
    )


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


class TestTextData:
    def test_lists_become_tuples_of_plain_ints(self):
        data = TextData("classification", ["a", "b"], labels=np.array([1, 0]), label_names=["x", "y"])
        assert data == TextData("classification", ("a", "b"), labels=(1, 0), label_names=("x", "y"))
        assert type(data.labels[0]) is int
        assert len(data) == 2

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"text": ("a", "b"), "labels": (0,), "label_names": ("x",)}, r"'text': 2, 'labels': 1"),
            ({"text": ("a",), "pair": (), "labels": (0,), "label_names": ("x",)}, r"'pair': 0"),
            ({"text": ("a",), "label_names": ("x",)}, "has labels"),
            ({"text": ("a",), "labels": (0,)}, "label_names"),
            ({"text": ("a",), "labels": (0,), "responses": ("r",), "label_names": ("x",)}, "no responses"),
            ({"text": ("a", "b"), "labels": (0, 2), "label_names": ("x", "y")}, r"example 1 has label 2.*0\.\.1"),
            ({"text": ("a",), "labels": (-1,), "label_names": ("x",)}, "example 0 has label -1"),
        ],
    )
    def test_classification_checks(self, fields, message):
        with pytest.raises(DataError, match=message):
            TextData("classification", **fields)

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"labels": (0,), "responses": ("r",)},
            {"responses": ("r",), "pair": ("b",)},
            {"responses": ("r",), "label_names": ("x",)},
        ],
    )
    def test_instruction_checks(self, fields):
        with pytest.raises(DataError, match="instruction data has text"):
            TextData("instruction", ("a",), **fields)

    def test_unknown_kind(self):
        with pytest.raises(DataError, match="'regression'"):
            TextData("regression", ())

    def test_select_takes_every_field_in_the_asked_order(self):
        data = TextData("classification", ("a", "b", "c"), ("p", "q", "r"), (0, 1, 2), None, ("x", "y", "z"))
        assert data.select(np.array([2, 0, 2])) == TextData(
            "classification", ("c", "a", "c"), ("r", "p", "r"), (2, 0, 2), None, ("x", "y", "z")
        )
        assert len(data.select([])) == 0
        chat = TextData("instruction", ("a", "b"), responses=("1", "2"))
        assert chat.select([1]) == TextData("instruction", ("b",), responses=("2",))

    @pytest.mark.parametrize("indices", [[3], [-1], [0, 7]])
    def test_select_out_of_range(self, indices):
        with pytest.raises(DataError, match=r"of 3, whose indices are 0\.\.2"):
            sentences([0, 1, 0]).select(indices)

    @pytest.mark.parametrize("indices", [np.array([True, False, True]), [0.0], [[0]], ["0"]])
    def test_select_wants_whole_numbers(self, indices):
        with pytest.raises(DataError, match="whole numbers"):
            sentences([0, 1, 0]).select(indices)

    def test_digest_is_the_documented_hash(self):
        data = TextData("classification", ("é", "b"), ("p", "q"), (1, 0), None, ("x", "y"))
        lines = '["classification", ["x", "y"]]\n["\\u00e9", "p", 1, null]\n["b", "q", 0, null]\n'
        assert data.digest() == hashlib.sha256(lines.encode()).hexdigest()

    def test_digest_sees_every_field_and_the_order(self):
        base = TextData("classification", ("a", "b"), ("p", "q"), (1, 0), None, ("x", "y"))
        others = [
            base.select([1, 0]),
            base.select([0]),
            TextData("classification", ("a", "c"), ("p", "q"), (1, 0), None, ("x", "y")),
            TextData("classification", ("a", "b"), ("p", "r"), (1, 0), None, ("x", "y")),
            TextData("classification", ("a", "b"), None, (1, 0), None, ("x", "y")),
            TextData("classification", ("a", "b"), ("p", "q"), (1, 1), None, ("x", "y")),
            TextData("classification", ("a", "b"), ("p", "q"), (1, 0), None, ("x", "z")),
            TextData("instruction", ("a", "b"), responses=("p", "q")),
            TextData("instruction", ("ab", ""), responses=("p", "q")),
        ]
        assert len({data.digest() for data in [base, *others]}) == len(others) + 1
        assert base.select([0, 1]).digest() == base.digest()

    def test_concat_undoes_a_cut(self):
        data = TextData("classification", ("a", "b", "c"), ("p", "q", "r"), (0, 1, 0), None, ("x", "y"))
        assert TextData.concat([data.select([0]), data.select([]), data.select([1, 2])]) == data
        chat = TextData("instruction", ("a", "b"), responses=("1", "2"))
        assert TextData.concat([chat.select([0]), chat.select([1])]) == chat

    @pytest.mark.parametrize(
        "other",
        [
            sentences([0], names=("no", "maybe")),
            TextData("instruction", ("a",), responses=("r",)),
            TextData("classification", ("a",), ("b",), (0,), None, ("no", "yes")),
        ],
    )
    def test_concat_of_different_tasks(self, other):
        with pytest.raises(DataError, match="got 2 different"):
            TextData.concat([sentences([0]), other])

    def test_concat_of_nothing(self):
        with pytest.raises(DataError, match="at least one part"):
            TextData.concat([])


class TestReaders:
    def test_csv_with_quotes_commas_and_newlines(self, write):
        file = write(
            "d.csv", 'id,review,mood\r\n1,"Good, ""really"" good",pos\r\n2,"two\nlines",neg\r\n\r\n3, plain ,pos\r\n'
        )
        data = read_classification(file, text="review", label="mood")
        assert data.text == ('Good, "really" good', "two\nlines", " plain ")
        assert data.labels == (1, 0, 1)
        assert data.label_names == ("neg", "pos")
        assert data.pair is None

    def test_tsv_pair_and_byte_order_mark(self, write):
        file = write("d.TSV", b"\xef\xbb\xbfa\tb\ty\nx, y\tz\t1\n")
        data = read_classification(file, text="a", label="y", pair="b")
        assert (data.text, data.pair, data.labels, data.label_names) == (("x, y",), ("z",), (0,), ("1",))

    @settings(max_examples=15, deadline=None)
    @given(
        rows=st.lists(
            st.tuples(
                st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=1)
            ).filter(lambda row: row[0].strip() and row[1].strip()),
            min_size=1,
            max_size=8,
        )
    )
    def test_what_is_written_is_read(self, tmp_path_factory, rows):
        folder = tmp_path_factory.mktemp("roundtrip")
        for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
            with (folder / f"d{suffix}").open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream, delimiter=delimiter)
                writer.writerow(["q", "a"])
                writer.writerows(rows)
        for escape, suffix in ((True, ".jsonl"), (False, ".json")):
            lines = [json.dumps({"q": q, "a": a}, ensure_ascii=escape) for q, a in rows]
            (folder / f"d{suffix}").write_bytes("\n".join(lines).encode())
        expected = TextData("instruction", tuple(q for q, _ in rows), responses=tuple(a for _, a in rows))
        for suffix in (".csv", ".tsv", ".jsonl", ".json"):
            assert read_instructions(folder / f"d{suffix}", prompt="q", response="a") == expected

    def test_jsonl_lines_end_at_newlines_only(self, write):
        text = "next\x85line\u2028separator"
        file = write(
            "d.jsonl", json.dumps({"t": text, "y": 0}, ensure_ascii=False) + "\r\n\n" + jsonl({"t": "b", "y": 0})
        )
        assert read_classification(file, text="t", label="y").text == (text, "b")

    def test_a_field_beyond_csvs_default_limit(self, write):
        limit = csv.field_size_limit()
        file = write("d.csv", f"p,r\n{'x' * (limit + 1)},y\n")
        assert len(read_instructions(file, prompt="p", response="r").text[0]) == limit + 1
        assert csv.field_size_limit() == limit

    @pytest.mark.parametrize(
        ("values", "names", "labels", "label_names"),
        [
            ([2, 1, 0], None, (2, 1, 0), ("0", "1", "2")),
            ([2, 0], None, (1, 0), ("0", "2")),
            (["2", "0"], None, (1, 0), ("0", "2")),
            ([" 10", "9"], None, (1, 0), ("9", "10")),
            ([5, 1, 3], None, (2, 0, 1), ("1", "3", "5")),
            (["1992", "1990"], None, (1, 0), ("1990", "1992")),
            (["10", "02"], None, (1, 0), ("02", "10")),
            (["+1", "0"], None, (1, 0), ("0", "+1")),
            ([10**17, 3], None, (1, 0), ("3", "100000000000000000")),
            (["9" * 5000, "8" * 5000], None, (1, 0), ("8" * 5000, "9" * 5000)),
            (["-1", "+1"], ["-1", "+1"], (0, 1), ("-1", "+1")),
            (["10", "b", "9"], ["9", "10", "b"], (1, 2, 0), ("9", "10", "b")),
            (["b", "a", "b"], None, (1, 0, 1), ("a", "b")),
            ([True, False], None, (1, 0), ("false", "true")),
            ([True, False], ["no", "yes"], (1, 0), ("no", "yes")),
            ([" a", "a", "b "], [" a", "a", "b"], (0, 1, 2), (" a", "a", "b")),
            (["b", "a"], ["b", "a"], (0, 1), ("b", "a")),
            ([1, "0", "b"], ["b", "a"], (1, 0, 0), ("b", "a")),
            ([2, "1"], ["1", "2"], (1, 0), ("1", "2")),
            ([-1, 1], ["-1", "0", "1"], (0, 2), ("-1", "0", "1")),
        ],
    )
    def test_labels(self, write, values, names, labels, label_names):
        file = write("d.jsonl", jsonl(*({"t": "x", "y": value} for value in values)))
        data = read_classification(file, text="t", label="y", label_names=names)
        assert (data.labels, data.label_names) == (labels, label_names)

    @pytest.mark.parametrize(
        ("values", "names", "message"),
        [
            (["a", "c"], ["a", "b"], r"row 2, line 2: label 'c' .* 2 label_names \['a', 'b'\]"),
            ([0, 2], ["a", "b"], "row 2, line 2: label '2'"),
            ([0], ["1", "2"], "label '0' is not among"),
            ([0, -1], None, r"row 2, line 2: label -1 .*label_names=\['-1', '0'\]"),
            (["+1", "-1"], None, r"row 2, line 2: label -1 .*label_names=\['-1', '\+1'\]"),
            (["1", "+1", "0"], None, r"'1' \(row 1, line 1\) and '\+1' \(row 2, line 2\).*two ways"),
            (["2", "1", "01"], None, r"'1' \(row 2, line 2\) and '01' \(row 3, line 3\)"),
            ([0, 1, 1.0], None, r"'1' \(row 2, line 2\) and '1.0' \(row 3, line 3\)"),
            (["0", "-0"], None, r"'0' \(row 1, line 1\) and '-0' \(row 2, line 2\)"),
            ([1], ["+1", "+2"], "label '1' is not among"),
            (["+1"], ["no", "yes"], r"label '\+1' is not among"),
            ([-1], ["a", "b"], "label '-1' is not among"),
            ([0, 1.5], None, "row 2, line 2: label 1.5 "),
            (["3.25"], None, "not a whole number"),
            (["pos", 1], None, r"names \(row 1, line 1: 'pos'\).*numbers \(row 2, line 2: 1\)"),
            (["10", "b"], None, r"numbers \(row 1, line 1: '10'\).*names \(row 2, line 2: 'b'\)"),
            ([0, 1, True], None, r"numbers \(row 1, line 1: 0\) .*true or false \(row 3, line 3: True\)"),
            ([False, "neg"], None, r"true or false \(row 1, line 1: False\) .*names \(row 2"),
            ([True], ["1", "0"], "label 'true' is not"),
            ([["a"]], None, r"a label is .*got \['a'\]"),
            (list(range(10_001)), None, "10001 classes"),
            (["a"], ["a", "a"], "different names"),
            (["a"], [], "at least one"),
        ],
    )
    def test_bad_labels(self, write, values, names, message):
        file = write("d.jsonl", jsonl(*({"t": "x", "y": value} for value in values)))
        with pytest.raises(DataError, match=message):
            read_classification(file, text="t", label="y", label_names=names)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"t": "a", "t": "b", "y": 0}', "line 2 .*key 't' .*twice"),
            ('{"t": "a", "y": 0, "more": [{"k": 1, "k": 2}]}', "line 2 .*key 'k' .*twice"),
            ('{"t": "a", "y": 0, "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 .*nested too deep"),
            ('{"t": "a", "y": ' + "9" * 5_000 + "}", "line 2 is not a JSON object"),
        ],
    )
    def test_json_that_python_would_take_or_die_of(self, write, line, said):
        """One line of a file that another program wrote; a DataError names it."""
        file = write("d.jsonl", '{"t": "x", "y": 1}\n' + line)
        with pytest.raises(DataError, match=said) as error:
            read_classification(file, text="t", label="y")
        assert "\n" not in str(error.value)

    def test_missing_file_and_folder(self, tmp_path):
        with pytest.raises(DataError, match=r"nowhere\.csv does not exist"):
            read_instructions(tmp_path / "nowhere.csv", prompt="p", response="r")
        (tmp_path / "f.csv").mkdir()
        with pytest.raises(DataError, match="is a folder"):
            read_instructions(tmp_path / "f.csv", prompt="p", response="r")

    @pytest.mark.parametrize("name", ["d.xlsx", "d"])
    def test_unknown_suffix(self, write, name):
        with pytest.raises(DataError, match=r"suffix .* is not known"):
            read_instructions(write(name, "x"), prompt="p", response="r")

    @pytest.mark.parametrize(
        ("name", "content"), [("d.csv", "sentence,label\nx,0\n"), ("d.jsonl", '{"sentence": "x"}\n{"label": 0}\n')]
    )
    def test_missing_column_names_the_nearest(self, write, name, content):
        with pytest.raises(
            DataError, match=r"no column 'sentense'; .*\['sentence', 'label'\]. Did you mean 'sentence'"
        ):
            read_classification(write(name, content), text="sentense", label="label")

    @pytest.mark.parametrize(("mark", "named"), [(";", "';'"), ("\t", r"'\\t'"), ("|", r"'\|'")])
    def test_another_separator_than_the_commas_is_named(self, write, mark, named):
        with pytest.raises(DataError, match=rf"Is {named} meant .*\.csv has commas"):
            read_classification(write("d.csv", f"text{mark}label\nx{mark}0\n"), text="text", label="label")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("d.csv", "", "holds no rows"),
            ("d.csv", "p,r\n", "holds no rows"),
            ("d.jsonl", "\n\n", "holds no rows"),
            ("d.csv", "p,r\na,b\n \t,b\n", "row 2, line 3: 'p' is empty"),
            ("d.csv", 'p,r\n"a\nb",c\nd,\n', "row 2, line 4: 'r' is empty"),
            ("d.csv", "p,r\na\n", "row 1, line 2: 'r' is missing"),
            ("d.csv", "p,r\na,b,c\n", "row 1, line 2 .*3 fields.*header has 2"),
            ("d.csv", "p,p,r\na,b,c\n", r"header names \['p'\]"),
            ("d.csv", 'p,r\na,b\n"c,d\n', "line 3: unexpected end"),
            ("d.tsv", 'p\tr\n"Hi" he said\tb\n', "row starting at line 2: .* without quoting"),
            ("d.csv", b"p,r\na,caf\xe9\n", r"not UTF-8: byte 0xe9 at offset 9"),
            ("d.jsonl", '{"p": "a", "r": "b"}\n\n{"p": "c", "r": null}\n', "row 2, line 3: 'r' is missing"),
            ("d.jsonl", '{"p": "a", "r": "b"}\n{"p": "c"}\n', "row 2, line 2: 'r' is missing"),
            ("d.jsonl", '{"p": "a", "r": ""}\n', "row 1, line 1: 'r' is empty"),
            ("d.jsonl", '{"p": "a", "r": 5}\n', "row 1, line 1: 'r' .*got int 5"),
            ("d.jsonl", '{"p": "a", "r": "b"}\n{"p": "a", \n', "line 2 is not a JSON object"),
            ("d.jsonl", '{"p": "a", "r": NaN}\n', "line 1 is not a JSON object .*NaN"),
            ("d.json", '[\n{"p": "a", "r": "b"}\n]\n', "line 1 is not .* one JSON array"),
            ("d.json", '[{"p": "a", "r": "b"}]', "line 1 holds a JSON list"),
            ("d.jsonl", '{"p": "\\ud83d", "r": "b"}\n', "row 1, line 1: 'p' .*surrogate"),
        ],
    )
    def test_bad_files(self, write, name, content, message):
        with pytest.raises(DataError, match=message):
            read_instructions(write(name, content), prompt="p", response="r")


class TestSplit:
    @settings(max_examples=40, deadline=None)
    @given(
        words=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 2)), min_size=12, max_size=80),
        seed=st.integers(0, 2**40),
    )
    def test_nothing_lost_and_no_copies_straddle(self, words, seed):
        spellings = ("Film {}", "  film   {} ", "FILM\n{}")
        text = tuple(spellings[i % 3].format(word) for i, (word, _) in enumerate(words))
        data = TextData("classification", text, None, tuple(y for _, y in words), None, ("a", "b", "c"))
        try:
            parts = split(data, validation=0.2, test=0.3, seed=seed)
        except DataError:
            assert len({word for word, _ in words}) < 8  # only a handful of distinct inputs can leave a part empty
            return
        pooled = TextData.concat(parts)
        assert Counter(zip(pooled.text, pooled.labels, strict=True)) == Counter(zip(text, data.labels, strict=True))
        keys = [{t.split()[-1] for t in part.text} for part in parts]
        assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
        assert parts == split(data, validation=0.2, test=0.3, seed=seed)

    @settings(max_examples=40, deadline=None)
    @given(
        counts=st.lists(st.integers(0, 60), min_size=2, max_size=4).filter(lambda c: sum(c) >= 60),
        validation=st.sampled_from([0.1, 0.15, 0.3]),
        test=st.sampled_from([0.1, 0.25]),
        seed=st.integers(0, 2**40),
    )
    def test_sizes_and_strata(self, counts, validation, test, seed):
        """Without copies the shares after every deal sum to one over three parts, so the receiver was at least 1/3
        behind: a part is never over 2/3 ahead, hence never over 4/3 behind; a class lies between two such moments."""
        labels = [k for k, n in enumerate(counts) for _ in range(n)]
        data = sentences(labels, names=tuple("abcd"[: len(counts)]))
        shares = (1 - validation - test, validation, test)
        for share, part in zip(shares, split(data, validation=validation, test=test, seed=seed), strict=True):
            assert abs(len(part) - share * len(data)) <= 4 / 3 + 1e-9
            for k, n in enumerate(counts):
                assert abs(part.labels.count(k) - share * n) <= 2 + 1e-9

    def test_seeds_differ_and_parts_are_mixed(self):
        data = sentences([0] * 100 + [1] * 100)
        one, other = (split(data, validation=0.2, test=0.2, seed=seed) for seed in (0, 1))
        assert set(one[2].text) != set(other[2].text)
        for part in one:  # sorted input, mixed output: a prefix of a part is a fair sample
            assert any(a > b for a, b in pairwise(part.labels))

    def test_every_example_can_land_everywhere(self):
        data = sentences([0, 1] * 10)
        seen = [
            Counter(t for seed in range(80) for t in split(data, validation=0.2, test=0.2, seed=seed)[p].text)
            for p in (1, 2)
        ]
        assert all(len(counter) == 20 for counter in seen)  # expected 16 visits each

    def test_zero_shares_are_empty(self):
        data = sentences([0, 1] * 10)
        train, validation, test = split(data, validation=0, test=0, seed=0)
        assert (len(train), len(validation), len(test)) == (20, 0, 0)
        assert validation.label_names == ("no", "yes")
        train, validation, test = split(data, validation=0.0, test=0.5, seed=0)
        assert (len(train), len(validation), len(test)) == (10, 0, 10)

    def test_instructions(self):
        chat = TextData(
            "instruction", tuple(f"q{i % 30}" for i in range(60)), responses=tuple(str(i) for i in range(60))
        )
        parts = split(chat, validation=0.1, test=0.1, seed=0)
        assert sum(map(len, parts)) == 60
        assert not set(parts[0].text) & set(parts[2].text)
        assert all(int(r) % 30 == int(q[1:]) for part in parts for q, r in zip(part.text, part.responses, strict=True))

    def test_a_pair_task_groups_by_both_sentences(self):
        """One premise under 20 hypotheses is no copy; (premise, hypothesis) twice is."""
        pair = tuple(f"h{i % 20}" for i in range(40))
        data = TextData("classification", ("p",) * 40, pair, (0,) * 40, None, ("x",))
        train, _, test = split(data, validation=0, test=0.5, seed=0)
        assert (len(train), len(test)) == (20, 20)
        assert not set(train.pair) & set(test.pair)

    def test_copies_with_other_labels_stay_together(self):
        data = TextData("classification", ("a", "A ", "b", "c"), None, (0, 1, 0, 1), None, ("x", "y"))
        for seed in range(10):
            parts = split(data, validation=0, test=0.5, seed=seed)
            assert sum("a" in part.text for part in parts) == 1
            assert all(("a" in part.text) == ("A " in part.text) for part in parts)

    @pytest.mark.parametrize(
        ("validation", "test"),
        [(-0.1, 0.1), (0.5, 0.5), (0.2, 1.0), (10, 0.1), (float("nan"), 0.1), (0.1, float("inf"))],
    )
    def test_bad_fractions(self, validation, test):
        with pytest.raises(DataError, match="sum is below 1"):
            split(sentences([0, 1] * 10), validation=validation, test=test, seed=0)

    def test_an_empty_part_that_was_asked_for(self):
        with pytest.raises(DataError, match=r"test part .*0\.01 of 10 examples"):
            split(sentences([0, 1] * 5), validation=0, test=0.01, seed=0)
        with pytest.raises(DataError, match="which are 1 distinct inputs"):
            split(TextData("instruction", ("q",) * 9, responses=("r",) * 9), validation=0, test=0.3, seed=0)
        with pytest.raises(DataError, match="train part"):
            split(sentences([]), validation=0, test=0, seed=0)
