"""`fedlora flower status`: a federation's state from its files, and its online nodes, if the SuperLink answers.

Screen and JSON tell the same facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.errors import counted
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import holder
from fedlora.flower.server.finishing import fitting_summary
from fedlora.flower.server.journal import read_now, read_rounds, rounds_done
from fedlora.flower.server.superlink import NodeFacts, SuperLink, SuperLinkError
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import FederationPrivacy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.training.metrics import score_name


@dataclass(frozen=True)
class Standing:
    """name: the federation's. rounds: the requested number. done: the finished number. ranks: of the clients that may
    take part. why: "complete" or "stopped early" if nothing is left to do, otherwise "". privacy: the table, if rounds
    are private. metric: the name of the score that compares rounds.
    """

    name: str
    rounds: int
    done: int
    ranks: Mapping[str, int]
    why: str = ""
    privacy: FederationPrivacy | None = None
    metric: str = ""


def standing(folder: FederationFolder) -> Standing:
    """Read the standing; call it again for news: rounds may be added and sites admitted while `serve` runs.

    Raises:
        ConfigError: settings or policy cannot be read.
    """
    settings = FederationSettings.load(folder.settings)
    policy, rounds = Policy.read(folder.policy), settings.run.rounds
    done, why = rounds_done(folder.rounds), ""
    if (summary := fitting_summary(folder.summary, settings, done)) is not None:
        why = "complete" if done >= rounds else "stopped early" if summary.get("stopped_early") else ""
    # a budget that was spent may have been raised since: its ledger is newer
    ledger = Path(settings.privacy.ledger) if settings.privacy is not None else folder.summary
    if why == "stopped early" and ledger.is_file() and ledger.stat().st_mtime_ns > folder.summary.stat().st_mtime_ns:
        why = ""
    metric = score_name(settings.evaluate.metric)
    return Standing(settings.id, rounds, done, policy.clients, why, settings.privacy, metric)


def keys_of(folder: FederationFolder) -> dict[str, Path]:
    """Site -> its admitted public key."""
    return {path.stem: path for path in sorted(folder.keys.glob("*.pub"))}


def status_of(folder: FederationFolder, rounds: int | None = None) -> dict[str, Any]:
    """The current facts, with the last `rounds` rounds; None: all.

    sites: name -> rank; node: "online", "offline", "registered" (admitted, never seen), "no key" (not admitted),
    "unknown" (no SuperLink answers); fate, why, loss, weight: of the last round; score: its own of the last measured
    round, if sites measure; fates: how often it trained, was late, .... served_by: the process that serves it, or None.
    superlink: whether it answers.

    Raises:
        ConfigError: this is not a folder of `fedlora flower init`.
    """
    now, lines, playing = standing(folder), read_rounds(folder.rounds), read_now(folder.now)
    online, keys = _nodes(folder), keys_of(folder)
    last = lines[-1] if lines else {}
    scored: Mapping[str, Any] = next((line["site_metrics"] for line in reversed(lines) if line.get("site_metrics")), {})
    sites = {}
    for name, rank in now.ranks.items():
        node, fated = (online or {}).get(name), (last.get("fates") or {}).get(name, {})
        sites[name] = {
            "rank": rank,
            "node": node.status if node is not None else "unknown" if name in keys else "no key",
            "fate": fated.get("fate"),
            "why": fated.get("why", ""),
            "loss": (last.get("losses") or {}).get(name),
            "weight": (last.get("weights") or {}).get(name),
            "score": scored.get(name, {}).get(now.metric),
            "fates": dict(Counter(str(line["fates"][name]["fate"]) for line in lines if name in line.get("fates", {}))),
        }  # fmt: skip
    return {
        "name": now.name,
        "round": now.done,
        "rounds": now.rounds,
        "metric": now.metric,
        "finished": now.why or None,
        "playing": playing if playing.get("asked") and not playing["ended"] and playing["round"] > now.done else None,
        "ended": playing.get("ended"),
        "sites": sites,
        "last_rounds": lines if rounds is None else lines[max(0, len(lines) - rounds):],
        "served_by": holder(folder.lock),
        "superlink": online is not None,
    }  # fmt: skip


def headline(facts: Mapping[str, Any]) -> str:
    """Two lines for people."""
    server, playing = facts["served_by"], facts["playing"]
    over = "not served, for nothing is left to do; sites may stop" if facts["finished"] else "not served at the moment"
    served = f"served by process {server}" if server is not None else over
    if facts["finished"]:
        state = f"{facts['finished']} after {facts['round']} rounds"
    elif playing is not None and server is not None:
        since = playing["since"][:16].replace("T", " ")
        state = f"round {playing['round']} of {facts['rounds']} goes on, since {since} UTC"
        if waiting := [name for name in playing["asked"] if name not in playing["answered"]]:
            state += f"; no answer yet: {', '.join(waiting)}"
    else:
        state = f"{facts['round']} of {counted(facts['rounds'], 'round')} done"
    answers = "answers" if facts["superlink"] else "does not answer"
    return f"{facts['name']}: {state}\n{served}; the SuperLink {answers}"


def _nodes(folder: FederationFolder) -> dict[str, NodeFacts] | None:
    """name -> node; None if the SuperLink does not answer."""
    link = SuperLink(folder.path)
    try:
        return {node.name: node for node in link.nodes()}
    except SuperLinkError:
        return None
    finally:
        link.close()
