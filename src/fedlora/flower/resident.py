"""A node's trainer as a process that stays: the base model is loaded once, not for every message.

Flower starts a new process for each message to a node. That process (`ask`) is thin: it hands the message through a
UNIX socket in a private directory to the trainer, and starts one where there is none. The trainer ends with the
SuperNode that it works for, or after an hour without work. The socket answers the same user only.

    python -m fedlora.flower.resident CONFIG CLIENT FOLDER [--owner PID]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedlora.errors import FedLoRAError
from fedlora.flower.wire import receive_message, send_message

IDLE = 3600.0
_START = 300.0  # seconds that a trainer may take to load its model


class TrainerFailed(FedLoRAError, RuntimeError):
    """The node's trainer could not do the work; its own words are the message."""


def ask(config: Path, client: str, folder: Path, record: RecordDict) -> RecordDict:
    """The trainer's reply to a record, from one that runs or is started now.

    Raises:
        TrainerFailed: it failed, or none could be started.
    """
    connection = _connected(config, client, folder)
    with connection:
        send_message(connection, {"do": "work"}, record)
        said, reply = receive_message(connection)
    if reply is None:
        raise TrainerFailed(str(said.get("error", "no reply")))
    return reply


def _connected(config: Path, client: str, folder: Path) -> socket.socket:
    """A connection to the node's trainer; one start at a time."""
    private_directory(folder)
    path = socket_of(config, client, folder)
    found = _connect(path)
    if found is not None:
        return found
    with (folder / "starting.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _connect(path)
        if found is not None:
            return found
        command = [sys.executable, "-m", "fedlora.flower.resident", str(config), client, str(folder)]
        owner = _supernode()
        with (folder / "trainer.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *(["--owner", str(owner)] if owner else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True,
            )  # fmt: skip
        until = time.monotonic() + _START
        while time.monotonic() < until:
            found = _connect(path)
            if found is not None:
                return found
            if process.poll() is not None:
                break
            time.sleep(0.1)
        if process.poll() is None:
            process.kill()  # or it would come later, and be nobody's
            process.wait()
    words = (folder / "trainer.log").read_text(errors="replace").strip().splitlines()[-1:]
    raise TrainerFailed(f"the trainer of {client!r} did not start: {words[0] if words else 'it said nothing'}")


def socket_of(config: Path, client: str, folder: Path) -> Path:
    """Where the trainer of this client listens: another place for another configuration, which it has not loaded."""
    content = config.read_bytes() if config.is_file() else b""
    digest = hashlib.sha256(b"\0".join([client.encode(), str(config).encode(), content])).hexdigest()[:12]
    return folder / f"trainer-{digest}.sock"


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def private_directory(folder: Path) -> None:
    """Make it, for this user only; raise where it is somebody else's."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        raise TrainerFailed(f"{folder} belongs to another user.")
    if facts.st_mode & 0o077:
        folder.chmod(0o700)


def _supernode() -> int | None:
    """The process id of the SuperNode that started this process, however far up."""
    pid = os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"flower-supernode") for word in words[:3]):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None


# --------------------------------------------------------------------------------------------------- in the trainer


def serve(work: Callable[[RecordDict], RecordDict], path: Path, *, owner: int | None, idle: float = IDLE) -> None:
    """Answer one message after the other at the socket `path`, until the owner is gone or nothing came for `idle` s."""
    private_directory(path.parent)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    path.chmod(0o600)
    mine = path.stat().st_ino
    listening.listen(4)
    listening.settimeout(1.0)
    if owner is not None:  # also while it trains: an orphan would keep its accelerator
        threading.Thread(target=_watch, args=(owner,), daemon=True).start()
    last = time.monotonic()
    try:
        while time.monotonic() - last < idle:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(None)
                if _same_user(connection):
                    _answer(connection, work)
            last = time.monotonic()
    finally:
        listening.close()
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == mine:  # and not that of a trainer which came after this one
                path.unlink()


def _watch(owner: int) -> None:
    while True:
        try:
            os.kill(owner, 0)
            if Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                os._exit(0)
        except (ProcessLookupError, FileNotFoundError):
            os._exit(0)
        time.sleep(1.0)


def _same_user(connection: socket.socket) -> bool:
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", facts)[1] == os.getuid())


def _answer(connection: socket.socket, work: Callable[[RecordDict], RecordDict]) -> None:
    try:
        said, record = receive_message(connection)
        if said.get("do") == "work" and record is not None:
            try:
                reply: RecordDict | None = work(record)
                error = ""
            except Exception as failure:
                reply, error = None, f"{type(failure).__name__}: {failure}"
                print(error, file=sys.stderr, flush=True)
            send_message(connection, {"error": error}, reply)
    except (ConnectionError, OSError, ValueError) as error:
        print(f"a connection broke off: {error}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("client")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--owner", type=int)
    options = parser.parse_args(arguments)
    path = socket_of(options.config, options.client, options.folder)
    serve(node_work(options.config, options.client, options.folder), path, owner=options.owner)


def node_work(config: Path, client: str, folder: Path) -> Callable[[RecordDict], RecordDict]:
    """The work of one node of a run's configuration: its model and its own data, loaded now."""
    from fedlora.flower.node import Node
    from fedlora.runs.config import load_config
    from fedlora.runs.preparation import prepare

    loaded = load_config(config, [])
    prepared: Any = prepare(loaded, None)
    return Node(client, prepared.trainer, folder / "state", form=loaded.server.upload).work


if __name__ == "__main__":
    main()
