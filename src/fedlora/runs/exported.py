"""The adapter folder that a run leaves for others: PEFT files, tokenizer, class names, a card with how to load it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlora.adapters.io import AdapterSpec, write_adapter
from fedlora.adapters.labels import LABELS_FILE, write_labels
from fedlora.adapters.mark import only_by
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.adapters.writer import RUN
from fedlora.core import files
from fedlora.core.folders import ANY_FOLDER, FolderKind, replacing_folder
from fedlora.core.lora import Adapter
from fedlora.core.read_only import ReadOnly

CHAT_TEMPLATE_FILE = "chat_template.jinja"  # transformers' name for it
# What tokenizers are saved as, by every transformers; a kind's own vocabulary has the names that its class says.
_TOKENIZER = (
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|(spiece|tokenizer|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja"
)


def export_folder(tokenizer: Any) -> FolderKind:
    """What `write_export` leaves in a run, and nothing else; its weights say that a run wrote them."""
    own = getattr(tokenizer, "vocab_files_names", None) or {}
    names = "|".join(map(re.escape, (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE, "README.md", *sorted(own.values()))))
    return FolderKind(
        "an adapter that a run left",
        CONFIG_FILE,
        f"{names}|{_TOKENIZER}",
        only_by(RUN, WEIGHTS_FILE),
        "choose another --out",
    )


def write_export(
    folder: Path,
    adapter: Adapter,
    spec: AdapterSpec,
    tokenizer: Any,
    labels: Sequence[str],
    card: str,
    like: Path | None = None,
    chat_template: str | None = None,
    kind: FolderKind = ANY_FOLDER,
) -> None:
    """Everything of one adapter, which appears whole, in the place of what is of that kind there.

    tokenizer: None where there is none to be copied. labels: none for a language model. like: a folder with the same
    tokenizer, whose files are linked: of many clients one copy. chat_template: in place of the tokenizer's own.
    """
    with replacing_folder(folder, force=True, kind=kind) as building:
        write_adapter(building, adapter, spec, card=card, by=RUN)
        if like is not None:
            _link_tokenizer(building, like)
        elif tokenizer is not None:
            tokenizer.save_pretrained(building)
            if chat_template is not None:
                files.write(building / CHAT_TEMPLATE_FILE, chat_template)
        if labels:
            write_labels(building, labels)


def named(spec: AdapterSpec, base: str | None) -> AdapterSpec:
    """The spec with its base model by that name, where there is one."""
    return spec if base is None else replace(spec, config=ReadOnly({**spec.config, "base_model_name_or_path": base}))


def _link_tokenizer(folder: Path, like: Path) -> None:
    for path in sorted(like.iterdir()):
        if path.is_file() and path.name not in (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE, "README.md"):
            try:
                os.link(path, folder / path.name)
            except OSError:  # a file system without links
                shutil.copyfile(path, folder / path.name)
