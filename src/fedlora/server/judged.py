"""A report of what a robust rule did in a round: each client's change, its weight before and after, and the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_SHOWN = 4  # names per line
_LITTLE = 0.6  # a share of a client's weight, averaged over rounds


@dataclass(frozen=True)
class Standing:
    """One client. norm: of its change. distance: from its change to the robust one. before: p_i; after: p_i m_i, the
    weight of its change. why: the reason if it is left out or held back, otherwise ""."""

    norm: float
    distance: float
    before: float
    after: float
    why: str = ""


@dataclass(frozen=True)
class Judged:
    """A round. rule: with its keys. clients: all that counted. facts: the rule's findings by name.

    Example:
        >>> from fedlora.server.robust_rules import Clip
        >>> server = Server(build("glora"), rule=Clip(threshold=0.1))
        >>> judged = server.aggregate(server.init(seed_adapter), uploads).tally.judged
        >>> judged.rule, [round(one.after / one.before, 3) < 1 for one in judged.clients.values()]
        ('clip (threshold = 0.1)', [True, True])
    """

    rule: str
    clients: Mapping[str, Standing]
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """Client -> why its change does not count."""
        return {name: one.why for name, one in self.clients.items() if one.after == 0}

    def plain(self) -> dict[str, Any]:
        """The report as in a line of metrics.jsonl."""
        return {**asdict(self), "clients": {name: asdict(one) for name, one in self.clients.items()}}


def told(line: Mapping[str, Any]) -> str:
    """What a rule did in a round, from its line of metrics.jsonl, in a few words; "" if it changed no weight.

    Example:
        >>> b = {"norm": 9.0, "distance": 8.0, "before": 0.5, "after": 0.0, "why": "far"}
        >>> told({"rule": "krum (liars = 1)", "clients": {"a": {**b, "after": 1.0}, "b": b}})
        'krum leaves out b (1 of 2)'
    """
    clients = line["clients"]
    gone = [name for name, one in clients.items() if one["after"] == 0]
    shares = {n: one["after"] / one["before"] for n, one in clients.items() if 0 < one["after"] < one["before"] * 0.95}
    said = []
    if gone:
        stay = [name for name in clients if name not in gone]
        few = len(gone) <= max(_SHOWN, len(stay))
        said.append(f"leaves out {_listed(gone)}" if few else f"keeps {_listed(stay)} alone")
        said[-1] += f" ({len(gone) if few else len(stay)} of {len(clients)})"
    if shares:
        least = sorted(shares, key=lambda name: (shares[name], name))
        said.append("holds back " + _listed([f"{name} to {shares[name]:.0%} of its weight" for name in least]))
    kept = sorted(one["after"] / one["before"] for one in clients.values() if one["after"] > 0)
    usual = kept[(len(kept) - 1) // 2] if kept else 1.0
    raised = {n: x for n, one in clients.items() if (x := one["after"] / one["before"]) > 1.25 * max(usual, 1.0)}
    if raised:
        most = sorted(raised, key=lambda name: (-raised[name], name))
        said.append("raises " + _listed([f"{name} to {raised[name]:.0%}" for name in most]))
    rule = line["rule"].removeprefix("mixing").split(", then ")[-1].split(" (")[0]
    facts = line.get("facts") or {}
    norm = next((f" (norms of at most {facts[key]:.4g})" for key in ("threshold", "tau") if key in facts), "")
    return f"{rule}{norm} {' and '.join(said)}" if said else ""


def of_run(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a rule did in a whole run, from its rounds' lines: for each client, in how many rounds it was weighed and
    left out, and its mean weight before and after."""
    judged = [line["defence"] for line in lines if line.get("defence")]
    names = sorted({name for line in judged for name in line["clients"]})
    clients = {}
    for name in names:
        seen = [line["clients"][name] for line in judged if name in line["clients"]]
        clients[name] = {
            "rounds": len(seen),
            "left_out": sum(one["after"] == 0 for one in seen),
            **{key: sum(one[key] for one in seen) / len(seen) for key in ("before", "after")},
        }
    return {"rule": judged[-1]["rule"] if judged else "", "clients": clients}


def remarks(run: Mapping[str, Any], ranks: Mapping[str, Any]) -> list[str]:
    """What deserves a look in a run (from `of_run`): clients that were always left out, or lost most of their weight.

    Args:
        ranks: client -> its rank, because rules take a large one for a lie.

    Example:
        >>> run = {"clients": {"a": {"rounds": 3, "left_out": 3, "before": 0.5, "after": 0.0}}}
        >>> remarks(run, {"a": 16, "b": 4})[0][:56]
        'a (rank 16, the largest) was left out in all 3 rounds. A'
    """
    numbers = [rank for rank in ranks.values() if isinstance(rank, int)]
    found = []
    for name, one in run["clients"].items():
        always, share = one["left_out"] == one["rounds"] > 1, one["after"] / one["before"]
        if not always and not share < _LITTLE:
            continue
        rank = ranks.get(name)
        largest = rank is not None and len(set(numbers)) > 1 and rank == max(numbers)
        who = f"{name} (rank {rank}, the largest)" if largest else name
        lost = f"was left out in all {one['rounds']} rounds" if always else f"kept {share:.0%} of its weight"
        found.append(
            f"{who} {lost}. To a rule, a large rank, rare labels and unusual data look like a lie: look at this "
            f"client's data before you believe either"
        )
    return [*found[:_SHOWN], *([f"and {len(found) - _SHOWN} more clients"] if len(found) > _SHOWN else [])]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


__all__ = ["Judged", "Standing", "of_run", "remarks", "told"]
