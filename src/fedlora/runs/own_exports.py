"""What a run may replace when it goes on: adapters and uploads that it wrote itself, nothing that was put there.

Weights say who wrote them (`adapters.mark`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from fedlora.adapters.mark import written_by
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.adapters.uploads import FILE
from fedlora.core.folders import FolderKind, check_target
from fedlora.runs.exported import export_folder
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.server.state import RunState

UPLOADS_BY = "fedlora"  # what uploads of a run say: `write_upload`


def check_replaceable(prepared: Prepared, folder: RunFolder, state: RunState) -> None:
    """To ask before rounds are played: is everything that going on replaces the run's own? state: that it goes on from.

    Raises:
        ConfigError: a file, or weights, that the run did not write; the message names it.
    """
    kind = export_folder(prepared.tokenizer)
    for place in exports(folder, [client.id for client in prepared.clients]):
        check_target(place, force=True, kind=kind)
    for round in range(state.round + 1, prepared.config.run.rounds + 1):
        if os.path.lexists(folder.uploads(round)):
            check_target(folder.uploads(round), force=True, kind=UPLOADS)


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


def _uploads_of_a_run(folder: Path) -> str | None:
    """Why these are not all a run's, in words."""
    for weights in sorted(folder.glob(f"*/{WEIGHTS_FILE}")):
        if written_by(weights) != UPLOADS_BY:
            return f"holds weights that the run did not write ({weights.parent.name}/{WEIGHTS_FILE})"
    return None


_PARTS = "|".join(name.replace(".", "[.]") for name in (CONFIG_FILE, WEIGHTS_FILE, "README.md", FILE))
UPLOADS = FolderKind("a round's uploads", None, rf"[^/]+/({_PARTS})", _uploads_of_a_run, "choose another --out")
