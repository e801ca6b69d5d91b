"""Text examples as a file again, for whoever reads them next: a site of a trial, or a client's own program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedlora.data.text import TextData


def write_rows(path: Path, data: TextData, columns: Mapping[str, str | None] | None = None) -> None:
    """Write examples as JSONL, in their order; classes by name, or as numbers if their names are 0, 1, 2, ...

    columns: a column's usual name (text, pair, label, prompt, response, messages) -> the one to write.
    """
    named = {usual: name for usual, name in (columns or {}).items() if name}
    with path.open("w", encoding="utf-8") as file:
        for row in _rows(data):
            file.write(json.dumps({named.get(name, name): value for name, value in row.items()}) + "\n")


def _rows(data: TextData) -> Iterator[dict[str, Any]]:
    numbered = data.label_names == tuple(str(k) for k in range(len(data.label_names)))
    for k in range(len(data)):
        if data.labels is not None:
            label = data.labels[k]
            row = {"text": data.text[k], "label": label if numbered else data.label_names[label]}
            yield row if data.pair is None else {**row, "pair": data.pair[k]}
        elif data.history is not None:
            yield {"messages": [{"role": role, "content": content} for role, content in data.messages(k)]}
        else:
            assert data.responses is not None
            yield {"prompt": data.text[k], "response": data.responses[k]}


__all__ = ["write_rows"]
