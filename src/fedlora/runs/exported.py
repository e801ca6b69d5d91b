"""The adapter folders a run leaves for others: PEFT files, tokenizer, class names, and a card that says how to load it.

A resumed run replaces adapters and uploads, and no folder that holds anything else.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlora.adapters.io import AdapterSpec, pad_rank, write_adapter
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.adapters.uploads import FILE, LABELS_FILE, write_labels
from fedlora.core.folders import ANY_FOLDER, FolderKind, check_target, replacing_folder
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory
from fedlora.core.read_only import ReadOnly
from fedlora.runs.base_names import BaseName
from fedlora.runs.card import model_card
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.training.measure import client_model

FOLDERS = {"last": "adapter", "best": "best"}  # a tested state -> the folder of its model
# Tokenizer files in every transformers version; each tokenizer class names its own vocabulary files.
_TOKENIZER = (
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|(spiece|tokenizer|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja"
)


def export_folder(tokenizer: Any) -> FolderKind:
    """The folder that `Exports` leaves in a run."""
    own = getattr(tokenizer, "vocab_files_names", None) or {}
    names = "|".join(map(re.escape, (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE, "README.md", *sorted(own.values()))))
    return FolderKind("an adapter that a run left", CONFIG_FILE, f"{names}|{_TOKENIZER}", "choose another --out")


@dataclass(frozen=True, eq=False)
class Exports:
    """Writes adapters, each in a folder of its own with its card, tokenizer and class names.

    facts, config: for the cards, as in `model_card`; there also base, privacy and judged. tokenizer: None if there is
    none to copy; of many adapters all but the first link its files. labels: empty for a language model. kind: which
    folders may be replaced. made: the folders so far.
    """

    facts: Mapping[str, Any]
    config: RunConfig
    spec: AdapterSpec
    tokenizer: Any
    labels: Sequence[str]
    kind: FolderKind = ANY_FOLDER
    base: BaseName | None = None
    privacy: str | None = None
    judged: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    made: list[Path] = field(default_factory=list)

    def write(
        self, folder: Path, adapter: Adapter, round: int, scores: Mapping[str, float], *, client: str | None = None,
        by: str | None = None, on: str = "test", validation: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Write one adapter's folder, which appears whole and replaces an existing one of that kind. client, by, on,
        validation: as in `model_card`."""
        card = model_card(
            self.facts, self.config, adapter, round, scores,
            by=by, on=on, client=client, base=self.base, tokenizer=self.tokenizer is not None, privacy=self.privacy,
            judged=self.judged, validation=validation,
        )  # fmt: skip
        with replacing_folder(folder, force=True, kind=self.kind) as building:
            write_adapter(building, adapter, self.spec, card=card)
            if self.made:
                _link_tokenizer(building, self.made[0])
            elif self.tokenizer is not None:
                self.tokenizer.save_pretrained(building)
            if self.labels:
                write_labels(building, self.labels)
        self.made.append(folder)


def named(spec: AdapterSpec, base: str | None) -> AdapterSpec:
    """The spec with its base model under that name, if given."""
    return spec if base is None else replace(spec, config=ReadOnly({**spec.config, "base_model_name_or_path": base}))


def _link_tokenizer(folder: Path, like: Path) -> None:
    for path in sorted(like.iterdir()):
        if path.is_file() and path.name not in (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE, "README.md"):
            try:
                os.link(path, folder / path.name)
            except OSError:  # a file system without links
                shutil.copyfile(path, folder / path.name)


def global_adapter(server: Server, state: RunState) -> Adapter:
    """The server's model as one adapter: its whole update at full rank, base change included, and the heads."""
    update = server.global_update(state.server)
    return Adapter({name: pad_rank(lora, 1) for name, lora in update.items()}, state.server.heads)


def client_adapter(server: Server, state: RunState, client: Client) -> Adapter:
    """The client's readout from the state, as one adapter on the pre-trained base."""
    return client_model(server, state.server, client, state.clients.get(client.id, ClientMemory())).folded()


def check_replaceable(folder: RunFolder, tokenizer: Any, clients: Collection[str], rounds: Iterable[int]) -> None:
    """Check, before playing rounds, that everything a resumed run replaces is its own. rounds: those still to play.

    Raises:
        ConfigError: a file that no run writes; the message names it.
    """
    for place in exports(folder, clients):
        check_target(place, force=True, kind=export_folder(tokenizer))
    for round in rounds:
        if os.path.lexists(folder.uploads(round)):
            check_target(folder.uploads(round), force=True, kind=UPLOADS)


def exports(folder: RunFolder, clients: Collection[str]) -> Iterator[Path]:
    """Existing adapter folders. Anything else in clients/ belongs to no client, and stays."""
    places = [folder.path / "adapter", folder.path / "best", *(folder.path / "clients" / name for name in clients)]
    return (place for place in places if os.path.lexists(place))


def clear_exports(folder: RunFolder, tokenizer: Any, clients: Collection[str], made: Collection[Path]) -> None:
    """Remove adapters that an earlier end of the run left and this one did not make. made: those it made."""
    for place in exports(folder, clients):
        if place not in made:
            check_target(place, force=True, kind=export_folder(tokenizer))
            shutil.rmtree(place)
    own = folder.path / "clients"
    if own.is_dir() and not any(own.iterdir()):
        own.rmdir()


_PARTS = "|".join(name.replace(".", "[.]") for name in (CONFIG_FILE, WEIGHTS_FILE, "README.md", FILE))
UPLOADS = FolderKind("a round's uploads", None, rf"[^/]+/({_PARTS})", "choose another --out")
