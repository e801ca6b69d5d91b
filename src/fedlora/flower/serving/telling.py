"""The output of `serve`: new events as lines, nodes that come and go, and reminders of what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fedlora.doing import Step
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.journal import beside, read_now, read_rounds, round_line
from fedlora.flower.serving.standing import Standing, standing
from fedlora.flower.serving.superlink import NodeFacts

Say = Callable[[str], None]


class Telling:
    """Follows a federation's folder and its nodes, and reports changes.

    remind: seconds until a line about waiting is repeated.
    """

    def __init__(self, folder: FederationFolder, say: Say, remind: float) -> None:
        self.say, self._remind = say, remind
        self.folder, self.round, self.now = folder, 0, dict[str, Any]()
        self.nodes = tuple[NodeFacts, ...]()
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
        """Report the rounds since the last check."""
        lines, self.now = read_rounds(self.folder.rounds), read_now(self.folder.now)
        for line in lines:
            if line["round"] > self.round and not quietly:
                for said in [*beside(line), round_line(line, self.standing().rounds)]:
                    self.say(said)
        self.round = max((line["round"] for line in lines), default=0)
        self.step.done, self.step.what = self.round, "rounds"
        if asked := self.now.get("asked"):
            answered = f"{len(self.now['answered'])} of {len(asked)} sites have answered"
            self.step.what = f"round {self.now['round']}, {answered}; rounds"

    @property
    def ended(self) -> str:
        """Why the last run's rounds ended, as in now.json; "" while they go on."""
        return str((self.now.get("ended") or {}).get("kind", ""))

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


def nodes_line(online: Sequence[str], expected: Sequence[str], needs: str, heard: float | None = None) -> str:
    """Who is online and who is missing. needs: a round's requirement, in words. heard: seconds since the oldest
    heartbeat: a node that died since then still counts as online."""
    missing = [name for name in expected if name not in online]
    there = f"online: {', '.join(online) if online else 'nobody'}"
    if online and heard is not None:
        there += f", each heard within the last {max(heard, 1):.0f} s"
    if not missing:
        return f"{there} (all {len(expected)})"
    return f"{there}; missing: {', '.join(missing)} ({needs})"


__all__ = ["Say", "Telling", "nodes_line"]
