"""Small files beside an adapter: upload.json names its client and its examples, labels.json its classes.

A run leaves uploads on request; `fedlora audit`, merges, and anything else that reads PEFT adapters can read them.
labels.json has num_labels and id2label as in a model's config.json: a head of three classes does not fit a base loaded
for two, and none of peft's files records the number. It is not called config.json because transformers takes a folder
with one for a whole model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlora.adapters.base_names import Base, check_same_base
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.untrusted_files import json_object
from fedlora.adapters.writer import UPLOAD_FOLDER, AdapterSpec, fill_adapter
from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, Upload, checked_examples
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, repeated

FILE, LABELS_FILE = "upload.json", "labels.json"
_LONGEST_NAME = 200
_MOST_EXAMPLES = 1e15  # keeps sums over any number of clients finite and accurate


@dataclass(frozen=True)
class Facts:
    """The contents of an adapter's upload.json. client, examples: without the file, the adapter's own path and 1, and
    `there` is False."""

    client: str
    examples: float = 1
    there: bool = True


def read_facts(directory: Path) -> Facts:
    """The facts of an adapter's directory. If upload.json exists but is not an ordinary file, it is refused, not
    ignored.

    Raises:
        AdapterFormatError: upload.json lacks client or num_examples, or has one in another form.
    """
    path = directory / FILE
    if not os.path.lexists(path):
        return Facts(str(directory), there=False)
    content = json_object(path)
    client, examples = content.get("client"), content.get("num_examples")
    if not (isinstance(client, str) and 0 < len(client) <= _LONGEST_NAME and client.isprintable()):
        raise AdapterFormatError(
            f"{path}: client is a name of up to {_LONGEST_NAME} letters on one line; got {quoted(client)}."
        )
    if isinstance(examples, bool) or not isinstance(examples, int | float) or not 0 <= examples <= _MOST_EXAMPLES:
        raise AdapterFormatError(
            f"{path}: num_examples is a number from 0 to {_MOST_EXAMPLES:g}; got {quoted(examples)}."
        )
    return Facts(client, examples)


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
        fill_adapter(building, upload.adapter.folded(), spec)
        files.write(building / FILE, json.dumps(facts, indent=2) + "\n")


def read_uploads(directories: Sequence[str | os.PathLike[str]], *, max_bytes: int | None = None) -> list[Upload]:
    """The adapters in PEFT directories as one round's uploads.

    An adapter without upload.json is a client named by its path, with one example, so all of these count alike.

    Raises:
        AdapterFormatError: a directory cannot be read, there are fewer than two, or the base models have different
            names.
    """
    if len(directories) < 2:
        raise AdapterFormatError(f"give at least two adapters; got {len(directories)}.")
    given = [AdapterFile(directory, max_bytes=max_bytes) for directory in directories]
    check_same_base(Base.of(file.config) for file in given)
    uploads = []
    for file in given:
        adapter = Adapter(
            {name: file.lora(name) for name in file.modules}, {path: file.head(path) for path in file.heads}
        )
        facts = read_facts(file.directory)
        upload = Upload(Client(facts.client, adapter.ranks), facts.examples, adapter)
        checked_examples(upload)
        uploads.append(upload)
    check_one_each(upload.client.id for upload in uploads)
    return uploads


def check_one_each(clients: Iterable[str]) -> None:
    """Raise `AdapterFormatError` if two adapters belong to one client, which would count twice."""
    for twice in repeated(clients)[:1]:
        raise AdapterFormatError(
            f"two of the adapters belong to client {quoted(twice)}, which would count twice: give one per client, all "
            f"of one round."
        )


def labels_of(directory: Path) -> tuple[str, ...]:
    """The class names, in order, from labels.json; empty if there is none.

    Raises:
        AdapterFormatError: the file has them in another form.
    """
    where = directory / LABELS_FILE
    if not os.path.lexists(where):
        return ()
    found = json_object(where).get("id2label")
    names = [found.get(str(k)) for k in range(len(found))] if isinstance(found, dict) else [None]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise AdapterFormatError(f"{where} must give classes 0, 1, 2, ... distinct names; got {quoted(found)}.")
    return tuple(map(str, names))


def write_labels(folder: Path, labels: Sequence[str]) -> None:
    """Write labels.json for these classes."""
    facts = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    files.write(folder / LABELS_FILE, json.dumps(facts, indent=2) + "\n")
