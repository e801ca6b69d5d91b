"""A node's trainer: the base model is loaded once and stays in the memory of `fedlora flower node`.

Flower starts a new process for each message to a node. That process (`ask`) passes the message through a UNIX socket in
the site's folder to the node's process, which answers one after the other (`answer`). Only this user can reach the
socket: a node makes its folders with mode 0700. A trainer is loaded for one content of site.toml and of join.toml,
whose facts are compared with the site's; if either file changes, another trainer takes its place.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlora.core.text import shown
from fedlora.doing import beating
from fedlora.errors import ConfigError, FedLoRAError, KeptStateError, UploadRefused
from fedlora.flower.envelope import RecordError, opened, parts, receipt_of
from fedlora.flower.places import SiteFolder

if TYPE_CHECKING:  # torch is loaded with the first message, and never in a ClientApp's process
    from fedlora.data.splits import Parts
    from fedlora.flower.site.node import Node
    from fedlora.flower.terms.settings import FederationSettings

Do = Literal["train", "evaluate"]
_TOLD = (ConfigError, RecordError, KeptStateError, UploadRefused)  # their texts contain nothing of the data


class TrainerFailed(FedLoRAError, RuntimeError):
    """The node's trainer could not do the work. The message is for the server."""


# ------------------------------------------------------------------------------------------------------ in a ClientApp


def ask(site_file: Path, do: Do, record: RecordDict) -> RecordDict:
    """The trainer's reply to a record, from this site's node.

    Raises:
        TrainerFailed: it failed, or its node has ended.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            with _address(socket_of(SiteFolder(site_file.parent))) as address:
                client.connect(address)
            connection = Connection(client.detach())
        with connection:
            send_message(connection, {"do": do}, record)
            words, reply = receive_message(connection)
    except (OSError, EOFError) as error:
        raise TrainerFailed("its node has ended") from error
    if reply is None:
        raise TrainerFailed(str(words["told"]))
    return reply


# --------------------------------------------------------------------------------------------------------- in the node


class Trainer:
    """The work of one site.

    Args:
        site: its folder; its state is below it.
    """

    def __init__(self, site: SiteFolder) -> None:
        self._site, self._content = site, b""
        self._node: Node | None = None

    def __call__(self, do: Do, record: RecordDict) -> RecordDict:
        """The reply to the server's message.

        Raises:
            ConfigError: the facts of server and site differ; nothing was trained. FedLoRAError, Exception: others.
        """
        opened(record, "the server", "this site")  # another protocol is told before a model is loaded
        content = self._site.site.read_bytes() + b"\0" + self._site.join.read_bytes()
        if self._node is None or content != self._content:
            self._node = None
            gc.collect()  # before another model takes the memory of this one
            self._node, self._content = self._loaded(), content
        return self._node.work(record) if do == "train" else self._node.measure(record)

    def _loaded(self) -> Node:
        from fedlora.flower.site.node import Node
        from fedlora.flower.terms.facts import check, model_facts, targets_of
        from fedlora.flower.terms.joining import JoinFile
        from fedlora.flower.terms.site_file import Site
        from fedlora.runs.preparation import prepare

        site, join = Site.read(self._site.site), JoinFile.read(self._site.join)
        settings = join.settings()
        config, name = settings.for_site(site), f"site {site.name!r}"
        files = model_facts(site.model, settings, config.model.revision)  # before the model is loaded, which would hide
        check(join.facts, files, name)  # the cause of a difference
        prepared = prepare(config, None, keep=keeping(settings), programs=self._site.state / "programs")
        check(join.facts, {"targets": targets_of(prepared.seed_adapter.modules)}, name)
        return Node(
            site.name, prepared.trainer, self._site.state,
            evaluators={"validation": prepared.validation, "test": prepared.test},
            terms=join.terms(), run=join.federation,
        )  # fmt: skip


def keeping(settings: FederationSettings) -> partial[Parts]:
    """What makes a site's parts of its file, by `held_out`, from these settings."""
    validation, test = settings.share("validation"), settings.share("test")
    return partial(held_out, seed=settings.run.seed, validation=validation, test=test)


def held_out(drawn: Parts, *, seed: int, validation: float, test: float) -> Parts:
    """A site's (training, validation, test) rows, whatever the split in `drawn`: a row u is held out for validation if
    h(seed, u) < validation, and for the test if it lies in the next `test`.

    h is SHA-256 of the seed and of the row's normalised input, as a number in [0, 1). So copies of a row go together,
    and a file may grow or be sorted between rounds: no row that was trained on is ever measured on, and nothing is
    stored. The shares are met on average, not exactly.

    Raises:
        ConfigError: no row is left to train on.
    """
    from fedlora.data.splits import digests, rearranged

    def part(row: str) -> int:
        h = int.from_bytes(hashlib.sha256(f"{seed}:{row}".encode()).digest()[:7]) / 2**56
        return 1 if h < validation else 2 if h < validation + test else 0

    parts = rearranged(drawn, [[part(row) for row in digests(each)] for each in drawn])
    if not len(parts[0]):
        raise ConfigError(
            f"data.validation = {validation:g} and data.test = {test:g} hold out all {sum(map(len, parts))} examples "
            f"of this site's file, and leave none to train on."
        )
    return parts


def answer(listening: socket.socket, work: Trainer, folder: Path) -> None:
    """Answer one message after the other at the socket, for as long as this process lives. folder: the site's."""
    while True:
        accepted, _ = listening.accept()
        with Connection(accepted.detach()) as connection:
            try:
                request, record = receive_message(connection)
                if record is None:
                    continue
                with beating(say, str(request["do"])):
                    words, reply = _answered(work, request["do"], record, folder)
                send_message(connection, words, reply)
            except (OSError, EOFError):  # it is gone
                pass


def _answered(work: Trainer, do: Do, record: RecordDict, folder: Path) -> tuple[dict[str, str], RecordDict | None]:
    """The reply, or words for the server ("told"); and a line for the site's own log. folder: the site's."""
    began = time.monotonic()
    try:
        if why := receipt_of(record).why:
            say(f"the server says: {shown(why, 1000)}")
        number = json.loads(str(parts(record, ConfigRecord)["config"]["parcel"]))["round"] + (do == "train")
        reply = work(do, record)
    except Exception as failure:
        say(f"{do} failed after {time.monotonic() - began:.1f} s: {type(failure).__name__}: {failure}")
        return {"told": told_to_server(failure, folder)}, None
    numbers = parts(reply, MetricRecord)["metrics"]
    loss = f", loss {numbers['loss']:.4f}" if "loss" in numbers else ""
    say(f"round {number}, {do}: {time.monotonic() - began:.1f} s{loss}; {numbers['num-examples']:.0f} examples here")
    return {}, reply


def told_to_server(error: BaseException, folder: Path) -> str:
    """An error's text for the server: all of it if it can contain nothing of the data, otherwise only its kind. The
    paths of the site's machine are replaced by their last part. folder: the site's."""
    if not isinstance(error, _TOLD):
        return f"{type(error).__name__}: the reason is only in the site's own log, as it may contain its data"
    words = re.sub(r"(?<!\w)/[^\s'\"]*/", "", str(error).replace(str(folder), "/site"))
    return f"{type(error).__name__}: {shown(words, 2000)}"


# ---------------------------------------------------------------------------------------------------------- the socket


def socket_of(site: SiteFolder) -> Path:
    """The socket of a site's node, for messages to its trainer."""
    return site.state / "trainer.sock"


def listening_at(site: SiteFolder) -> socket.socket:
    """The site's socket. Raises `OSError`."""
    path = socket_of(site)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listening.bind(address)
    listening.listen(4)
    return listening


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """A path to the socket that the system accepts, however long it is: 107 bytes are the most."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def say(line: str) -> None:
    """Print to stderr, that is systemd's journal or the terminal, beside Flower's own lines."""
    with contextlib.suppress(OSError, ValueError):  # a full disk ends no round
        print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------ records over it, without torch or pickle


def send_message(connection: Connection, words: dict[str, Any], record: RecordDict | None = None) -> None:
    """Send one message: a small JSON object, and records, whose arrays follow one by one."""
    arrays: list[bytes] = []
    records: dict[str, Any] = {}
    for name, part in (record or {}).items():
        if isinstance(part, ArrayRecord):
            records[name] = {"arrays": [[key, one.dtype, list(one.shape), one.stype] for key, one in part.items()]}
            arrays += [one.data for one in part.values()]
        else:
            records[name] = {"metrics" if isinstance(part, MetricRecord) else "config": dict(part)}
    connection.send_bytes(json.dumps({"said": words, "records": records if record is not None else None}).encode())
    for data in arrays:
        connection.send_bytes(data)


def receive_message(connection: Connection) -> tuple[dict[str, Any], RecordDict | None]:
    """The other side's message. Raises `OSError` or `EOFError` if the connection broke."""
    header = json.loads(connection.recv_bytes())
    if header["records"] is None:
        return header["said"], None
    record = RecordDict()
    for name, part in header["records"].items():
        if "arrays" in part:
            record[name] = ArrayRecord({
                key: Array(dtype, tuple(shape), stype, connection.recv_bytes())
                for key, dtype, shape, stype in part["arrays"]
            })  # fmt: skip
        elif "metrics" in part:
            record[name] = MetricRecord(part["metrics"])
        else:
            record[name] = ConfigRecord(part["config"])
    return header["said"], record
