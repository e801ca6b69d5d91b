"""Examples as a file again, for whoever reads them next: a site of a trial, or a client's own program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.data.splits import digests
from fedlora.data.tables import open_table
from fedlora.data.text import TextData


@dataclass(frozen=True)
class Rows:
    """Rows of a table, and the suffix of the file that they came from, which says how to write them."""

    rows: Sequence[Mapping[str, Any]]
    suffix: str = ".jsonl"

    @classmethod
    def of(cls, data: TextData) -> Rows:
        """Examples in their order, with the columns' usual names; classes by name."""
        return cls(list(_rows(data)))

    @classmethod
    def left(cls, file: Path, whole: TextData, part: TextData) -> Rows:
        """The rows of a file that are in `part` of it, as they are there: with all columns. whole: its examples."""
        wanted, table = Counter(digests(part)), open_table(file)
        found = []
        for one, (_, row) in zip(digests(whole), table.rows, strict=True):
            if wanted[one]:
                wanted[one] -= 1
                found.append(row)
        return cls(found, file.suffix.lower())

    def write(self, path: Path) -> None:
        """Write them; the path's suffix should be theirs."""
        import pandas

        frame = pandas.DataFrame(list(self.rows), dtype=None if self.suffix == ".parquet" else object)
        if self.suffix == ".parquet":
            frame.to_parquet(path)
        elif self.suffix in (".csv", ".tsv"):
            frame.to_csv(path, index=False, sep="\t" if self.suffix == ".tsv" else ",")
        else:
            frame.to_json(path, orient="records", lines=True, force_ascii=False)


def _rows(data: TextData) -> Iterator[dict[str, Any]]:
    for k in range(len(data)):
        if data.labels is not None:
            row = {"text": data.text[k], "label": data.label_names[data.labels[k]]}
            yield row if data.pair is None else {**row, "pair": data.pair[k]}
        elif data.history is not None:
            yield {"messages": [{"role": role, "content": content} for role, content in data.messages(k)]}
        else:
            assert data.responses is not None
            yield {"prompt": data.text[k], "response": data.responses[k]}
