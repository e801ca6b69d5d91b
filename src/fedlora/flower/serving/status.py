"""`fedlora flower status`: a federation's state, from its files, and its online nodes, if the SuperLink answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlora.errors import counted
from fedlora.flower.ownership import holder
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.events import read_events
from fedlora.flower.rounds.log_lines import time_of
from fedlora.flower.rounds.progress import Progress, fates_of, progress_of
from fedlora.flower.serving.standing import Standing, keys_of, room_of, standing
from fedlora.flower.serving.superlink import NodeFacts, SuperLink, SuperLinkError
from fedlora.flower.terms.privacy import promise
from fedlora.privacy.released import filtered


@dataclass(frozen=True)
class SiteStatus:
    """One site, as `status --json` tells it. node: "online", "offline", "registered" (admitted, never seen), "no key"
    (not admitted), "unknown" (no SuperLink answers). last_seen: the last contact with its node. fate, loss, norm: of
    the last round; "quarantined" as soon as it is no longer asked. fates: how often it trained, was late, ...,
    repeated attempts included."""

    rank: Any
    node: str
    last_seen: str | None
    fate: str | None
    why: str
    loss: float | None
    norm: float | None
    fates: Mapping[str, int]
    upload_bytes: int


@dataclass(frozen=True)
class Status:
    """served_by: the process that serves it, None if there is none. answers: whether the SuperLink answers."""

    standing: Standing
    progress: Progress
    sites: Mapping[str, SiteStatus]
    served_by: int | None
    answers: bool
    database: int
    free: int

    @property
    def private(self) -> bool:
        """Whether nothing may be reported about single sites."""
        return self.standing.privacy is not None

    def privacy(self) -> dict[str, Any]:
        """A private federation's guarantee, and the spending that its last round reports."""
        terms, line = self.standing.privacy, self.progress.lines.get(self.progress.round, {})
        if terms is None:
            return {}
        return {"promise": promise(terms, self.standing.rounds), **(line.get("privacy") or {})}

    def as_json(self, rounds: int = 10) -> dict[str, Any]:
        """Everything for programs, with the last `rounds` rounds; of a private federation what may be released."""
        if not self.private:
            return self._whole(rounds)
        told = {**self._whole(rounds), "privacy": self.privacy()}
        told["last_rounds"] = [filtered("status round", one, public=True) for one in told["last_rounds"]]
        return filtered("status", told, public=True)

    def _whole(self, rounds: int) -> dict[str, Any]:
        playing, now = self.progress.playing, self.standing
        return {
            "name": now.name,
            "round": now.done,
            "rounds": now.rounds,
            "finished": now.why or None,
            "needed": now.needed,
            "served_by": self.served_by,
            "superlink": self.answers,
            "began": self.progress.began or None,
            "last_event": self.progress.heard or None,
            "ended": self.progress.ended or None,
            "database_bytes": self.database,
            "disk_free_bytes": self.free,
            "playing": None
            if playing is None
            else {
                "round": playing.round,
                "attempt": playing.attempt,
                "asked": list(playing.asked),
                "since": playing.at,
                "fates": {name: fated.fate for name, fated in self.progress.fates.items()},
            },
            "sites": {name: asdict(site) for name, site in self.sites.items()},
            "last_rounds": [
                {
                    "round": number,
                    "loss": line.get("loss"),
                    "seconds": line.get("seconds"),
                    "measure_seconds": line.get("measure_seconds"),
                    "fates": fates_of(line),
                    "metrics": dict(line.get("metrics") or {}),
                    "site_mean": dict(line.get("site_mean") or {}),
                    **({"privacy": dict(line["privacy"])} if line.get("privacy") else {}),
                }
                for number, line in sorted(self.progress.lines.items())[-rounds:]
            ],
        }

    def headline(self) -> str:
        """Two lines for people, and one for each change of the settings."""
        now, progress = self.standing, self.progress
        over = "not served, for nothing is left to do; sites may stop" if now.finished else "not served at the moment"
        served = f"served by process {self.served_by}" if self.served_by is not None else over
        if now.finished:
            state = f"{now.why} after {now.done} rounds"
        elif progress.playing is not None and self.served_by is not None:
            waiting = [name for name in progress.playing.asked if name not in progress.fates]
            state = f"round {progress.playing.round} of {now.rounds} goes on"
            if not self.private:
                began = since(progress.playing.at or "")
                state += f", since {began}; no answer yet: {', '.join(waiting)}" if waiting else ""
        else:
            state = f"{now.done} of {counted(now.rounds, 'round')} done"
        began = f"; the federation began {progress.began[:16].replace('T', ' ')} UTC" if progress.began else ""
        answers = "answers" if self.answers else "does not answer"
        return "\n".join([f"{now.name}: {state}{began}", f"{served}; the SuperLink {answers}", *now.settings])


def status_of(folder: FederationFolder) -> Status:
    """The current status. Raises `ConfigError` if this is not a folder of `fedlora flower init`."""
    progress = progress_of(read_events(folder.events))
    now = standing(folder, progress.barred)
    nodes, answers = _nodes(folder)
    keys = keys_of(folder)
    line = progress.lines.get(progress.round, {})
    fates = dict(line.get("fates") or {name: {"fate": fate} for name, fate in fates_of(line).items()})
    fates |= {name: {"fate": "quarantined", "why": why} for name, why in progress.barred.items()}
    sites = {}
    for name, rank in now.ranks.items():
        node, last = nodes.get(name), fates.get(name, {})
        is_there = node.status if node is not None else "unknown" if name in keys else "no key"
        seen = None if node is None or node.seen is None else time_at(node.seen)
        sites[name] = SiteStatus(
            rank, is_there, seen, last.get("fate"), last.get("why", ""), (line.get("losses") or {}).get(name),
            (line.get("norms") or {}).get(name),
            {fate: n for (client, fate), n in progress.fate_counts.items() if client == name},
            progress.uploaded.get(name, 0),
        )  # fmt: skip
    return Status(
        now, progress, sites, holder(folder.lock), answers, database_size(folder.database), room_of(folder)
    )  # fmt: skip


def database_size(path: Path) -> int:
    """Bytes of the SuperLink's database and its log; 0 if there is none. Flower keeps all payloads in it, deletes those
    of finished runs, and reuses their room."""
    places = (path, path.with_name(path.name + "-wal"))
    return sum(place.stat().st_size for place in places if place.is_file())


def time_at(seconds: float) -> str:
    """A time in the format of the events: ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def since(at: str) -> str:
    """How long ago a time in that format was."""
    return time_of(max(0.0, time.time() - datetime.fromisoformat(at).timestamp()))


def _nodes(folder: FederationFolder) -> tuple[dict[str, NodeFacts], bool]:
    """name -> node, and whether the SuperLink answered."""
    link = SuperLink(folder.path)
    try:
        return {node.name: node for node in link.nodes()}, True
    except SuperLinkError:
        return {}, False
    finally:
        link.close()


__all__ = ["SiteStatus", "Status", "database_size", "since", "status_of"]
