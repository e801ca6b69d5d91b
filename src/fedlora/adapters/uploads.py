"""Uploads as folders: a PEFT directory with a small `upload.json` in it that says whose it is and how much it counts.

A run leaves them on request, `fedlora audit` reads them; so does anything that reads PEFT adapters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.adapters.io import AdapterSpec, write_adapter
from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import read_json
from fedlora.adapters.writer import upload_folder
from fedlora.core import files
from fedlora.core.echo import quoted
from fedlora.core.folders import replacing_folder
from fedlora.core.messages import Upload
from fedlora.errors import AdapterFormatError

FILE = "upload.json"
_LONGEST_NAME = 200
_MOST_EXAMPLES = 1e15  # so that sums over any number of clients stay exact enough, and finite


def write_upload(
    directory: Path,
    upload: Upload,
    spec: AdapterSpec,
    *,
    round: int,
    more: Mapping[str, object] | None = None,
    force: bool = True,
    by: str = "fedlora",
) -> None:
    """A complete upload as a PEFT directory, which appears whole. `round` counts from 1, as the records do; `more`: how
    it came about. force: an upload that is there is replaced, where `by` wrote it."""
    facts = {"client": upload.client.id, "num_examples": upload.num_examples, "round": round, **(more or {})}
    with replacing_folder(directory, force=force, kind=upload_folder(by)) as building:
        write_adapter(building, upload.adapter, spec, by=by)
        files.write(building / FILE, json.dumps(facts, indent=2) + "\n")


def read_round(directory: Path, limits: Limits | None = None) -> int | None:
    """Which round an adapter directory says that it is of, from 1; None where it does not."""
    found = (read_upload(directory, limits) or {}).get("round")
    if found is None or (type(found) is int and 1 <= found < 2**31):
        return found
    raise AdapterFormatError(f"{directory / FILE}: round is a whole number from 1; got {quoted(found)}.")


def read_facts(directory: Path, limits: Limits | None = None) -> tuple[str, float]:
    """(client, num_examples) of an adapter directory; its own path and 1 where it has no upload.json.

    Raises:
        AdapterFormatError: an upload.json that does not say both.
    """
    path, facts = directory / FILE, read_upload(directory, limits)
    if facts is None:
        return str(directory), 1
    client, examples = facts.get("client"), facts.get("num_examples")
    if not isinstance(client, str) or isinstance(examples, bool) or not isinstance(examples, int | float):
        raise AdapterFormatError(f"{path} does not say whose upload it is: client and num_examples are needed.")
    if not (0 < len(client) <= _LONGEST_NAME and client.isprintable()):
        raise AdapterFormatError(
            f"{path}: client is a name of up to {_LONGEST_NAME} letters on one line; got {quoted(client)}."
        )
    if not 0 <= examples <= _MOST_EXAMPLES:  # also of whole numbers beyond every float
        raise AdapterFormatError(
            f"{path}: num_examples is a number from 0 to {_MOST_EXAMPLES:g}; got {quoted(examples)}."
        )
    return client, examples


def read_upload(directory: Path, limits: Limits | None) -> dict[str, Any] | None:
    """upload.json; None where there is none. What is there and is no ordinary file is refused, not taken for none."""
    path = directory / FILE
    return read_json(path, limits or Limits()) if os.path.lexists(path) else None
