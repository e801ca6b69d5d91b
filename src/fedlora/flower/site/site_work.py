"""A site's work in its trainer: settings from the message, model and data from site.toml, loaded once.

It compares the server's facts with the site's before it loads the model, and again before it trains.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flwr.app import RecordDict

from fedlora.core.text import shown
from fedlora.errors import ConfigError, KeptStateError, UploadRefused
from fedlora.flower.envelope import Envelope, RecordError, opened, receipt_of
from fedlora.flower.places import SiteFolder

if TYPE_CHECKING:  # torch is loaded with the first message, so that earlier errors are answered at once
    from fedlora.flower.site.node import Node

log = logging.getLogger(__name__)
Do = Literal["train", "evaluate"]
_TOLD = (ConfigError, RecordError, KeptStateError, UploadRefused)  # their texts contain nothing of the data


def content_of(site_file: Path, record: RecordDict) -> bytes:
    """What a site's work is loaded from: its site.toml, and the settings in the server's message. Raises `RecordError`
    for a message without settings, `ConfigError`."""
    settings = opened(record, "the server", "this site").settings
    if not settings:
        raise RecordError("the server's message carries no settings; it must come from `fedlora flower serve`.")
    try:
        return site_file.read_bytes() + b"\0" + settings.encode()
    except OSError as error:
        raise ConfigError(f"the site file {site_file} cannot be read: {error.strerror}.") from error


class SiteWork:
    """The work of one site, for one `content_of`, from which the first message loads it.

    Args:
        site_file: site.toml; the site's state and facts about the base model are beside it.
    """

    def __init__(self, site_file: Path) -> None:
        self._file = site_file
        self._node: Node | None = None

    def __call__(self, do: Do, record: RecordDict) -> RecordDict:
        """The reply to the server's message.

        Raises:
            Disagreement: the facts of server and site differ; nothing was trained.
            FedLoRAError, Exception: anything else.
        """
        if self._node is None:
            self._node = self._loaded(opened(record, "the server", "this site"), record)
        return self._node.work(record) if do == "train" else self._node.measure(record)

    def _loaded(self, envelope: Envelope, record: RecordDict) -> Node:
        from fedlora.flower.records import record_parcel
        from fedlora.flower.site.held_out import keep_held_out, record_of
        from fedlora.flower.site.node import Node, has_trained
        from fedlora.flower.terms.agreement import Facts, check
        from fedlora.flower.terms.facts import model_facts, targets_of
        from fedlora.flower.terms.joining import JoinFile
        from fedlora.flower.terms.settings import FederationSettings
        from fedlora.flower.terms.site_file import Site
        from fedlora.runs.preparation import prepare

        settings, site = FederationSettings.from_travelling(envelope.settings), Site.read(self._file)
        here = SiteFolder(self._file.parent)
        state = here.state
        files = model_facts(site.model, settings)  # before the model is loaded, whose errors hide the cause
        check(Facts.from_text(envelope.facts), files, site.name, whole=False)
        parcel, _ = record_parcel(record)
        joined = JoinFile.read(here.join).federation
        first = parcel.round == 0 and not has_trained(state, joined, site.name)
        kept, counted = record_of(state, joined, site.name), receipt_of(record).counted > 0
        keep = partial(keep_held_out, record=kept, first=first, counted=counted)
        prepared = prepare(settings.for_site(site), None, keep=keep, programs=state / "programs")
        return Node(
            site.name, prepared.trainer, state,
            evaluators={"validation": prepared.validation, "test": prepared.test},
            facts=replace(files, targets=targets_of(prepared.seed_adapter.modules)), run=joined,
        )  # fmt: skip


def told_to_server(error: BaseException, folder: Path) -> str:
    """An error's text for the server: all of it if it can contain nothing of the data, otherwise only its kind.

    Args:
        folder: the site's. Its path, and those of data and model, are replaced.
    """
    from fedlora.flower.terms.agreement import Disagreement

    kind = type(error).__name__
    if _no_room(error):
        return f"{kind}: no space is left on this site's disk for a round's state. The server asks it again"
    if isinstance(error, (*_TOLD, Disagreement)):
        words = str(error)
        for path, name in _places(folder).items():
            words = words.replace(path, name)
        return f"{kind}: {shown(words, 2000)}"
    return f"{kind}: the reason is only in the site's own log (state/logs/trainer.log), as it may contain its data"


def _no_room(error: BaseException | None) -> bool:
    """Whether a full disk, or a full quota, caused an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _places(folder: Path) -> dict[str, str]:
    """Paths of the site's machine, the longest first -> their replacements."""
    found = {str(folder): "<site>", str(folder.resolve()): "<site>"}
    with contextlib.suppress(Exception):  # the file itself may have caused the error
        from fedlora.flower.terms.site_file import Site

        site = Site.read(folder / "site.toml")
        found |= {path: name for path, name in ((site.data, "<its data>"), (site.model, "<its model>")) if "/" in path}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


__all__ = ["Do", "SiteWork", "content_of", "told_to_server"]
