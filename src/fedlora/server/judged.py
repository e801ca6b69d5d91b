"""What a robust rule made of a round: a report for each client, and its words. Without torch, for the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedlora.errors import MethodFault

if TYPE_CHECKING:
    from torch import Tensor

    from fedlora.server.rules import Rule

_FULL = 0.95  # from this share of its weight on, a change counts in full
_NOTHING = 1e-12  # a coefficient below this share of the client's weight is zero: it leaves no history
_SHOWN = 4  # names in a sentence


@dataclass(frozen=True)
class Verdict:
    """One client. weight: p_i, what its change would count without a rule. coefficient: c_i, what it counts; 0 if it is
    left out. norm: ||X_i|| of its change. reason: how far its change is from the robust one, if it counts for less than
    95 % of its weight; otherwise ""."""

    weight: float
    coefficient: float
    norm: float
    reason: str = ""


@dataclass(frozen=True)
class Judged:
    """A round. rule: with its keys. clients: every accepted upload, those that the rule left out too.

    Example:
        >>> from fedlora.server.rules import NormClipping
        >>> server = Server(build("glora"), round=Kept(NormClipping(threshold=0.1)))
        >>> judged = server.aggregate(server.init(seed_adapter), uploads).tally.judged
        >>> judged.rule, [one.coefficient < one.weight for one in judged.clients.values()]
        ('norm-clipping (threshold = 0.1)', [True, True])
    """

    rule: str
    clients: Mapping[str, Verdict]

    @property
    def left_out(self) -> dict[str, str]:
        """Client -> how far its change, which does not count, is from the robust one."""
        return {name: one.reason for name, one in self.clients.items() if one.coefficient == 0}

    def plain(self) -> dict[str, Any]:
        """The report as in a line of metrics.jsonl."""
        return {"rule": self.rule, "clients": {name: asdict(one) for name, one in self.clients.items()}}


def verdicts(rule: Rule, gram: Tensor, weights: Mapping[str, float]) -> dict[str, Verdict]:
    """Client -> what the rule made of it. A coefficient below 1e-12 p_i is zero.

    Args:
        gram: (n, n), from `changes.gram_of_changes`. weights: client -> p_i, in the same order.

    Raises:
        MethodFault: the rule gave something other than n finite coefficients >= 0.

    Example:
        >>> from fedlora.server.rules import GeometricMedian
        >>> x = torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64)
        >>> found = verdicts(GeometricMedian(), x.outer(x), dict.fromkeys("abc", 1 / 3))
        >>> found["c"].coefficient, found["c"].reason
        (0.0, 'its change is 8 away from the robust one; the median client is 0 away')
    """
    from fedlora.server.rules import distances_from, norms_of  # imports torch

    p = gram.new_tensor(list(weights.values()))
    c = rule.coefficients(gram, p)
    if c.shape != p.shape or not bool((c.isfinite() & (c >= 0)).all()):
        raise MethodFault(f"{rule} gave {c}; a rule gives each of {len(p)} clients a finite coefficient >= 0.")
    c = c.where(c >= _NOTHING * p, 0.0)
    apart = distances_from(c, gram)
    found, norms, usual = {}, norms_of(gram), float(apart.median())
    for k, client in enumerate(weights):
        far = f"its change is {float(apart[k]):.4g} away from the robust one; the median client is {usual:.4g} away"
        found[client] = Verdict(float(p[k]), float(c[k]), float(norms[k]), far if c[k] < _FULL * p[k] else "")
    return found


def in_words(line: Mapping[str, Any]) -> str:
    """What a rule did in a round, from `Judged.plain`, in one sentence; "" if all changes counted in full.

    Example:
        >>> b = {"weight": 0.5, "coefficient": 0.0, "norm": 9.0, "reason": "far"}
        >>> in_words({"rule": "krum (f = 1)", "clients": {"a": {**b, "coefficient": 1.0}, "b": b}})
        'krum left out b (1 of 2 clients)'
    """
    share = {name: one["coefficient"] / one["weight"] for name, one in line["clients"].items()}
    out = [name for name, x in share.items() if x == 0]
    less = sorted((name for name, x in share.items() if 0 < x < _FULL), key=lambda name: (share[name], name))
    parts = [f"left out {_listed(out)} ({len(out)} of {len(share)} clients)"] if out else []
    parts += ["held back " + _listed(f"{name} to {share[name]:.0%} of its weight" for name in less)] if less else []
    return f"{line['rule'].split(' (')[0]} {' and '.join(parts)}" if parts else ""


def over_rounds(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What a rule did in a run, from its rounds' lines: client -> the number of its rounds, in how many of them it was
    left out, and its mean weight and coefficient. Those that lost most come first; {} without a rule."""
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        for name, one in ((line.get("robust") or {}).get("clients") or {}).items():
            seen.setdefault(name, []).append(one)
    found = {
        name: {
            "rounds": len(ones),
            "left_out": sum(one["coefficient"] == 0 for one in ones),
            "weight": sum(one["weight"] for one in ones) / len(ones),
            "coefficient": sum(one["coefficient"] for one in ones) / len(ones),
        }
        for name, ones in seen.items()
    }
    return dict(sorted(found.items(), key=lambda item: (item[1]["coefficient"] / item[1]["weight"], item[0])))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
