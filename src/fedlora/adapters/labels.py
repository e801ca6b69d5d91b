"""A classifier's class names beside its adapter: from labels.json, or from upload.json.

labels.json has num_labels and id2label as in a model's config.json. A head of three classes does not fit a base loaded
for two, and none of peft's files records the number. It is not called config.json because transformers takes a folder
with one for a whole model.
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
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

LABELS_FILE = "labels.json"


def labels_of(directory: Path, limits: Limits | None = None) -> tuple[str, ...]:
    """The class names, in order; empty if no file names them.

    Raises:
        AdapterFormatError: a file has them in another form.
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
        raise AdapterFormatError(f"{where} must give classes 0, 1, 2, ... distinct names; got {quoted(found)}.")
    return tuple(found)


def write_labels(folder: Path, labels: Sequence[str]) -> None:
    """Write labels.json for these classes."""
    facts = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    files.write(folder / LABELS_FILE, json.dumps(facts, indent=2) + "\n")
