"""A site's half of a round without a network: train a received adapter on the site's own data, and write an upload.

The server's half is `offline.server`. The upload is a PEFT directory with upload.json: its client, the number of
examples it counts for, and how it was made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedlora.adapters.base_names import is_path
from fedlora.adapters.io import AdapterSpec, read_adapter
from fedlora.adapters.labels import labels_of
from fedlora.adapters.limits import Limits
from fedlora.adapters.reader import WEIGHTS_FILE, AdapterFile
from fedlora.adapters.uploads import write_upload
from fedlora.adapters.writer import TRAIN
from fedlora.client import Played, play_round
from fedlora.core.echo import quoted
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory, Download
from fedlora.core.method import Roles
from fedlora.core.read_only import ReadOnly
from fedlora.core.trainer import Trainer
from fedlora.data import TextData
from fedlora.data.demo import model_location
from fedlora.data.rows import Rows
from fedlora.errors import AdapterFormatError, ClientFailed, ConfigError
from fedlora.training.content import file_digest, model_content
from fedlora.training.encoding import Cut
from fedlora.training.hub_models import hub_name
from fedlora.training.local import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.programs import Program, ProgramTrainer
from fedlora.training.prompting import find_template
from fedlora.training.round_folder import ProgramFailed
from fedlora.training.settings import LoRASettings, Task, TrainSettings

_TOLD = {"lr", "optimizer", "steps", "epochs", "batch_size", "class_weights"}  # settings recorded in an upload


@dataclass(frozen=True)
class Fresh:
    """How to begin without a received adapter. seed: the same at all sites of a federation: they start alike."""

    targets: Sequence[str] | str
    rank: int
    scaling: float = 2.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class SiteRound:
    """The outcome of a site's round, for the screen."""

    played: Played
    start: Adapter
    ranks: str
    cut: Cut
    max_length: int


def train_site(
    base: str | Path,
    task: Task,
    start: Path | Fresh,
    data: TextData,
    settings: TrainSettings,
    out: Path,
    *,
    client: str,
    round: int,
    seed: int,
    start_seed: int = 0,
    device: str = "cpu",
    data_file: Path | None = None,
    limits: Limits | None = None,
    force: bool = False,
    program: Program | None = None,
) -> SiteRound:
    """Train on `data` from the received adapter (or a fresh one), and write the upload to `out`.

    base: a directory, a hub id, or a packaged model, "demo" or "smollm2". The upload records the hub's name if known,
    and a directory by its full path. force: replace an existing upload. program: trains in place of fedlora's loop;
    its rounds are in the folder programs, and most of `settings` have no effect.

    Raises:
        ConfigError: the model cannot be loaded, the adapter has layers that fedlora does not train or numbers its
            classes differently from the data, or `out` is not empty or cannot be written.
        AdapterFormatError: the adapter cannot be read or does not fit the model. DataError: the data cannot be encoded.
        ClientFailed: the program failed.

    Example:
        >>> from fedlora.offline.site import Fresh
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> fresh = Fresh(targets=["query"], rank=4)
        >>> settings, out = TrainSettings(steps=1), Path("upload")
        >>> done = train_site("model", "classification", fresh, data, settings, out, client="site-1", round=1, seed=0)
        >>> done.played.upload.num_examples
        150
    """
    labels = tuple(data.label_names or ())
    if isinstance(start, Path):
        _check_labels(start, labels, limits)
    called, base = str(base), model_location(str(base))
    digests = model_content(base)
    if isinstance(start, Fresh):
        targets = start.targets if isinstance(start.targets, str) else list(start.targets)
        lora = LoRASettings(targets=targets, scaling=start.scaling)
        model = AdaptedModel.load(base, task, lora, labels=labels, seed=start.seed, device=device)
        adapter, spec = model.seed_adapter(start.rank, seed=start.seed)
    else:
        model, adapter, spec = _received(base, task, start, labels, start_seed, device, limits)
    spec = _named(spec, called, digests, received=isinstance(start, Path))
    if model.positions is not None:  # the model cannot read longer texts
        settings = settings.model_copy(update={"max_length": min(settings.max_length, model.positions)})
    ranks, of_program = adapter.ranks, program is not None
    trainer, cut, a_round = _trainer(model, spec, client, data, settings, seed, program, data_file, str(base))
    download = Download(Client(client, ranks), round - 1, adapter, Roles(), Adapter({}), {})
    memory = ClientMemory(position=(round - 1) * a_round)  # as if the earlier rounds had been like this one
    try:
        played = play_round(download, memory, trainer)
    except ProgramFailed as failed:
        raise ClientFailed(client, round, str(failed)) from failed
    if not math.isfinite(played.loss):
        raise ConfigError(f"training diverged: the mean loss is {played.loss}. Try a smaller --lr.")
    facts = {
        "trained_from": file_digest(start / WEIGHTS_FILE) if isinstance(start, Path) else f"fresh, seed {start.seed}",
        "data_sha256": file_digest(data_file) if data_file is not None else None,
        "base_model_sha256": digests,
        "mean_loss": played.loss,
        "settings": {} if of_program else settings.model_dump(include=_TOLD),
        "seed": seed,
        "label_names": list(labels),
        "template": None
        if of_program or task != "causal-lm"
        else find_template(settings.template, model.tokenizer).name,
        "fedlora": version("fedlora"),
    }
    write_upload(out, played.upload, spec, round=round, more=facts, force=force, by=TRAIN)
    distinct = sorted(set(ranks.values()))
    return SiteRound(
        played, adapter, " to ".join(str(r) for r in dict.fromkeys((distinct[0], distinct[-1]))),
        cut, settings.max_length,
    )  # fmt: skip


def _trainer(
    model: AdaptedModel, spec: AdapterSpec, client: str, data: TextData, settings: TrainSettings, seed: int,
    program: Program | None, file: Path | None, base: str,
) -> tuple[Trainer, Cut, int]:  # fmt: skip
    """What trains, how much of the data it cuts, and how many examples it reads in a round, as far as is known."""
    if program is None:
        own = LocalTrainer(model, {client: data}, settings, seed=seed)
        return own, own.cut()[client], own.examples_a_round(client)
    rows = {client: file if file is not None else Rows.of(data)}
    other = ProgramTrainer(
        program, spec, model.settings, Path("programs"), data=rows, bases=[base], labels=data.label_names or ()
    )
    return other, Cut(len(data), 0, 0), 0


def _received(
    base: str | Path,
    task: Task,
    directory: Path,
    labels: Sequence[str],
    seed: int,
    device: str,
    limits: Limits | None,
) -> tuple[AdaptedModel, Adapter, AdapterSpec]:
    """The model with the received adapter's modules adapted, at the adapter's own scale."""
    file = AdapterFile(directory, limits=limits)
    kinds = {layout.kind for layout in file.layouts.values()} - {"linear"}
    extras = {file.kind(path) for path in file.heads} - {"head", "base"}
    if kinds or extras:
        raise ConfigError(
            f"{directory} adapts {', '.join(sorted(kinds | extras))}, but fedlora trains only linear layers and "
            f"saved modules. Train it with peft; fedlora merges the result."
        )
    scales = {file.scale(module) for module in file.modules}
    scaling = scales.pop() if len(scales) == 1 else 1.0
    adapter, spec = read_adapter(directory, scaling=scaling, limits=limits)
    saved = sorted({path.rpartition(".")[0] for path in file.heads if file.kind(path) == "head"})
    lora = LoRASettings(targets=list(file.modules), scaling=scaling, saved=saved)
    model = AdaptedModel.load(base, task, lora, labels=labels, seed=seed, device=device)
    fresh, _ = model.seed_adapter(adapter.ranks, seed=seed)
    if set(fresh.modules) != set(adapter.modules):
        odd = sorted(set(fresh.modules) ^ set(adapter.modules))
        raise AdapterFormatError(f"{directory} does not fit the base model {base}: it differs in {odd[:2]}.")
    heads: Mapping[str, Any] = {**fresh.heads, **adapter.heads}  # a first adapter may come without a classifier
    wrong = [path for path in heads if path not in fresh.heads or heads[path].shape != fresh.heads[path].shape]
    if wrong:
        raise AdapterFormatError(
            f"{directory}: {wrong[0]!r} has shape {tuple(heads[wrong[0]].shape)}, but the model needs "
            f"{tuple(fresh.heads[wrong[0]].shape) if wrong[0] in fresh.heads else 'none'}: another number of classes?"
        )
    return model, Adapter(adapter.modules, heads), spec


def _check_labels(start: Path, labels: Sequence[str], limits: Limits | None) -> None:
    """Raise `ConfigError` if the received adapter numbers its classes differently: its head would be trained under
    wrong names."""
    known = labels_of(start, limits)
    if labels and known and known != tuple(labels):
        raise ConfigError(
            f"{start} has the classes {quoted(list(known))} in this order, but the examples {quoted(list(labels))}: "
            f"its head would be trained under other names. Leave --labels out to use the adapter's, or give them in "
            f"its order; for other classes begin with a fresh adapter."
        )


def _named(spec: AdapterSpec, base: str, digests: Mapping[str, str], *, received: bool) -> AdapterSpec:
    """The spec with a base model name that others can use, if there is one. A received adapter's name stays, unless it
    is a path and this site has a better name; its digests show that both mean one model."""
    name = hub_name(base) or (os.path.abspath(base) if Path(base).exists() else None)
    before = spec.base_model
    if name is None or (received and before and (is_path(name) or not is_path(before) or not digests)):
        return spec
    return replace(spec, config=ReadOnly({**spec.config, "base_model_name_or_path": name}))
