"""Uploads as folders: a PEFT directory with a small `upload.json` in it that says whose it is and how much it counts.

A run leaves them on request, `fedlora audit` reads them; so does anything that reads PEFT adapters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlora.adapters.io import AdapterSpec, read_adapter, write_adapter
from fedlora.adapters.untrusted_files import Limits, read_json
from fedlora.core import files
from fedlora.core.messages import Client, Upload, checked_examples
from fedlora.errors import AdapterFormatError

FILE = "upload.json"


def write_upload(
    directory: Path, upload: Upload, spec: AdapterSpec, *, round: int, more: Mapping[str, object] | None = None
) -> None:
    """A complete upload as a PEFT directory. `round` counts from 1, as the records do; `more`: how it came about."""
    facts = {"client": upload.client.id, "num_examples": upload.num_examples, "round": round, **(more or {})}
    # Before the adapter: without it that would be somebody else's.
    files.write(directory / FILE, json.dumps(facts, indent=2) + "\n")
    write_adapter(directory, upload.adapter, spec)


def read_uploads(directories: Sequence[str | os.PathLike[str]]) -> tuple[list[Upload], AdapterSpec]:
    """The adapters in PEFT directories as the uploads of one round, and the spec of the first.

    An adapter without upload.json is a client named by its path, with one example: all such count alike.

    Raises:
        AdapterFormatError: what cannot be read, fewer than two, or adapters of different base models.
    """
    if len(directories) < 2:
        raise AdapterFormatError(f"at least two adapters are needed; got {len(directories)}.")
    uploads, specs = [], []
    for directory in directories:
        adapter, spec = read_adapter(directory)
        client, examples = read_facts(Path(directory))
        upload = Upload(Client(client, adapter.ranks), examples, adapter)
        checked_examples(upload)
        uploads.append(upload)
        specs.append(spec)
    bases = {str(directory): spec.base_model for directory, spec in zip(directories, specs, strict=True)}
    if len(set(bases.values())) > 1:
        raise AdapterFormatError(f"the adapters are of different base models, so their updates do not add up: {bases}.")
    names = [upload.client.id for upload in uploads]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AdapterFormatError(
            f"two of the adapters are of client {twice[0]!r}: give one for each client, of one round only."
        )
    return uploads, specs[0]


def read_round(directory: Path) -> int | None:
    """Which round an adapter directory says that it is of, from 1; None where it does not."""
    path = directory / FILE
    found = read_json(path, Limits()).get("round") if path.is_file() else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def read_facts(directory: Path) -> tuple[str, float]:
    """(client, num_examples) of an adapter directory; its own path and 1 where it has no upload.json.

    Raises:
        AdapterFormatError: an upload.json that does not say both.
    """
    path = directory / FILE
    if not path.is_file():
        return str(directory), 1
    facts = read_json(path, Limits())
    client, examples = facts.get("client"), facts.get("num_examples")
    if not isinstance(client, str) or isinstance(examples, bool) or not isinstance(examples, int | float):
        raise AdapterFormatError(f"{path} does not say whose upload it is: client and num_examples are needed.")
    if not 0 <= examples < 1e300:  # also of whole numbers beyond every float
        raise AdapterFormatError(f"{path}: num_examples is a finite number from 0.")
    return client, examples
