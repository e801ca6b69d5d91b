"""`fedlora flower serve`: start, follow and end the SuperLink and the rounds together.

The rounds wait as long as needed for sites; a run that ended because too few answered is followed by another. Any other
failure ends everything:
with `Lost`, exit code 1, after which the systemd unit (or compose) restarts it, and it continues after the last
checkpoint; or with `ConfigError`, exit code 2, if the app itself says that it would fail the same way again. What the
ServerApp logs is its output.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from fedlora.doing import Step, doing
from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.flower import processes
from fedlora.flower.processes import locked
from fedlora.flower.server.journal import read_now
from fedlora.flower.server.status import Standing, keys_of, standing
from fedlora.flower.server.superlink import RunFacts, SuperLink, SuperLinkError
from fedlora.flower.server.superlink_process import SAYS
from fedlora.flower.terms.privacy import promise

Say = Callable[[str], None]
_TIME = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ ")  # which `say` puts there itself


class Stopped(FedLoRAError):
    """The user asked to stop. Nothing is wrong."""


class Lost(FedLoRAError, RuntimeError):
    """A process that the rounds need has ended, or does not answer. A restart continues."""


@dataclass(frozen=True)
class Pace:
    """Seconds. log: between two looks at the logs. look: between checks of the run, the processes and the nodes.
    remind: until the same line is repeated. pending: for a run to begin. thin: until a round in which too few answered
    is played again. unanswered: checks without an answer until the SuperLink is given up."""

    log: float = 0.5
    look: float = 3.0
    remind: float = 300.0
    pending: float = 60.0
    thin: float = 30.0
    unanswered: int = 3


class Supervisor:
    """Serves the federation's folder of a SuperLink.

    Args:
        say: gets each line. stop: set it, from a signal's handler or another thread, and `serve` ends in order.
        beside: entered once nobody else serves the folder, and left before the SuperLink is stopped.
    """

    def __init__(
        self, link: SuperLink, say: Say, *, stop: threading.Event | None = None, pace: Pace = Pace(),
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.folder, self.link, self._say, self._pace = link.folder, link, say, pace
        self.stop, self._beside = stop or threading.Event(), beside
        self._logs = [(Tail(self.folder.logs / "serverapp.log"), ""), (Tail(link.log), SAYS)]
        self._standing, self._step = standing(self.folder), Step("rounds")
        self._there, self._said_at = "", dict[str, float]()

    def serve(self) -> Standing:
        """Play the rounds to their end. Returns the standing then, or when it was asked to stop.

        Raises:
            ConfigError: the folder cannot be served as it is, or another process serves it. Lost, SuperLinkError,
                OSError: problems that a restart may solve.
        """
        with locked(self.folder.lock, f"serves {self.folder.path} (fedlora flower status)"):
            if (now := self.standing()).why:
                return now
            processes.end_all_of(self.folder.flower_home)  # what an earlier `serve` left
            sites, rounds = counted(len(now.ranks), "site"), counted(now.rounds, "round")
            self._say(f"{now.name}: {sites}, {rounds}, {now.done} of them done")
            if now.privacy is not None:
                self._say(f"private: {promise(now.privacy, now.rounds)}. docs/how-to/privacy.md")
            try:
                with doing("rounds", now.rounds) as self._step, self._beside():
                    self._bring_up()
                    while not (now := self.standing()).why:
                        self.folder.now.unlink(missing_ok=True)  # it says how an earlier run ended
                        self._after(self._play(), self.standing().done > now.done)
            except Stopped:
                self._say("asked to stop: ending the run; finished rounds are stored")
            finally:
                self.link.stop()
            return self.standing()

    def standing(self) -> Standing:
        """The federation's standing. A file that is broken meanwhile is reported, and the last good one stays."""
        try:
            self._standing = standing(self.folder)
        except ConfigError as error:
            self._again(f"{error} What was read before stays until this run ends; the next one would be refused")
        self._step.done = self._standing.done
        return self._standing

    def _bring_up(self) -> None:
        """Start the SuperLink, set its list of keys, and end runs of an earlier one."""
        self.link.start()
        if self.stop.is_set():
            raise Stopped
        self._say(f"SuperLink at {self.link.address} (TLS, node authentication)")
        for run in self.link.runs():
            if not run.over:
                self._say(f"an earlier run was left {run.status}: stopped")
                self.link.stop_run(run.id)
        self._keep_keys()

    def _keep_keys(self) -> None:
        """Register exactly the keys in keys/, including those that come or go while this runs."""
        for line in self.link.keep_keys(keys_of(self.folder)):
            self._say(line)

    def _play(self) -> RunFacts:
        """Follow a run of the Flower app to its end. Raises `Lost` if something that it needs is gone; `Stopped`."""
        run, began = self.link.run(), time.monotonic()
        looked, unanswered, seen = 0.0, 0, False  # seen: some check found it running
        while True:
            self._pass_on()
            now = time.monotonic()
            if self.stop.is_set():
                with suppress(SuperLinkError):  # the run is over, or the SuperLink is gone
                    self.link.stop_run(run)
                raise Stopped
            if (code := self.link.ended()) is not None:
                words = "killed" if code == -9 else processes.last_line(self.link.log)
                raise Lost(f"the SuperLink ended with code {code}: {words}")
            if now - looked >= self._pace.look:
                looked, facts = now, None
                self.standing()
                with suppress(SuperLinkError):  # what is not answered is counted below
                    self._watch_nodes()
                    facts = self.link.look(run)
                unanswered = 0 if facts is not None else unanswered + 1
                if unanswered >= self._pace.unanswered:
                    raise Lost("the SuperLink runs but does not answer any more; it was ended")
                if facts is not None and facts.over:
                    self._pass_on()
                    return facts
                seen = seen or (facts is not None and facts.status == "running")
                if facts is not None and not seen and now - began > self._pace.pending:
                    raise Lost(
                        f"the run did not begin within {self._pace.pending:.0f} s: the SuperLink's SuperExec could not "
                        f"start the ServerApp. The SuperLink's last line: {processes.last_line(self.link.log)}"
                    )
            self.stop.wait(self._pace.log)

    def _after(self, facts: RunFacts, new: bool) -> None:
        """Act on the end of a run. new: whether it has played a round.

        Raises:
            Lost: a failure. ConfigError: one that the app itself says would come again.
        """
        now = self.standing()
        done = f"{now.done} of {counted(now.rounds, 'round')} done"
        ended: Mapping[str, str] = read_now(self.folder.now).get("ended") or {}
        if now.why:
            return
        if ended.get("kind") == "refused":
            raise ConfigError(ended["why"])
        if ended.get("kind") == "quorum":
            self._say("too few sites gave a usable answer: the round is played again")
            if self.stop.wait(self._pace.thin):
                raise Stopped
        elif facts.status == "finished:completed" and new:
            self._say(f"{done}: going on")
        elif facts.status == "finished:failed":
            raise Lost(
                f"the run failed, {done}: {facts.details or 'logs/serverapp.log says why'} (served again, it goes on)"
            )
        else:
            raise Lost(f"the run is {facts.status}, and {done}")

    def _pass_on(self) -> None:
        """Report what the ServerApp has logged since the last check, and what the SuperLink has refused."""
        for log, begins in self._logs:
            for line in log.new():
                if line.startswith(begins):
                    self._say(_TIME.sub("", line.removeprefix(begins)))

    def _watch_nodes(self) -> None:
        """Keep the list of keys, and report who is online and who is missing, if that has changed. A file that is no
        key, or another site's, stops nothing."""
        try:
            self._keep_keys()
        except (SuperLinkError, ConfigError) as error:
            self._again(str(error))
        online = [node.name for node in self.link.nodes() if node.status == "online"]
        if (line := nodes_line(online, [*self._standing.ranks])) != self._there:
            self._there = line
            self._say(line)

    def _again(self, line: str) -> None:
        """Print a line, but not within `remind` seconds of the last time."""
        now = time.monotonic()
        if now - self._said_at.get(line, -self._pace.remind) >= self._pace.remind:
            self._said_at[line] = now
            self._say(line)


class Tail:
    """The lines that are written to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, path.stat().st_size if path.is_file() else 0

    def new(self) -> list[str]:
        """The whole lines since the last call."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read:
                self._read = 0  # another one is in its place
            file.seek(self._read)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read += len(text)
            return text.decode(errors="replace").splitlines()
        return []


def nodes_line(online: Sequence[str], expected: Sequence[str]) -> str:
    """Who is online and who is missing."""
    missing = [name for name in expected if name not in online]
    there = f"online: {', '.join(online) if online else 'nobody'}"
    return f"{there}; missing: {', '.join(missing)}" if missing else f"{there} (all {len(expected)})"
