"""Uploads as folders: a PEFT directory with a small `upload.json` that names its client and its number of examples.

A run leaves them on request; `fedlora audit`, merges, and anything else that reads PEFT adapters can read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.adapters.io import AdapterSpec, write_adapter
from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import read_json
from fedlora.adapters.writer import UPLOAD_FOLDER
from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.core.messages import Upload
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

FILE = "upload.json"
_LONGEST_NAME = 200
_MOST_EXAMPLES = 1e15  # keeps sums over any number of clients finite and accurate


@dataclass(frozen=True)
class Facts:
    """The contents of an adapter's upload.json. client, examples: without the file, the adapter's own path and 1, and
    `there` is False. round: from 1. labels: the classes, in order. Missing facts are None."""

    directory: Path
    client: str
    examples: float = 1
    round: int | None = None
    labels: tuple[str, ...] | None = None
    there: bool = True


def read_facts(directory: Path, limits: Limits | None = None) -> Facts:
    """The facts of an adapter's directory. If upload.json exists but is not an ordinary file, it is refused, not
    ignored.

    Raises:
        AdapterFormatError: upload.json lacks client or num_examples, or has a field in another form.
    """
    path = directory / FILE
    if not os.path.lexists(path):
        return Facts(directory, str(directory), there=False)
    said = read_json(path, limits or Limits())

    def known(key: str, fits: Callable[[Any], bool], what: str) -> Any:
        found = said.get(key)
        if found is not None and not fits(found):
            raise AdapterFormatError(f"{path}: {key} is {what}; got {quoted(found)}.")
        return found

    client, examples = said.get("client"), said.get("num_examples")
    if not isinstance(client, str) or isinstance(examples, bool) or not isinstance(examples, int | float):
        raise AdapterFormatError(f"{path} must name its client (client) and its number of examples (num_examples).")
    known("client", lambda v: 0 < len(v) <= _LONGEST_NAME and v.isprintable(),
          f"a name of up to {_LONGEST_NAME} letters on one line")  # fmt: skip
    known("num_examples", lambda v: 0 <= v <= _MOST_EXAMPLES, f"a number from 0 to {_MOST_EXAMPLES:g}")
    number = known("round", lambda v: type(v) is int and 1 <= v < 2**31, "a whole number from 1")
    labels = known(
        "label_names", lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v), "a list of texts"
    )
    return Facts(directory, client, examples, number, None if labels is None else tuple(labels))


def write_upload(
    directory: Path,
    upload: Upload,
    spec: AdapterSpec,
    *,
    round: int,
    more: Mapping[str, object] | None = None,
) -> None:
    """Write a complete upload as a PEFT directory, which appears whole. `round` counts from 1, like the records;
    `more`: how it came about. An existing upload is replaced."""
    facts = {"client": upload.client.id, "num_examples": upload.num_examples, "round": round, **(more or {})}
    with replacing_folder(directory, force=True, kind=UPLOAD_FOLDER) as building:
        write_adapter(building, upload.adapter, spec)
        files.write(building / FILE, json.dumps(facts, indent=2) + "\n")
