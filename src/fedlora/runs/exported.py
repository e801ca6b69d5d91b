"""The adapter folder that a run leaves for others: PEFT files, tokenizer, class names, a card with how to load it.

labels.json has id2label and num_labels as a model's config.json has them: a head of three classes does not fit a base
that is loaded for two, and peft has no file that says how many there are. It is not called config.json, since
transformers takes a folder with one for a whole model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlora.adapters.io import AdapterSpec, write_adapter
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.core import files
from fedlora.core.lora import Adapter
from fedlora.core.read_only import ReadOnly

LABELS_FILE = "labels.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"  # transformers' name for it


def write_export(
    folder: Path,
    adapter: Adapter,
    spec: AdapterSpec,
    tokenizer: Any,
    labels: Sequence[str],
    card: str,
    like: Path | None = None,
    chat_template: str | None = None,
) -> None:
    """Everything of one adapter; what makes it an adapter for peft comes last.

    labels: none for a language model. like: a folder with the same tokenizer, whose files are linked: of many clients
    one copy. chat_template: in place of the tokenizer's own.
    """
    if like is None:
        _save_tokenizer(folder, tokenizer, chat_template)
    else:
        _link_tokenizer(folder, like)
    if labels:
        facts = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
        files.write(folder / LABELS_FILE, json.dumps(facts, indent=2) + "\n")
    write_adapter(folder, adapter, spec, card=card)


def named(spec: AdapterSpec, base: str | None) -> AdapterSpec:
    """The spec with its base model by that name, where there is one."""
    return spec if base is None else replace(spec, config=ReadOnly({**spec.config, "base_model_name_or_path": base}))


def _save_tokenizer(folder: Path, tokenizer: Any, chat_template: str | None) -> None:
    """transformers' own files, each beside and renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        tokenizer.save_pretrained(beside)
        if chat_template is not None:
            (Path(beside) / CHAT_TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")
        for path in sorted(Path(beside).rglob("*")):
            if path.is_file():
                place = folder / path.relative_to(beside)
                place.parent.mkdir(exist_ok=True)
                os.replace(path, place)


def _link_tokenizer(folder: Path, like: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(like.iterdir()):
        if path.is_file() and path.name not in (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE, "README.md"):
            beside = folder / f"{path.name}.part"
            beside.unlink(missing_ok=True)
            try:
                os.link(path, beside)
            except OSError:  # a file system without links
                shutil.copyfile(path, beside)
            os.replace(beside, folder / path.name)
            beside.unlink(missing_ok=True)  # where both were one file already, nothing was renamed
