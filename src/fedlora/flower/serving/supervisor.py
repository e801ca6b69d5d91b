"""`fedlora flower serve`: start, follow and end the SuperLink and the rounds together.

It waits as long as needed for sites and for room on the disk, and runs a round again if too few answered. Any other
failure ends everything: with `Lost`, exit code 1, after which the systemd unit (or compose) restarts it, and it
continues after the last checkpoint; or with `ConfigError`, exit code 2, if the app itself says that it would fail the
same way again.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from rich.filesize import decimal

from fedlora.doing import doing
from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.flower import processes
from fedlora.flower.processes import serving
from fedlora.flower.serving.standing import Standing, check_derived, keys_of, needed_room, room_of
from fedlora.flower.serving.superlink import RunFacts, SuperLink, SuperLinkError
from fedlora.flower.serving.superlink_process import SAYS
from fedlora.flower.serving.telling import Say, Telling, nodes_line
from fedlora.flower.terms.privacy import promise


class Stopped(FedLoRAError):
    """The user asked to stop. Nothing is wrong."""


class Lost(FedLoRAError, RuntimeError):
    """A process that the rounds need has ended, or does not answer. A restart continues."""


@dataclass(frozen=True)
class Pace:
    """Seconds. events: between two checks for events. look: between checks of the run, the processes and the nodes.
    remind: until the same line is repeated. pending: for a run to begin. thin: until a round in which too few answered
    is tried again. unanswered: checks without an answer until the SuperLink is given up."""

    events: float = 0.5
    look: float = 3.0
    remind: float = 300.0
    pending: float = 60.0
    thin: float = 30.0
    unanswered: int = 3


class Supervisor:
    """Serves the federation's folder of a SuperLink.

    Args:
        say: gets each line. stop: set it, from a signal's handler or another thread, and `serve` ends in order.

    Raises:
        ConfigError: files of the folder name other ports than federation.toml.
    """

    def __init__(self, link: SuperLink, say: Say, *, stop: threading.Event | None = None, pace: Pace = Pace()) -> None:
        self.folder, self.link, self._say, self._pace = link.folder, link, say, pace
        self.stop = stop or threading.Event()
        check_derived(self.folder)
        self.telling = Telling(self.folder, say, pace.remind)
        self._read = link.log.stat().st_size if link.log.is_file() else 0  # bytes of its log

    def on_up(self) -> None:
        """Called when the SuperLink is up."""

    def also(self) -> None:
        """Called about once a second. An exception ends everything."""

    def on_down(self) -> None:
        """Called at the end, before the SuperLink is stopped."""

    def serve(self) -> Standing:
        """Play the rounds to their end. Returns the standing then, or when it was asked to stop.

        Raises:
            ConfigError: the folder cannot be served as it is, or another process serves it. Lost, SuperLinkError,
                OSError: problems that a restart may solve.
        """
        with serving(self.folder.lock):
            if (now := self.telling.standing()).finished:
                return now
            self._greet()
            try:
                with doing("rounds", now.rounds) as self.telling.step:
                    self.telling.step.done = now.done
                    self._wait_for_room()
                    self._bring_up()
                    while not self.telling.standing().finished:
                        self._wait_for_room()
                        self._wait_for_nodes()
                        done = self.telling.round
                        self._after(self._play(), self.telling.round > done)
            except Stopped:
                self._say("asked to stop: ending the run; finished rounds are stored")
            finally:
                try:
                    self.on_down()
                finally:
                    self.link.stop()
            return self.telling.standing()

    # ------------------------------------------------------------------------------------------------------- beginning

    def _greet(self) -> None:
        processes.end_all_of(self.folder.flower_home)  # what an earlier `serve` left
        self.telling.events(quietly=True)
        now = self.telling.standing()
        self._say(
            f"{now.name}: {counted(len(now.clients), 'site')}, {counted(now.rounds, 'round')}, {now.done} of them done"
        )
        if now.privacy is not None:
            self._say(f"private: {promise(now.privacy, now.rounds)}. docs/how-to/privacy.md")

    def _wait_for_room(self) -> None:
        while words := self._full():
            self.telling.again(words, key="full")
            self._sleep(self._pace.look)

    def _full(self) -> str:
        """That there is no room for a round; "" if there is."""
        room, needed = room_of(self.folder), needed_room(self.folder)
        return "" if room >= needed else (
            f"the disk of {self.folder.path} is full: {decimal(room)} free, {decimal(needed)} needed. Make room; the "
            f"server then continues by itself"
        )  # fmt: skip

    def _bring_up(self) -> None:
        """Start the SuperLink, set its list of keys, and end runs of an earlier one."""
        self.link.start(give_up=self.stop.is_set)
        if self.stop.is_set():
            raise Stopped
        self._say(f"SuperLink at {self.link.address} (TLS, node authentication)")
        for run in self.link.runs():
            if not run.over:
                self._say(f"an earlier run was left {run.status}: stopped")
                self.link.stop_run(run.id)
        self._keep_keys()
        self.on_up()

    def _keep_keys(self) -> None:
        """Register exactly the keys in keys/, including those that come or go while this runs."""
        for line in self.link.keep_keys(keys_of(self.folder)):
            self._say(line)

    def _wait_for_nodes(self) -> None:
        """Wait until as many sites are online as a round needs."""
        while True:
            self._require_superlink()
            self._watch_nodes()
            now = self.telling.standing()
            if len(set(self.telling.online) & set(now.clients)) >= now.needed:
                return
            there = nodes_line(self.telling.online, now.clients, now.needs)
            self.telling.again(f"waiting for sites; {there}", key=there)  # repeated early if it changed
            self._sleep(self._pace.look)

    # ------------------------------------------------------------------------------------------------------ the rounds

    def _play(self) -> RunFacts:
        """Follow a run of the Flower app to its end. Raises `Lost` if something that it needs is gone; `Stopped`."""
        run = self.link.run()
        began = time.monotonic()
        looked, unanswered, seen = 0.0, 0, False  # seen: some check found it running
        while True:
            self.telling.events()
            now = time.monotonic()
            if self.stop.is_set():
                with suppress(SuperLinkError):  # the run is over, or the SuperLink is gone
                    self.link.stop_run(run)
                raise Stopped
            self._require_superlink()
            if now - looked >= self._pace.look:
                looked, facts = now, None
                self._tell_refused()
                with suppress(SuperLinkError):  # what is not answered is counted below
                    self._watch_nodes()
                with suppress(SuperLinkError):
                    facts = self.link.look(run)
                unanswered = 0 if facts is not None else unanswered + 1
                if unanswered >= self._pace.unanswered:
                    raise Lost("the SuperLink runs but does not answer any more; it was ended")
                if facts is not None and facts.over:
                    self.telling.events()
                    return facts
                seen = seen or (facts is not None and facts.status == "running")
                if facts is not None and not seen and now - began > self._pace.pending:
                    raise Lost(
                        f"the run did not begin within {self._pace.pending:.0f} s: the SuperLink's SuperExec could not "
                        f"start the ServerApp. The SuperLink's last line: {processes.last_line(self.link.log)}"
                    )
            self._sleep(self._pace.events, raising=False)

    def _after(self, facts: RunFacts, new: bool) -> None:
        """Act on the end of a run. new: whether it has played a round. If the disk is full, that is why it failed, and
        the caller waits for room.

        Raises:
            Lost: another failure. ConfigError: one that the app itself says would come again.
        """
        now = self.telling.standing()
        done = f"{now.done} of {counted(now.rounds, 'round')} done"
        if now.finished:
            return
        if self.telling.ended == "refused":
            raise ConfigError(self.telling.now["ended"]["why"])
        if self.telling.ended == "quorum":
            self._say("too few sites gave a usable answer; the server tries again once enough are online")
            self._sleep(self._pace.thin)
        elif facts.status == "finished:completed" and new:
            self._say(f"{done}: going on")
        elif facts.status == "finished:failed":
            failed = f"the run failed, {done}: {facts.details or 'logs/serverapp.log says why'}"
            if not self._full():
                raise Lost(failed)
            self._say(failed)
        else:
            raise Lost(f"the run is {facts.status}, and {done}")

    # --------------------------------------------------------------------------------------------------------- looking

    def _tell_refused(self) -> None:
        """Report what the SuperLink has refused since the last check, from its log."""
        processes.trim(self.link.log)
        with suppress(FileNotFoundError), self.link.log.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read:
                self._read = 0  # the log was trimmed
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if line.startswith(SAYS.encode()):
                    self._say(line.decode(errors="replace").strip().removeprefix(SAYS))

    def _watch_nodes(self) -> None:
        """Keep the list of keys, and report who is online. A file that is no key, or another site's, stops nothing."""
        try:
            self._keep_keys()
        except (SuperLinkError, ConfigError) as error:
            self.telling.again(str(error))
        self.telling.look(self.link.nodes())

    def _require_superlink(self) -> None:
        if (code := self.link.ended()) is not None:
            words = "killed" if code == -9 else processes.last_line(self.link.log)
            raise Lost(f"the SuperLink ended with code {code}: {words}")

    def _sleep(self, seconds: float, *, raising: bool = True) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.also()
            if self.stop.wait(min(left, 1.0)):
                break
        if raising and self.stop.is_set():
            raise Stopped


__all__ = ["Lost", "Pace", "Stopped", "Supervisor"]
