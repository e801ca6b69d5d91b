"""The names of a classifier's classes beside its adapter: labels.json, or what upload.json says of them.

labels.json has num_labels and id2label as a model's config.json has them: a head of three classes does not fit a base
that is loaded for two, and peft has no file that says how many there are. It is not called config.json, since
transformers takes a folder with one for a whole model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import read_json
from fedlora.adapters.uploads import FILE, read_facts
from fedlora.core import files
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError

LABELS_FILE = "labels.json"


def labels_of(directory: Path, limits: Limits | None = None) -> tuple[str, ...]:
    """The names of the classes, in order; none where nothing says them.

    Raises:
        AdapterFormatError: a file that says them in another shape.
    """
    where: Path = directory / LABELS_FILE
    found: Any
    if os.path.lexists(where):
        found = read_json(where, limits or Limits()).get("id2label")
        if isinstance(found, dict) and set(found) == {str(k) for k in range(len(found))}:
            found = [found[str(k)] for k in range(len(found))]
        else:
            found = None
    else:
        where, found = directory / FILE, list(read_facts(directory, limits).labels or ())
    if not isinstance(found, list) or not all(isinstance(n, str) for n in found) or len(set(found)) < len(found):
        raise AdapterFormatError(f"{where} does not name classes 0, 1, 2, ... differently; got {quoted(found)}.")
    return tuple(found)


def write_labels(folder: Path, labels: Sequence[str]) -> None:
    """labels.json of these classes."""
    facts = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    files.write(folder / LABELS_FILE, json.dumps(facts, indent=2) + "\n")
