"""`fedlora flower serve`: the SuperLink kept up, the rounds kept going, and all of it said in plain lines.

What ends is started again, after pauses that grow, and the rounds go on after the last checkpoint. It waits, for as
long as it takes, for sites and for room on the disk. It gives up only where the same step fails again and again without
a new round, or where the ServerApp says that the settings are wrong: then with the cause.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.flower import children
from fedlora.flower.ownership import opened_here
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.lines import nodes_line, size_of, time_of
from fedlora.flower.rounds.private_words import private_folder
from fedlora.flower.serving import database
from fedlora.flower.serving.serve_lock import serving
from fedlora.flower.serving.standing import Standing, keys_of, needed_room, room_of, standing
from fedlora.flower.serving.superlink import NodeFacts, RunFacts, SuperLinkError
from fedlora.flower.serving.superlink_process import SAYS
from fedlora.flower.serving.telling import Say, Seen, Telling
from fedlora.flower.site.tailing import Tail
from fedlora.flower.terms.privacy import promise

_WRONG = (
    "fedlora.errors.ConfigError", "fedlora.errors.AdapterFormatError", "fedlora.flower.terms.agreement.Disagreement"
)  # fmt: skip
_NO_ROOM = ("No space left", "disk is full", "Disk quota exceeded")


class GaveUp(FedLoRAError, RuntimeError):
    """The same thing failed too often without a new round; its cause is in the message."""


class Stopped(FedLoRAError):
    """Asked to stop. Nothing is wrong."""


class Lost(FedLoRAError, RuntimeError):
    """A process that the rounds need has ended, or does not answer."""


class Link(Protocol):
    """What is needed of `SuperLink`."""

    address: str
    log: Path

    def start(self, *, give_up: Callable[[], bool]) -> None: ...
    def stop(self) -> None: ...
    def left(self) -> list[int]: ...
    def ended(self) -> int | None: ...
    def playing(self) -> bool: ...
    def nodes(self) -> list[NodeFacts]: ...
    def runs(self) -> list[RunFacts]: ...
    def look(self, run: int) -> RunFacts: ...
    def words(self, run: int, lines: int = 5) -> str: ...
    def keep_keys(self, keys: Mapping[str, Path]) -> list[str]: ...
    def run(self) -> int: ...
    def stop_run(self, run: int) -> None: ...


@dataclass(frozen=True)
class Pace:
    """Seconds. events: between two looks for events. look: at the run and the processes. nodes: at who is online.
    remind: until the same is said again. pending: for a run to begin. pauses: after the first, second, ... failure.
    failures: without a new round, then it is given up. unanswered: looks without an answer until the SuperLink is
    started again, or without a process until a run is."""

    events: float = 0.5
    look: float = 3.0
    nodes: float = 5.0
    remind: float = 300.0
    pending: float = 60.0
    pauses: tuple[float, ...] = (2.0, 5.0, 15.0, 60.0, 180.0)
    failures: int = 6
    unanswered: int = 3


class Supervisor:
    """One federation's folder, served.

    Args:
        say: gets each line. stop: set it, from a signal's handler or another thread, and `serve` ends in order.
        seen: called with progress, nodes and standing whenever they were looked at, for metrics.
        on_up: called when the SuperLink is up, also after it was started again. also: about once a second; what it
            raises ends all. A trial starts its nodes and looks after them by these.
    """

    def __init__(
        self,
        home: Path,
        link: Link,
        say: Say,
        *,
        stop: threading.Event | None = None,
        pace: Pace = Pace(),
        seen: Seen = lambda progress, nodes, standing: None,
        on_up: Callable[[], None] = lambda: None,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.link, self._say, self._pace = FederationFolder(home.resolve()), link, say, pace
        self.stop, self._on_up, self._also = stop or threading.Event(), on_up, also
        self.telling = Telling(self.folder, say, pace.remind, seen)
        self._failures = self._thin = self._done = 0  # since the last new round; rounds done
        self._up, self._keys_at, self._log = False, 0, Tail(link.log)

    def serve(self) -> Standing:
        """Play the rounds to their end. Returns where the federation stands then, or when it was asked to stop.

        Raises:
            ConfigError: the folder cannot be served as it is, or another process serves it. GaveUp.
        """
        with serving(self.folder.lock):
            if standing(self.folder).finished:
                return standing(self.folder)
            self._greet()
            try:
                while not self.telling.standing().finished:
                    self._step()
            except Stopped:
                self._say("asked to stop: ending the run; the rounds that are done are stored")
            finally:
                self._down()
            return self.telling.standing()

    # ---------------------------------------------------------------------------------------------------- one attempt

    def _step(self) -> None:
        """Bring up what is missing and play, until something ends."""
        try:
            self._wait_for_room()
            self._bring_up()
            self._wait_for_nodes()
            self._after(self._play())
        except (Lost, SuperLinkError, children.ChildFailed, OSError) as error:
            self._failed(str(error))

    def _greet(self) -> None:
        if left := self.link.left():
            self._say(f"{len(left)} processes of an earlier run were still there: ended")
            children.end_all(left)
        gained = database.shrink(self.folder.database)
        if gained > 10_000_000 and self.telling.standing().privacy is None:
            self._say(f"the SuperLink's database gave {size_of(gained)} back")
        self.telling.events(quietly=True)
        now = self.telling.standing()
        self._done = now.done
        self._say(
            f"{now.name}: {counted(len(now.clients), 'site')}, {counted(now.rounds, 'round')}, {now.done} of them done"
        )
        if now.privacy is not None:
            self._say(f"private: {promise(now.privacy, now.rounds)}. docs/how-to/privacy.md")
            self._say(
                f"nothing that is said here tells of single sites: who is online, late or refused stands in "
                f"{private_folder(self.folder)}/log, for this server's operator alone. Look there after round 1"
            )

    def _bring_up(self) -> None:
        """The SuperLink, its list of keys, and no run of an earlier one."""
        if not self._up:
            self.link.start(give_up=self.stop.is_set)
            if self.stop.is_set():
                raise Stopped
            self._up = True
            held = size_of(database.size(self.folder.database))
            private = self.telling.standing().privacy is not None  # how much there is tells who sent
            self._say(
                f"SuperLink at {self.link.address} (TLS, node authentication)"
                + ("" if private else f"; its database holds {held}")
            )
        for run in self.link.runs():
            if not run.over:
                self._say(f"an earlier run was left {run.status}: stopped")
                self.link.stop_run(run.id)
        self._keep_keys(always=True)
        self._on_up()

    def _keep_keys(self, *, always: bool = False) -> None:
        """Register what is in keys/, and nothing else: also keys that come or go there while this runs."""
        keys = keys_of(self.folder)
        places = [place for place in (self.folder.path / "keys", *keys.values()) if place.exists()]
        newest = max((place.stat().st_mtime_ns for place in places), default=0)
        if always or newest != self._keys_at:
            for line in self.link.keep_keys(keys):
                self._say(line)
            self._keys_at = newest

    def _wait_for_room(self) -> None:
        while (room := room_of(self.folder)) < (needed := needed_room(self.folder)):
            self.telling.again(
                f"the disk of {self.folder.path} is full: {size_of(room)} free, {size_of(needed)} needed. Make room; "
                f"it goes on by itself",
                key="full",
            )
            self._sleep(self._pace.look)

    def _wait_for_nodes(self) -> None:
        """Until as many sites are online as a round needs."""
        while not self._enough():
            if (code := self.link.ended()) is not None:
                raise Lost(self._superlink_ended(code))
            self._keep_keys()
            now = self.telling.standing()
            there = nodes_line(self.telling.online, now.clients, now.needs)
            if now.privacy is None:
                self.telling.again(f"waiting for sites; {there}", key=there)  # said when it changed, too
            else:
                self.telling.again(
                    f"waiting until all {len(now.clients)} sites are online: a private federation begins then, and "
                    f"waits for nobody later. Who is missing stands in {private_folder(self.folder)}/log; who will not "
                    f"come is taken out by `fedlora flower remove`"
                )
            self._sleep(self._pace.nodes)

    def _enough(self) -> bool:
        self.telling.look(self.link.nodes())
        now = self.telling.standing()
        return len(set(self.telling.online) & set(now.clients)) >= now.quorum

    def _play(self) -> RunFacts:
        """A run of the Flower app, followed to its end.

        Raises:
            Lost: what it needs is gone. Stopped.
        """
        run = self.link.run()
        began = asked = time.monotonic()
        looked, unanswered, alone, seen = 0.0, 0, 0, False  # seen: running, at some look
        while True:
            self._follow()
            now = time.monotonic()
            if self.stop.is_set():
                self._stop_run(run)
                raise Stopped
            if (code := self.link.ended()) is not None:
                raise Lost(self._superlink_ended(code))
            if now - asked >= self._pace.nodes:
                asked = now
                self._watch_nodes()
            if now - looked >= self._pace.look:
                looked = now
                children.trim(self.link.log)
                facts = self._look(run)
                unanswered = 0 if facts is not None else unanswered + 1
                if unanswered >= self._pace.unanswered:
                    self._down()
                    raise Lost("the SuperLink lives and does not answer any more; it was ended")
                if facts is not None and facts.over:
                    self._follow()
                    return facts
                if facts is not None and facts.status == "running":
                    seen = True
                    alone = 0 if self.link.playing() else alone + 1
                    if alone >= self._pace.unanswered:
                        self._stop_run(run)
                        raise Lost("the ServerApp's process is gone, and said nothing: it was killed, or crashed")
                elif facts is not None and not seen and now - began > self._pace.pending:
                    self._stop_run(run)
                    self._down()
                    raise Lost(self._never_began())
            self._sleep(self._pace.events, raising=False)

    def _after(self, facts: RunFacts) -> None:
        """What the end of a run means.

        Raises:
            Lost: a failure. ConfigError: one that would come again.
        """
        now = self.telling.standing()
        if now.finished:
            return
        if facts.status == "finished:completed" and not self._failures and now.done:
            self._failures = 1  # no new round the next time, and it is a failure
            self._say(f"{now.done} of {counted(now.rounds, 'round')} done: going on")
            return
        words = f"{self._words(facts)}\n{facts.details}"
        if self.telling.progress.ended == "quorum" or "QuorumNotMet" in words:
            self._thin += 1
            pause = 2 * self._pause(self._thin) if self._enough() else 0.0
            self._say(f"too few sites gave a usable answer; tried again in {time_of(pause)}, once enough are online")
            self._sleep(pause)
        elif any(sign in words for sign in _NO_ROOM):
            self._say(f"the run ended for want of room: {children.last_words(facts.details)}")
            self._sleep(self._pace.look)
        elif any(name in words for name in _WRONG):  # what doctor says, too
            raise ConfigError(facts.details.removeprefix("ServerApp failed with exception: ") or words)
        elif facts.status == "finished:failed":
            said = facts.details or (
                children.last_words(words) if now.privacy is None else "logs/serverapp.log says why"
            )
            raise Lost(f"the run failed: {said}")
        else:
            raise Lost(f"the run is {facts.status}, and {now.done} of {counted(now.rounds, 'round')} done")

    def _failed(self, cause: str) -> None:
        """A pause, longer than the last one; or the end."""
        self._failures += 1
        if self.link.ended() is not None or not self._up:
            self._down()
        if self._failures >= self._pace.failures:
            raise GaveUp(
                f"given up after {self._failures} failures in a row without a new round. The last one: {cause}. "
                f"The logs are in {self.folder.logs}"
            )
        pause = self._pause(self._failures)
        self._say(f"{cause}; starting again in {time_of(pause)} (failure {self._failures} of {self._pace.failures})")
        self._sleep(pause)

    # --------------------------------------------------------------------------------------------------------- looking

    def _follow(self) -> None:
        """New events, and what the SuperLink refused; a new round is a success, whatever failed before it."""
        self.telling.events()
        for line in self._log.new():
            if line.startswith(SAYS):
                self.telling.say_of_sites(line.removeprefix(SAYS))
        if self.telling.progress.round > self._done:
            self._done = self.telling.progress.round
            self._failures = self._thin = 0

    def _look(self, run: int) -> RunFacts | None:
        try:
            return self.link.look(run)
        except SuperLinkError:
            return None

    def _watch_nodes(self) -> None:
        try:
            self._keep_keys()
            self.telling.look(self.link.nodes())
        except (SuperLinkError, ConfigError) as error:  # a key that was copied there and is none, or is another's
            if (self.link.ended() is None and "refuses" in str(error)) or isinstance(error, ConfigError):
                self.telling.again(str(error))  # where it does not answer at all, the look at the run counts that

    def _superlink_ended(self, code: int) -> str:
        words = "killed" if code == -9 else children.last_words(children.tail(self.link.log))
        return f"the SuperLink ended with code {code}: {words}"

    def _never_began(self) -> str:
        words = children.last_words(children.tail(self.link.log))
        return (
            f"the run did not begin within {self._pace.pending:.0f} s: the SuperLink's SuperExec could not start the "
            f"ServerApp. The SuperLink's last words: {words}"
        )

    def _words(self, facts: RunFacts) -> str:
        """What the ServerApp said, which Flower shows nobody: kept in logs/serverapp.log."""
        try:
            said = self.link.words(facts.id, 400)
        except SuperLinkError:
            return ""
        path = self.folder.logs / "serverapp.log"
        with contextlib.suppress(OSError):  # a full disk, which is told elsewhere
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(opened_here(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(f"--- run {facts.id}, {facts.status}\n{said}\n")
            children.trim(path)
        return said

    # ---------------------------------------------------------------------------------------------------------- inside

    def _stop_run(self, run: int) -> None:
        try:
            self.link.stop_run(run)
        except SuperLinkError:
            return  # it is over, or the SuperLink is; the next start looks again

    def _down(self) -> None:
        self.link.stop()
        self._up = False

    def _pause(self, count: int) -> float:
        return self._pace.pauses[min(count, len(self._pace.pauses)) - 1]

    def _sleep(self, seconds: float, *, raising: bool = True) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._also()
            if self.stop.wait(min(left, 1.0)):
                break
        if raising and self.stop.is_set():
            raise Stopped


__all__ = ["GaveUp", "Link", "Lost", "Pace", "Stopped", "Supervisor"]
