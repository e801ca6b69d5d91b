"""A node's trainer as a lasting process: the base model is loaded once, not for every message.

Flower starts a new process for each message to a node. That process (`ask`) passes the message through a UNIX socket in
the site's folder to the SuperNode's process (`pass_on`), whose `Trainer` is a child process, started with the first
message. A trainer serves one content of site.toml and of the server's settings: if either changes, another one takes
its place. It ends with the SuperNode. Only this user can reach the socket: a node starts only in a folder of mode
0700, and what it makes is for this user (umask 077).

    python -m fedlora.flower.site.resident SITE/site.toml DESCRIPTOR PID_OF_THE_SUPERNODE
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedlora.core.process import how_ended, killed_with
from fedlora.doing import beating
from fedlora.errors import FedLoRAError
from fedlora.flower import processes
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.site_work import Do, SiteWork, content_of, told_to_server
from fedlora.flower.site.wire import receive_message, send_message

_PATIENCE = 10.0  # seconds for a trainer to end by itself before it is killed, and for a client to begin to speak
_LITTLE = 2**16  # the most bytes that are free on a full disk

Answer = tuple[dict[str, Any], RecordDict | None]  # {} and the reply; or "told" the server and "error" here, and None
Work = Callable[[Do, RecordDict], RecordDict]


class TrainerFailed(FedLoRAError, RuntimeError):
    """The node's trainer could not do the work. The message is for the server; `full` is for the site alone."""

    def __init__(self, told: str, full: str = "") -> None:
        super().__init__(told)
        self.full = full or told


def ask(site_file: Path, do: Do, record: RecordDict) -> RecordDict:
    """The trainer's reply to a record, through this site's SuperNode.

    Raises:
        TrainerFailed: it failed or died, or could not be started.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            with _address(socket_of(SiteFolder(site_file.parent))) as address:
                client.connect(address)
            connection = Connection(client.detach())
        with connection:
            return _exchanged(connection, do, record)
    except (OSError, EOFError) as error:
        raise TrainerFailed("its node has ended", f"its node is not reached: {error}") from error


def _exchanged(connection: Connection, do: Do, record: RecordDict) -> RecordDict:
    """The reply at the other end. Raises `TrainerFailed` for words in its place; `OSError`, `EOFError`."""
    send_message(connection, {"do": do}, record)
    said, reply = receive_message(connection)
    if reply is None:
        raise TrainerFailed(str(said["told"]), str(said["error"]))
    return reply


def socket_of(site: SiteFolder) -> Path:
    """The socket of a site's SuperNode, for messages to its trainer."""
    return site.state / "trainer.sock"


def answered(work: Work, do: Do, record: RecordDict, folder: Path) -> Answer:
    """The reply that some work gives; or, of an exception, the words for the server and for the site. folder: its."""
    try:
        return {}, work(do, record)
    except TrainerFailed as failure:
        return {"told": str(failure), "error": failure.full}, None
    except Exception as failure:
        return {"told": told_to_server(failure, folder), "error": f"{type(failure).__name__}: {failure}"}, None


# --------------------------------------------------------------------------------------------------- in the SuperNode


def listening_at(site: SiteFolder) -> socket.socket:
    """The site's socket. Raises `OSError`."""
    path = socket_of(site)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listening.bind(address)
    listening.listen(4)
    return listening


def pass_on(listening: socket.socket, work: Work, folder: Path) -> None:
    """Answer one message after the other at the socket, for as long as this process lives. folder: the site's."""
    while True:
        accepted, _ = listening.accept()
        with Connection(accepted.detach()) as connection:
            try:
                if not connection.poll(_PATIENCE):  # it says nothing, and others wait
                    continue
                said, record = receive_message(connection)
                if record is not None:
                    send_message(connection, *answered(work, said["do"], record, folder))
            except (OSError, EOFError):  # it is gone
                pass
            except Exception as error:  # no ClientApp of Flower's sends that
                _say(f"a message at {socket_of(SiteFolder(folder))} cannot be read: {type(error).__name__}: {error}")


class Trainer:
    """A site's trainer: at most one process, which `work` starts, and replaces when it is of an older content."""

    def __init__(self, site: SiteFolder) -> None:
        self._site, self._content = site, b""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def work(self, do: Do, record: RecordDict) -> RecordDict:
        """The trainer's reply to a record.

        Raises:
            TrainerFailed: it failed or died. ConfigError, RecordError: site.toml cannot be read, or the record has no
                settings. OSError: it could not be started, for example without room for its log.
        """
        content = content_of(self._site.site, record)
        if content != self._content or self._process is None or self._process.poll() is not None:
            self.end()
            self._pipe, self._content = self._started(), content
        assert self._pipe is not None
        processes.trim(self._log)
        try:
            return _exchanged(self._pipe, do, record)
        except TrainerFailed:
            raise
        except Exception as error:  # also half an answer, after which the pipe is of no more use
            raise self._died(self.end()) from error

    def end(self) -> int:
        """End the process, with its model and its own children. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if self._pipe is not None:
            self._pipe.close()  # then it has no more work
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        processes.end(process)
        return process.returncode

    def _started(self) -> Connection:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a trainer's log is its own, and that before it is kept
            os.replace(self._log, self._log.with_name("trainer.log.1"))
        here, there = Pipe()
        command = [sys.executable, "-m", "fedlora.flower.site.resident", str(self._site.site)]
        command += [str(there.fileno()), str(os.getpid())]
        with there, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[there.fileno()],
            )  # fmt: skip
        return here

    def _died(self, code: int) -> TrainerFailed:
        """The known facts about a trainer that ended before it answered."""
        told = f"its trainer ended {how_ended(code)} before it answered"
        if code == -9:
            told += ". MemoryMax of its unit is also a limit; a smaller train.batch_size needs less"
        if shutil.disk_usage(self._site.state).free < _LITTLE:  # then it ends silently, and its log is unchanged
            told += ". No space is left on this site's disk"
        words = [line for line in processes.tail(self._log, 65536).splitlines() if line.strip()]
        return TrainerFailed(told, f"{told}. Its last line: {words[-1]}" if words else told)

    @property
    def _log(self) -> Path:
        return self._site.logs / "trainer.log"


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """A path to the socket that the system accepts, however long it is: 107 bytes are the most."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------- in the trainer


def serve(work: Work, connection: Connection, folder: Path) -> None:
    """Answer one message after the other, until the SuperNode closes the connection. folder: the site's."""
    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            said, record = receive_message(connection)
            assert record is not None
            with beating(_say, str(said["do"])):
                words, reply = answered(work, said["do"], record, folder)
            send_message(connection, words, reply)  # before the log, which may fail on a full disk
            if reply is None:
                _say(str(words["error"]))


def _say(line: str) -> None:
    """Write to the trainer's log, if its disk has room."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    import faulthandler

    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    site_file, descriptor, owner = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    killed_with(owner)  # also while it trains, or is stopped: an orphan would keep its accelerator
    faulthandler.enable()
    serve(SiteWork(site_file), Connection(descriptor), site_file.parent)


if __name__ == "__main__":
    main()
