"""`fedlora flower node`: keep a SuperNode running for a site, and say in short lines what happens and what is wrong.

Before a SuperNode is started the server is asked whether it would let this site in (`reach`); what stands in the way is
told, and asked again after growing pauses. A SuperNode that ends is started again. Nothing here ends by itself: only
SIGTERM and SIGINT do it, with exit code 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedlora.core import beside
from fedlora.errors import ConfigError
from fedlora.flower import children
from fedlora.flower.ownership import opened_here
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.node_log import Said, round_of, said
from fedlora.flower.site.owner import OWNER
from fedlora.flower.site.reach import NOTICED, Found
from fedlora.flower.site.tailing import Tail
from fedlora.flower.site.work_log import Follower

PAUSES = (2.0, 4.0, 8.0, 15.0, 30.0)  # seconds between tries; the last one goes on
AGAIN = 600.0  # seconds after which a trouble that lasts is told once more
_STILL_ONLINE = 10.0  # seconds: while the server takes a dead node of ours for online, at most 60 s
_STABLE = 60.0  # seconds of life after which a SuperNode that ends begins with short pauses again
_SLOW_START = 90.0  # seconds without being online after which the server is asked why
_STEP = 0.5


class NodeProcess:
    """One site's SuperNode, started again whenever it ends.

    Args:
        look: asks the server. command: starts a SuperNode. say: takes each line for the screen.
    """

    def __init__(
        self,
        site: SiteFolder,
        *,
        look: Callable[[], Found],
        command: Callable[[], list[str]],
        say: Callable[[str], None],
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self._site, self._look, self._command, self._say = site, look, command, say
        self._pauses, self._next = pauses, 0
        self._log = site.logs / "node.log"
        self._stop = threading.Event()
        self._told, self._told_at, self._since = "", 0.0, 0.0
        self._work: Follower | None = None

    def stop(self, *_: object) -> None:
        """End everything, soon. A handler of signals too."""
        self._stop.set()

    def run(self) -> int:
        """Until `stop`. The exit code: 0.

        Raises:
            ConfigError: another one runs in this folder.
        """
        with held(self._site):
            self._work = Follower(self._site.path)
            while not self._stop.is_set():
                found = self._look()
                if found.fate == "admitted":
                    self._tell_clock(found)
                    pause = self._live()
                else:
                    self._trouble(found.fate, found.why)
                    pause = None
                if not self._stop.is_set():
                    self._stop.wait(self._pause() if pause is None else pause)
            self._say("stopped.")
        return 0

    # ------------------------------------------------------------------------------------------------------ one child

    def _live(self) -> float | None:
        """One SuperNode's life. Returns the pause before the next one; None: the growing one."""
        env = {**children.environment(self._site.state / "flwr"), OWNER: str(os.getpid())}
        try:
            if self._log.is_file() and self._log.stat().st_size > 10 * 2**20:
                os.replace(self._log, self._log.with_name("node.log.1"))
            tail = Tail(self._log)
            process = children.started(self._command(), self._log, env)
        except OSError as error:  # no memory, no room, no more processes: it may pass
            self._trouble("no start", f"no SuperNode can be started on this machine: {error}.")
            return None
        began, seen = time.monotonic(), _Seen()
        try:
            while not self._stop.is_set():
                code = process.poll()
                self._follow(tail, seen)
                if code is not None:
                    return self._ended(code, seen, time.monotonic() - began)
                self._look_again(seen, time.monotonic() - began)
                self._stop.wait(_STEP)
            return 0.0
        finally:
            children.end(process)
            self._follow(tail, seen)

    def _follow(self, tail: Tail, seen: _Seen) -> None:
        for line in tail.new():
            event = said(line)
            if event is not None:
                self._heard(event, seen)
        for work in self._work.new() if self._work is not None else ():
            self._say(work.line())

    def _heard(self, event: Said, seen: _Seen) -> None:
        match event.kind:
            case "online":
                seen.online, seen.lost = True, None
                self._well("admitted: online, waiting for work.")
            case "round":
                if event.what != seen.round:
                    seen.round = event.what
                    asked = "asked to measure." if "-measure-" in event.what else "work has come."
                    self._say(f"round {round_of(event.what)}: {asked}")
            case "not sent" | "not received":
                what = "the answer could not be sent" if event.kind == "not sent" else "the work could not be fetched"
                self._say(f"round {round_of(seen.round) or '?'}: {what}: {event.what}")
            case "lost":
                seen.lost = seen.lost or (time.monotonic(), 0.0)
            case "back" | "came through":
                self._came_through(seen)
            case "exit":
                seen.exit = int(event.what)
            case "code":
                seen.code = int(event.what)
            case "app":
                self._trouble(event.what, event.what)
            case "broken off":
                seen.why = event.what
            case _:
                pass

    def _came_through(self, seen: _Seen) -> None:
        """Any call that the server answers ends what was said of its absence: Flower's threads try each for itself, and
        one may go on trying, or never say that it came through, while others work."""
        if seen.lost is not None:
            gone, seen.lost = time.monotonic() - seen.lost[0], None
            self._well(f"the server is back: it answers {gone:.0f} s after the first call that failed.")

    def _look_again(self, seen: _Seen, age: float) -> None:
        """Ask why, where a SuperNode says that the server is gone, or takes too long to be online."""
        if seen.lost is None and not (not seen.online and age > _SLOW_START):
            return
        since, asked = seen.lost or (time.monotonic(), 0.0)
        if time.monotonic() - asked < 15.0:
            return
        found = self._look()
        seen.lost = (since, time.monotonic())
        if found.fate != "admitted":
            self._trouble(found.fate, f"{found.why} The node keeps trying.")

    def _ended(self, code: int, seen: _Seen, age: float) -> float | None:
        """Say why a SuperNode ended by itself."""
        if seen.code == 2004:
            self._trouble(
                "still online",
                "the server knows this site's key and takes it for online still: its last node ended without saying so "
                "(killed, or the power or the line was cut). It is let in when that one's heartbeat has lapsed, within "
                "60 s. Should it last, the same key is in use on another machine.",
            )
            return _STILL_ONLINE
        if age > _STABLE:
            self._next = 0
        if seen.why:
            why = seen.why
        elif code == 0:
            why = "it ended by itself with code 0, as when the server refuses its clock or its key (401)"
        else:
            why = children.last_words(children.tail(self._log))
            number = seen.exit or code
            why = f"code {number}: {why}" if number >= 0 else f"signal {signal.Signals(-number).name}"
        self._say(f"the SuperNode ended after {age:.0f} s ({why}); another one is started. Its log: {self._log}")
        return None

    # ---------------------------------------------------------------------------------------------------------- words

    def _pause(self) -> float:
        self._next += 1
        return self._pauses[min(self._next, len(self._pauses)) - 1]

    def _well(self, line: str) -> None:
        self._told, self._next = "", 0
        self._say(line)

    def _trouble(self, kind: str, why: str) -> None:
        """Told when it begins, and every ten minutes while it lasts."""
        now = time.monotonic()
        if kind != self._told:
            self._told, self._told_at, self._since = kind, now, now
            self._say(f"waiting: {why}")
        elif now - self._told_at > AGAIN:
            self._told_at = now
            self._say(f"still waiting, since {(now - self._since) / 60:.0f} minutes: {why}")

    def _tell_clock(self, found: Found) -> None:
        if found.ahead is not None and abs(found.ahead) > NOTICED:
            way = "ahead of" if found.ahead > 0 else "behind"
            self._say(
                f"this machine's clock is {abs(found.ahead):.0f} s {way} the server's. It is let in; set the clock."
            )


class _Seen:
    """What one SuperNode has said so far."""

    def __init__(self) -> None:
        self.online = False
        self.round = ""
        self.lost: tuple[float, float] | None = None  # since when; when the server was last asked why
        self.exit = self.code = 0
        self.why = ""


@contextlib.contextmanager
def held(site: SiteFolder) -> Iterator[None]:
    """The site's folder is in use by this process. Raises `ConfigError` where another one has it."""
    site.state.mkdir(mode=0o700, exist_ok=True)
    path = site.state / "node.lock"
    descriptor = opened_here(path, os.O_RDWR)
    try:
        if beside.hold(descriptor) is False:
            pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise ConfigError(
                f"`fedlora flower node` runs for {site.path} already (process {pid or '?'}): one is enough, and two "
                f"would be taken for one another by the server. Is it the systemd unit?"
            )
        with contextlib.suppress(OSError):  # a full disk: then the number is not told, and the lock holds
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def supernode_command(site: SiteFolder, address: str, key: Path) -> list[str]:
    """What starts this site's SuperNode with that key; its own API on a free port of loopback."""
    command = [sys.executable, "-m", "fedlora.flower.site.supernode", "--superlink", address, "--host", "127.0.0.1"]
    command += ["--port", str(free_port()), "--node-config", f"site={json.dumps(str(site.site))}"]
    return [*command, "--root-certificates", str(site.ca), "--auth-supernode-private-key", str(key)]


def free_port() -> int:
    """A port of loopback that nobody uses at the moment."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def files_checked(site: Path) -> tuple[list[str], list[str]]:
    """What is wrong with a site's data, base model and folder, and what is worth a line, found by a process of its own:
    reading them takes libraries that this one does without, for as long as it lives. Raises `ChildFailed`."""
    command = [sys.executable, "-m", "fedlora.flower.site.site_checks", str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    try:
        said = json.loads(done.stdout)
        return [str(line) for line in said["wrong"]], [str(line) for line in said["told"]]
    except (ValueError, KeyError, TypeError):
        words = children.last_words(done.stderr)  # it was killed, or has found no memory: not the site's fault
        raise children.ChildFailed(f"the site could not be checked: code {done.returncode}, {words}") from None


__all__ = ["AGAIN", "PAUSES", "NodeProcess", "files_checked", "free_port", "held", "supernode_command"]
