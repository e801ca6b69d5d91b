"""A node's trainer as a lasting process: the base model is loaded once, not for every message.

Flower starts a new process for each message to a node. That process (`ask`) is thin: it passes the message through a
UNIX socket in the site's folder to the trainer, and starts one if there is none. A trainer serves one content of
site.toml and of the server's settings: if either changes, it ends, and another one starts. It also ends with the
process for which it works. The socket answers only the same user.

    python -m fedlora.flower.site.resident SITE/site.toml [--owner PID]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.app import RecordDict

from fedlora.doing import beating
from fedlora.errors import FedLoRAError
from fedlora.flower import children
from fedlora.flower.messages.wire import receive_message, send_message
from fedlora.flower.ownership import opened_here
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.site_work import Changed, Do, SiteWork, told_to_server

IDLE = 3600.0  # seconds without work after which a trainer with a living owner ends
ALONE = 120.0  # the same without an owner, because nobody else would end it
_START = 120.0  # seconds that a trainer may take to listen; the model is loaded with its first message
_TRIES = 5  # trainers that may end, or have other settings, before a message is given up
_TAKEN = {"taken": True}  # the trainer's first words to a client that it serves
_LITTLE = 2**16  # the most bytes that are free on a full disk

Work = Callable[[Do, RecordDict], RecordDict]


class TrainerFailed(FedLoRAError, RuntimeError):
    """The node's trainer could not do the work. The message is for the server; `full` is for the site alone."""

    def __init__(self, told: str, full: str = "") -> None:
        super().__init__(told)
        self.full = full or told


def ask(site_file: Path, do: Do, record: RecordDict) -> RecordDict:
    """The trainer's reply to a record, from a running trainer or one started now.

    Raises:
        TrainerFailed: it failed or died, or none could be started.
    """
    site = SiteFolder(site_file.parent)
    for _ in range(_TRIES):
        try:
            connection = _connected(site)
        except OSError as error:  # for example a disk without room for a lock or a log
            raise TrainerFailed(told_to_server(error, site.path), f"its trainer is not reached: {error}") from error
        with connection:
            if not _taken(connection):
                continue
            try:
                send_message(connection, {"do": do}, record)
                said, reply = receive_message(connection)
            except (OSError, EOFError) as error:
                raise _died(site) from error
        if said.get("changed"):
            _wait_for_its_end(site)
            continue
        if reply is None:
            raise TrainerFailed(str(said.get("told", "it gave no reply")), str(said.get("error", "")))
        return reply
    raise TrainerFailed(
        f"{_TRIES} trainers, one after the other, ended before they took the work, or had another site.toml or other "
        "settings than now."
    )


def _taken(connection: Connection) -> bool:
    """Whether the trainer accepts the connection. One that is ending leaves it in its queue, and resets it: it had no
    work then, and another trainer can do it. Waits for as long as the trainer works for another client."""
    try:
        said, _ = receive_message(connection)
    except (OSError, EOFError):
        return False
    return said == _TAKEN


def socket_of(site: SiteFolder) -> Path:
    """The socket of a site's trainer."""
    return site.state / "trainer.sock"


def _connected(site: SiteFolder) -> Connection:
    """A connection to the site's trainer; only one is started at a time."""
    private_directory(site.state)
    path = socket_of(site)
    found = _connect(path)
    if found is not None:
        return found
    with os.fdopen(opened_here(site.state / "starting.lock", os.O_WRONLY), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _connect(path)
        if found is not None:
            return found
        private_directory(site.logs)
        with contextlib.suppress(FileNotFoundError):  # a trainer's log is its own, and that before it is kept
            os.replace(_log(site), site.logs / "trainer.log.1")
        owner = children.owner_of_this()
        command = [sys.executable, "-m", "fedlora.flower.site.resident", str(site.site)]
        with os.fdopen(opened_here(_log(site), os.O_WRONLY | os.O_APPEND), "ab") as log:
            process = subprocess.Popen(
                [*command, *(["--owner", str(owner)] if owner else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True,
            )  # fmt: skip
        until = time.monotonic() + _START
        while time.monotonic() < until:
            found = _connect(path)
            if found is not None:
                process.returncode = 0  # it outlives this process; otherwise `Popen` would warn when it is collected
                return found
            if process.poll() is not None:
                break
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()  # otherwise it would come later, without an owner
            process.wait()
    words, full = _words(site), _full(site)
    raise TrainerFailed(
        f"its trainer did not start{full and f': {full}'}",
        f"the trainer did not start: {words[-1] if words else full or 'no word'}",
    )


def _died(site: SiteFolder) -> TrainerFailed:
    """The known facts about a trainer that ended during its work."""
    words = _words(site)
    fatal = [line for line in words if line.startswith("Fatal Python error")]
    why = fatal[-1] if fatal else _full(site) or (
        "its process ended without a word: it crashed, somebody killed it, or the system killed it because memory ran "
        "out (then journalctl -k says so; MemoryMax of its unit is also a limit; a smaller train.batch_size needs less)"
    )  # fmt: skip
    told = f"its trainer died in the middle of the work: {why}"
    return TrainerFailed(told, f"{told}. Its last line: {words[-1]}" if words else told)


def _full(site: SiteFolder) -> str:
    """A note that the site's disk is full, if it is: then a trainer ends silently, and its log is unchanged."""
    return "no space is left on this site's disk" if shutil.disk_usage(site.state).free < _LITTLE else ""


def _log(site: SiteFolder) -> Path:
    return site.logs / "trainer.log"


def _words(site: SiteFolder) -> list[str]:
    """The last lines of the trainer's log."""
    return [line for line in children.tail(_log(site), 65536).splitlines() if line.strip()]


def _wait_for_its_end(site: SiteFolder, seconds: float = 30.0) -> None:
    """Wait until the trainer that is leaving has ended, with its model: two may not fit on one device."""
    until = time.monotonic() + seconds
    while socket_of(site).exists() and time.monotonic() < until:
        time.sleep(0.05)


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """A path to the socket that the system accepts, however long it is: 107 bytes are the most."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _connect(path: Path) -> Connection | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        return None
    return Connection(connection.detach())


def private_directory(folder: Path) -> None:
    """Make the folder for this user only; raise if it belongs to somebody else."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        raise TrainerFailed("its folder belongs to another user", f"{folder} belongs to another user.")
    if facts.st_mode & 0o077:
        folder.chmod(0o700)


# --------------------------------------------------------------------------------------------------- in the trainer


def serve(work: Work, path: Path, *, owner: int | None, idle: float | None = None) -> None:
    """Answer one message after the other at the socket `path`, until the owner is gone, nothing came for `idle` s, or
    the loaded work belongs to another site.toml or other settings than the current ones."""
    private_directory(path.parent)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listening.bind(address)
    path.chmod(0o600)
    mine = path.stat().st_ino
    listening.listen(4)
    listening.settimeout(1.0)
    if owner is not None:  # also while it trains: an orphan would keep its accelerator
        children.end_with(owner)
    patience = idle if idle is not None else IDLE if owner is not None else ALONE
    last, going = time.monotonic(), True
    try:
        while going and time.monotonic() - last < patience:
            try:
                accepted, _ = listening.accept()
            except TimeoutError:
                continue
            accepted.settimeout(None)
            ours = _same_user(accepted)
            with Connection(accepted.detach()) as connection:
                if ours:
                    going = _answer(connection, work, path)
            last = time.monotonic()
    finally:
        listening.close()
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == mine:  # and not the socket of a later trainer
                path.unlink()


def _same_user(connection: socket.socket) -> bool:
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", facts)[1] == os.getuid())


def _answer(connection: Connection, work: Work, path: Path) -> bool:
    """Do the requested work, and return whether to continue."""
    try:
        send_message(connection, _TAKEN)
        said, record = receive_message(connection)
        do = said.get("do")
        if do not in ("train", "evaluate") or record is None:
            return True
        try:
            with beating(_say, str(do)):
                reply: RecordDict | None = work(do, record)
            words: dict[str, object] = {}
        except Changed:
            send_message(connection, {"changed": True}, None)
            return False
        except Exception as failure:
            full = f"{type(failure).__name__}: {failure}"
            reply, words = None, {"told": told_to_server(failure, path.parent.parent), "error": full}
        send_message(connection, words, reply)  # before the log, which may fail on a full disk
        if reply is None:
            _say(str(words["error"]))
    except (OSError, EOFError, ValueError) as error:
        _say(f"a connection broke off: {error}")
    return True


def _say(line: str) -> None:
    """Write to the trainer's log, if its disk has room."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    import faulthandler

    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("site", type=Path)
    parser.add_argument("--owner", type=int)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    serve(SiteWork(options.site), socket_of(SiteFolder(options.site.parent)), owner=options.owner)


if __name__ == "__main__":
    main()
