"""What a run may replace when it goes on: adapters and uploads that it wrote itself, nothing that was put there.

Weights say who wrote them (`adapters.mark`). Those of older versions do not; they are the run's own where they are what
its stored state gives, and get the mark then, since the state is gone a few rounds later.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from fedlora.adapters.io import read_adapter
from fedlora.adapters.mark import put, written_by
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.adapters.uploads import FILE
from fedlora.adapters.writer import RUN
from fedlora.analysis.audit import relative_difference
from fedlora.client import receive
from fedlora.core import checkpoint
from fedlora.core.folders import FolderKind, check_target
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory, as_pruned
from fedlora.errors import FedLoRAError
from fedlora.runs.exported import export_folder
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.runs.readouts import global_adapter
from fedlora.server.state import RunState

UPLOADS_BY = "fedlora"  # what uploads of a run say: `write_upload`
_SAME = 1e-5  # relative, in the Frobenius norm: other libraries round otherwise, and a step of training is far more


def check_replaceable(prepared: Prepared, folder: RunFolder, state: RunState) -> None:
    """To ask before rounds are played: is everything that going on replaces the run's own? state: that it goes on from.

    Raises:
        ConfigError: a file, or weights, that the run did not write; the message names it.
    """
    kind, plain = export_folder(prepared.tokenizer), export_folder(prepared.tokenizer, marked=False)
    older = []
    for place in exports(folder, [client.id for client in prepared.clients]):
        unmarked = (place / WEIGHTS_FILE).is_file() and not written_by(place / WEIGHTS_FILE)
        if unmarked and plain.stranger(place) is None and _is_of(place, prepared, folder, state):
            check_target(place, force=True, kind=plain)
            older.append(place)
        else:
            check_target(place, force=True, kind=kind)
    for round in range(state.round + 1, prepared.config.run.rounds + 1):
        if os.path.lexists(folder.uploads(round)):
            check_target(folder.uploads(round), force=True, kind=UPLOADS)
    for place in older:
        put(place / WEIGHTS_FILE, RUN)


def exports(folder: RunFolder, clients: Collection[str]) -> Iterator[Path]:
    """The adapters' places that are taken. What else is in clients/ is no client's, and stays."""
    places = [folder.path / "adapter", folder.path / "best", *(folder.path / "clients" / name for name in clients)]
    return (place for place in places if os.path.lexists(place))


def clear_exports(prepared: Prepared, folder: RunFolder, made: Collection[Path]) -> None:
    """Removes the adapters of an earlier end of the run that this one has not. made: those that it has."""
    kind = export_folder(prepared.tokenizer)
    for place in exports(folder, [client.id for client in prepared.clients]):
        if place not in made:
            check_target(place, force=True, kind=kind)
            shutil.rmtree(place)
    clients = folder.path / "clients"
    if clients.is_dir() and not any(clients.iterdir()):
        clients.rmdir()


def _is_of(place: Path, prepared: Prepared, folder: RunFolder, state: RunState) -> bool:
    """Whether an adapter is what the run's stored state gives."""
    try:
        found, _ = read_adapter(place, scaling=prepared.spec.scaling)
        return any(_alike(found, one) for one in _given(place, prepared, folder, state))
    except FedLoRAError:  # no adapter, or no sound state: then nothing says that it is the run's
        return False


def _given(place: Path, prepared: Prepared, folder: RunFolder, state: RunState) -> Iterator[Adapter]:
    server = prepared.server
    if place.name == "best" and place.parent == folder.path:
        loaded = checkpoint.load_newest(folder.best_checkpoint, RunState, server.method.State, tell=lambda said: None)
        states = [loaded[1]] if loaded else []
    else:
        ended = folder.ended()
        loaded = None
        if ended is not None and ended < state.round:  # it was being made longer
            loaded = checkpoint.load_newest(
                folder.checkpoints, RunState, server.method.State, upto=ended, tell=lambda said: None
            )
        states = [state, *([loaded[1]] if loaded else [])]
    for one in states:
        if place.parent == folder.path:
            if server.has_global_model(one.server):
                yield global_adapter(server, one)
            continue
        (client,) = (client for client in prepared.clients if client.id == place.name)
        memory = one.clients.get(client.id, ClientMemory())
        download = server.download(one.server, as_pruned(client, memory))
        yield receive(download, memory.kept).folded()


def _alike(one: Adapter, other: Adapter) -> bool:
    if set(one.modules) != set(other.modules) or set(one.heads) != set(other.heads):
        return False
    if any(one.heads[name].shape != head.shape for name, head in other.heads.items()):
        return False
    for name, head in other.heads.items():
        gap = float((one.heads[name].double() - head.double()).norm())
        if gap > _SAME * float(head.double().norm()):
            return False
    for name, lora in other.modules.items():
        (B, A), (mine, my) = lora.factors, one.modules[name].factors
        if (B.shape[0], A.shape[1]) != (mine.shape[0], my.shape[1]):
            return False
    return relative_difference(one.modules, other.modules) <= _SAME


def _uploads_of_a_run(folder: Path) -> str | None:
    """Why these are not all a run's, in words. Those without a mark are an older version's where they are not newer
    than their upload.json, which is written after them."""
    for weights in sorted(folder.glob(f"*/{WEIGHTS_FILE}")):
        by, facts = written_by(weights), weights.with_name(FILE)
        older = not by and facts.is_file() and weights.stat().st_mtime_ns <= facts.stat().st_mtime_ns
        if by != UPLOADS_BY and not older:
            return f"holds weights that the run did not write ({weights.parent.name}/{WEIGHTS_FILE})"
    return None


_PARTS = "|".join(name.replace(".", "[.]") for name in (CONFIG_FILE, WEIGHTS_FILE, "README.md", FILE))
UPLOADS = FolderKind("a round's uploads", None, rf"[^/]+/({_PARTS})", _uploads_of_a_run, "choose another --out")
