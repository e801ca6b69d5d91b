"""Files of rows: what one writes is what is read, and what is no such file is told with its place.

Kinds of evidence: *property* (drawn rows, written by the csv module, json and pyarrow, against what is read),
*contract* (each odd file is one line that names file, row and line).
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data import read_instructions
from fedlora.data.tables import open_table
from fedlora.errors import DataError

# What other readers take for something else: missing, a number, a date, a comment, a quote, an end of line or of file.
ODD = ["", " ", "NA", "nan", "null", "None", "#N/A", "True", "1", "007", "1e5", "+1", "2020-01-01", "# x", '"', '""',
       "'", "\\", "a,b", "a\tb", "a\nb", "a\r\nb", "\r", "\x00", "\x1a", "\u2028", "\ufeff", "é", "😀"]  # fmt: skip
CELLS = st.sampled_from(ODD) | st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6),
    columns=st.lists(CELLS.filter(lambda c: c.strip("\ufeff") and "\0" not in c), min_size=2, max_size=2, unique=True),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], columns: list[str], seed: int
) -> None:
    """Every cell of every row as it was, and the line at which its row begins; in each of the formats."""
    folder, draw = tmp_path_factory.mktemp("tables"), random.Random(seed)
    expected = [dict(zip(columns, row, strict=True)) for row in rows]
    mark = draw.choice(["", "\ufeff"])
    for suffix, delimiter in ((".csv", ","), (".TSV", "\t")):
        text, lines = io.StringIO(newline=""), []
        text.write(mark)
        for row in (columns, *rows):
            text.write(draw.choice(["", "\n", "\r\n"]))
            lines.append(len(io.StringIO(text.getvalue(), newline="").readlines()) + 1)
            end = draw.choice(["\n", "\r\n"])
            plain = "\r" in end or not any("\r" in cell for cell in row)  # the writer quotes what ends its own lines
            quoting = draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]) if plain else csv.QUOTE_ALL
            csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end).writerow(row)
        (folder / f"d{suffix}").write_bytes(text.getvalue().encode())
        table = open_table(folder / f"d{suffix}")
        assert [row for _, row in table.rows] == expected and table.columns == tuple(columns)
        first = [line if line > 1 or not mark else 1 for line in lines[1:]]
        assert [where for where, _ in table.rows] == [f"row {k}, line {n}" for k, n in enumerate(first, start=1)]
    for suffix, escape in ((".jsonl", True), (".json", False)):
        written = [json.dumps(row, ensure_ascii=escape) + draw.choice(["\n", "\r\n", "\n\n"]) for row in expected]
        (folder / f"d{suffix}").write_bytes((mark + "".join(written)).encode())
        assert [row for _, row in open_table(folder / f"d{suffix}").rows] == expected
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({name: [row[name] for row in expected] for name in columns})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "d.parquet")
    assert [row for _, row in open_table(folder / "d.parquet").rows] == expected


ODD_FILES: list[tuple[str, str | bytes, str]] = [
    ("d.csv", "", "holds no rows"),
    ("d.csv", '\ufeffp;r\r\n"ä\n""b""";c\r\nd;\r\ne;\r\n', "row 2, line 4; row 3, line 5: 'r' is empty"),
    ("d.csv", "p,r\na,b,\n", r"row 1, line 2 has 3 fields, but the header has 2: \['p', 'r'\]\. .* ',' "),
    ("d.csv", "p,r\na,b\n \n\n c,d,e\nf,g\n", "row 2, line 3 has 1 field; row 3, line 5 has 3 fields, but the header"),
    ("d.csv", "p,p,r\na,b,c\n", r"header names \['p'\]"),
    ("d.tsv", 'p\tr\n"Hi" he said\tb\n', "row starting at line 2: .* without quoting"),
    ("d.csv", b"p,r\na,caf\xe9\n", r"not UTF-8: .* byte 0xe9 in position 9.*iconv -f cp1252"),
    ("d.jsonl", '{"p": "a", "r": "b"}\n\n{"p": "c", "r": null}\n', "row 2, line 3: 'r' is empty"),
    ("d.jsonl", '{"p": "a", "r": 5}\n', "row 1, line 1: 'r' .*got int 5"),
    ("d.jsonl", '{"p": "a", "r": "b"}\n{"p": "a", \n', "line 2 is not a JSON object"),
    ("d.json", '[\n{"p": "a", "r": "b"}\n]\n', "line 1 is not .* one JSON array"),
    ("d.jsonl", '{"p": "x", "r": "b"}\n{"p": "a", "p": "b", "r": "c"}', "line 2 .*key 'p' .*twice"),
    ("d.xlsx", "x", "suffix '.xlsx'"),
    ("d.csv", "pp,r\nx,0\n", r"no column 'p'; .*\['pp', 'r'\]"),
]  # fmt: skip


def test_odd_files_are_told_with_their_place(tmp_path: Path) -> None:
    for name, content, said in ODD_FILES:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match=said) as error:
            read_instructions(file, prompt="p", response="r")
        assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_no_file_and_what_is_no_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("csv", "parquet"):
        with pytest.raises(DataError, match=f"nowhere.{suffix} does not exist"):
            open_table(tmp_path / f"nowhere.{suffix}")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(DataError, match="Parquet") as error:
        open_table(tmp_path / "a.parquet")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"pip install 'fedlora\[hub\]'"):
        open_table(tmp_path / "a.parquet")


SEPARATED = [
    ("d.csv", "id;text;label\n1;not good, but fine;0\n", ["id", "text", "label"], "line 2"),
    ("d.csv", '"text, as, said";label\n"a, b";0\n', ["text, as, said", "label"], "line 2"),
    ("d.csv", "text; as said,label\na,1\n", ["text; as said", "label"], "line 2"),  # one mark in a name is none
]


def test_the_separator_is_the_headers(tmp_path: Path) -> None:
    """As Excel writes where numbers have decimal commas; also with commas in a text or in a column's name."""
    for name, content, columns, place in SEPARATED:
        (tmp_path / name).write_text(content)
        table = open_table(tmp_path / name)
        assert [*table.columns] == columns and len(table.rows[0][1]) == len(columns)
        assert table.rows[0][0] == f"row 1, {place}"
