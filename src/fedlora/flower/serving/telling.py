"""The output of `serve`: new events as lines, nodes that come and go, and reminders of what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fedlora.doing import Step
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.events import EventReader
from fedlora.flower.rounds.log_lines import lines_of, nodes_line
from fedlora.flower.rounds.progress import Progress, after
from fedlora.flower.serving.standing import Standing, standing
from fedlora.flower.serving.superlink import NodeFacts

Say = Callable[[str], None]


class Telling:
    """Follows a federation's folder and its nodes, and reports changes.

    remind: seconds until a line about waiting is repeated.
    """

    def __init__(self, folder: FederationFolder, say: Say, remind: float) -> None:
        self.say, self._remind = say, remind
        self.folder, self._events = folder, EventReader(folder.events)
        self.progress, self.nodes = Progress(), tuple[NodeFacts, ...]()
        self._standing = standing(folder)
        self.step = Step("rounds")  # what `serve` is doing
        self._there, self._said_at = "", dict[str, float]()

    def standing(self) -> Standing:
        """The federation's standing. A file that is broken meanwhile is reported, and the last good one stays."""
        try:
            self._standing = standing(self.folder)
        except ConfigError as error:
            self.again(f"{error} What was read before stays until this run ends; the next one would be refused")
        return self._standing

    def events(self, *, quietly: bool = False) -> None:
        """Report the ServerApp's events since the last check."""
        for event in self._events.new():
            self.progress = after(self.progress, event)
            self.step.done, playing = self.progress.round, self.progress.playing
            self.step.what = "rounds"
            if playing is not None:
                answered = f"{len(self.progress.fates)} of {len(playing.asked)} sites have answered"
                self.step.what = f"round {playing.round}, {answered}; rounds"
            for line in [] if quietly else lines_of(event, self.standing().rounds):
                self.say(line)

    def look(self, nodes: Sequence[NodeFacts]) -> None:
        """Report who is online and who is missing, if that has changed."""
        self.nodes = tuple(nodes)
        now = self.standing()
        line = nodes_line(self.online, now.clients, now.needs)
        if line != self._there:
            self._there = line
            self._said_at[line] = time.monotonic()
            seen = [node.seen for node in self.nodes if node.status == "online" and node.seen is not None]
            heard = time.time() - min(seen) if seen else None
            self.say(nodes_line(self.online, now.clients, now.needs, heard))

    @property
    def online(self) -> list[str]:
        return [node.name for node in self.nodes if node.status == "online"]

    def again(self, line: str, key: str = "") -> None:
        """Print a line, but not within `remind` seconds of the last time. key: identifies equal lines."""
        now, key = time.monotonic(), key or line
        if now - self._said_at.get(key, -self._remind) >= self._remind:
            self._said_at[key] = now
            self.say(line)


__all__ = ["Say", "Telling"]
