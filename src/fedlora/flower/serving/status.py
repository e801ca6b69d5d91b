"""`fedlora flower status`: a federation's state, from its files, and its online nodes, if the SuperLink answers.

Screen and JSON tell the same facts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlora.errors import counted
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import holder
from fedlora.flower.server.journal import fates_of, read_now, read_rounds
from fedlora.flower.serving.standing import keys_of, room_of, standing
from fedlora.flower.serving.superlink import NodeFacts, SuperLink, SuperLinkError
from fedlora.flower.terms.privacy import promise

MOST_ROUNDS = 100  # that are told


def status_of(folder: FederationFolder, rounds: int = MOST_ROUNDS) -> dict[str, Any]:
    """The current facts, with the last `rounds` rounds.

    sites: name -> rank; node: "online", "offline", "registered" (admitted, never seen), "no key" (not admitted),
    "unknown" (no SuperLink answers); last_seen: the last contact with its node; fate, why, loss, norm: of the last
    round; fates: how often it trained, was late, .... privacy: a private
    federation's guarantee, and the spending that its last round reports. served_by: the process that serves it, or
    None. superlink: whether it answers. database_bytes, disk_free_bytes.

    Raises:
        ConfigError: this is not a folder of `fedlora flower init`.
    """
    lines, playing, now = read_rounds(folder.rounds), read_now(folder.now), standing(folder)
    online, keys = _nodes(folder), keys_of(folder)
    line, ended = lines[-1] if lines else {}, playing.get("ended")
    counts = Counter((name, fate) for one in lines for name, fate in fates_of(one).items())
    nodes, fates, sites = online or {}, line.get("fates") or {}, {}
    for name, rank in now.ranks.items():
        node, last = nodes.get(name), fates.get(name, {})
        sites[name] = {
            "rank": rank,
            "node": node.status if node is not None else "unknown" if name in keys else "no key",
            "last_seen": None if node is None or node.seen is None else time_at(node.seen),
            "fate": last.get("fate"),
            "why": last.get("why", ""),
            "loss": (line.get("losses") or {}).get(name),
            "norm": (line.get("norms") or {}).get(name),
            "fates": {fate: n for (client, fate), n in counts.items() if client == name},
        }
    told = {
        "name": now.name,
        "round": now.done,
        "rounds": now.rounds,
        "finished": now.why or None,
        "needed": now.needed,
        "ended": ended["kind"] if ended else None,
        "playing": {key: playing[key] for key in ("round", "doing", "asked", "answered", "since")}
        if playing.get("asked") and not ended and playing["round"] > now.done
        else None,
        "sites": sites,
        "last_rounds": [
            {
                **{key: line.get(key) for key in ("round", "loss", "seconds")},
                "fates": fates_of(line),
                **{key: dict(line.get(key) or {}) for key in ("metrics", "site_mean")},
                **{key: dict(line[key]) for key in ("defence", "privacy") if line.get(key)},
            }
            for line in (lines[-rounds:] if rounds else [])
        ],
        "served_by": holder(folder.lock),
        "superlink": online is not None,
        "database_bytes": database_size(folder.database),
        "disk_free_bytes": room_of(folder),
    }
    if now.privacy is not None:
        told["privacy"] = {"promise": promise(now.privacy, now.rounds), **(line.get("privacy") or {})}
    return told


def headline(told: Mapping[str, Any]) -> str:
    """Two lines for people."""
    server, playing = told["served_by"], told["playing"]
    over = "not served, for nothing is left to do; sites may stop" if told["finished"] else "not served at the moment"
    served = f"served by process {server}" if server is not None else over
    if told["finished"]:
        state = f"{told['finished']} after {told['round']} rounds"
    elif playing is not None and server is not None:
        state = f"round {playing['round']} of {told['rounds']} goes on"
        if waiting := [name for name in playing["asked"] if name not in playing["answered"]]:
            state += f", since {since(playing['since'])}; no answer yet: {', '.join(waiting)}"
    else:
        state = f"{told['round']} of {counted(told['rounds'], 'round')} done"
    answers = "answers" if told["superlink"] else "does not answer"
    return f"{told['name']}: {state}\n{served}; the SuperLink {answers}"


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


def time_of(seconds: float) -> str:
    """A time span in a readable unit.

    Example:
        >>> time_of(4), time_of(200), time_of(8000), time_of(400_000)
        ('4 s', '3 min', '2 h', '5 days')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _nodes(folder: FederationFolder) -> dict[str, NodeFacts] | None:
    """name -> node; None if the SuperLink does not answer."""
    link = SuperLink(folder.path)
    try:
        return {node.name: node for node in link.nodes()}
    except SuperLinkError:
        return None
    finally:
        link.close()


__all__ = ["database_size", "headline", "since", "status_of"]
