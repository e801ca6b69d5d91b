"""Applies a robust rule to a round: measures every client's change, and gives the method updates weighed by the rule.

One place for all engines and methods, after all uploads are in and before the method aggregates (`kept_uploads`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Upload
from fedlora.core.method import Method, Roles, Update
from fedlora.core.multiplied import multiplied, multiplied_how
from fedlora.errors import HyperparameterError, QuorumNotMet
from fedlora.linalg.parallel import Each
from fedlora.server.changes import Changes, Sent, changes
from fedlora.server.closing import shares
from fedlora.server.intake import Attendance
from fedlora.server.judged import Judged, Standing
from fedlora.server.robust_rules import Rule, Weighed, geometry_of
from fedlora.server.terms import Terms

log = logging.getLogger("fedlora.server")

_FAR_COUNT = 1e6  # times the median: multipliers divide by a client's weight


def far_counts(counts: Mapping[str, float]) -> dict[str, str]:
    """Client -> why its count of examples cannot be weighed with the others'."""
    middle = sorted(counts.values())[(len(counts) - 1) // 2] if counts else 1.0
    return {
        name: f"it claims {count:g} examples, and the round's median is {middle:g}: more than {_FAR_COUNT:g} times "
        f"off, so a robust rule cannot weigh it"
        for name, count in counts.items()
        if not middle / _FAR_COUNT <= count <= middle * _FAR_COUNT
    }


@dataclass(frozen=True, eq=False)
class Round:
    """A round weighed by a rule. multipliers: client -> m_i. begun: client -> module -> the readout that it got."""

    terms: Terms
    multipliers: Mapping[str, float]
    begun: Mapping[str, Mapping[str, LoRA]]
    judged: Judged

    def updates(self, module: str, updates: Sequence[Update]) -> list[Update]:
        """The updates of one module, with changes multiplied by m; an m of 1 leaves an update as it came, unless its
        terms cancel.

        Raises:
            HyperparameterError: the method's options would discard too much of them.
        """
        begun = [self.begun[u.client][module] for u in updates]
        m = self._among(updates)
        made = multiplied(multiplied_how(self.terms.method), updates, begun, m)
        self.terms.require_multipliers(sum(u.rank for u in made))
        return made

    def _among(self, updates: Sequence[Update]) -> list[float]:
        """Each client's m. It is smaller in a module that not all clients hold, if weights are renormalised over the
        holders and the rule gives them more weight than they have: no change may count for more than itself."""
        m = [self.multipliers[u.client] for u in updates]
        if self.terms.missing != "renormalise" or len(m) == len(self.multipliers):
            return m
        after = math.fsum(u.weight * k for u, k in zip(updates, m, strict=True))
        return [k / after for k in m] if after > 1 + 1e-9 else m

    def heads(self, uploads: Sequence[Upload]) -> list[Upload]:
        """The uploads with their heads' changes multiplied by m."""
        before = self.terms.state.heads
        return [
            u if (m := self.multipliers[u.client.id]) == 1 else replace(u, adapter=_with_heads(u.adapter, before, m))
            for u in uploads
        ]


@dataclass(frozen=True, eq=False)
class Look:
    """A round's uploads, the readouts that clients got (client -> module -> readout), and their changes."""

    uploads: Sequence[Upload]
    begun: Mapping[str, Mapping[str, LoRA]]
    found: Changes

    def unmeasured(self) -> dict[str, str]:
        """Client -> why no rule can weigh its change: all of it could be rounding of terms that cancel."""
        sound, found = self.found.measured().tolist(), self.found
        middle = float(found.norms.median()) if sound else 0.0
        return {
            u.client.id: f"its change cannot be measured: the terms of its factors cancel, and their rounding is "
            f"{float(found.noise[k]):.2g}, while the round's median change is {middle:.2g}; a change of any size could "
            f"hide there. Send the same update in other coordinates, such as balanced factors"
            for k, u in enumerate(self.uploads)
            if not sound[k]
        }

    def of(self, clients: Container[str]) -> Look:
        """The same for only these clients."""
        at = [k for k, u in enumerate(self.uploads) if u.client.id in clients]
        return Look([self.uploads[k] for k in at], self.begun, self.found.of(at))


def look(terms: Terms, uploads: Sequence[Upload], each: Each) -> Look:
    """Every client's change relative to its readout."""
    begun = {u.client.id: terms.begun(u.client) for u in uploads}
    sent = [
        [Sent(u.adapter.modules[m], begun[u.client.id][m]) if m in u.adapter.modules else None for u in uploads]
        for m in terms.state.modules
    ]
    heads = terms.state.heads if terms.roles.heads == "shared" else {}
    return Look(uploads, begun, changes(sent, uploads, heads, each))


def judge(rule: Rule, terms: Terms, seen: Look, counts: Mapping[str, float]) -> Round:
    """A rule's verdict on a round's uploads. counts: client -> n_i, at least for these clients.

    Raises:
        HyperparameterError: the rule returned no coefficients.
    """
    names = [u.client.id for u in seen.uploads]
    weights = shares({name: counts[name] for name in names})
    p = torch.tensor([weights[name] for name in names], dtype=torch.float64)
    multipliers, judged = weigh(rule, seen.found, p, names)
    if judged.facts.get("left", 0.0) > 1e-6:
        log.warning(
            "round %d: %s stopped before it converged: the remaining slope is %.1e. Raise iterations.",
            terms.number, rule.name, judged.facts["left"],
        )  # fmt: skip
    return Round(terms, multipliers, seen.begun, judged)


def require_products(rule: Rule, method: Method[Any], roles: Roles) -> None:
    """Raises `HyperparameterError` if both factors travel to a method that does not take products: a rule measures how
    far B A moved, but an honest-looking B A in bad coordinates moves an average of factors anywhere."""
    averages = roles.both_shared and multiplied_how(method) == "factors"
    if averages and not rule.factor_averages:
        raise HyperparameterError(
            f"{rule.name} compares how far the updates B A moved, and {method.name} averages the factors B and A: one "
            f"client that sends an honest update in bad coordinates, (B Q, Q^-1 A), can move that average anywhere, "
            f"and no rule sees it. Use a method that averages updates (glora, svd, flexlora, flora), or set "
            f"factor_averages = true beside the rule to use it all the same."
        )
    if rule.factor_averages and not averages:
        raise HyperparameterError(
            f"factor_averages = true has no effect: {method.name} averages no factors, so there is nothing that "
            f"{rule.name} cannot see. "
            f"Leave it out."
        )


def require_enough(rule: Rule, attendance: Attendance, counts: Mapping[str, float]) -> Rule:
    """The rule for the clients that still count; refused clients count as liars. counts: client -> n_i.

    Raises:
        QuorumNotMet: the rule cannot tolerate that many liars among them.
    """
    terms = attendance.terms
    refused = len(attendance.refused.keys() - attendance.counts.keys())  # a refused second upload keeps the first
    p = list(shares({name: counts[name] for name in attendance.counts}).values())
    asked, rule = rule, rule.without(refused, p)
    if asked.declared(len(p) + refused) and not rule.declared(len(p)):
        log.warning(
            "round %d: %d clients were refused for what they sent and count as the liars of %s. The %d others are "
            "too few to tolerate one more liar, so the rule weighs them as if none lied: mend those clients, or "
            "ask more clients.", terms.number, refused, asked.said, len(p),
        )  # fmt: skip
    if few := rule.overcome(p):
        also = f" (refused for what they sent: {attendance.refused_said()})" if refused else ""
        raise QuorumNotMet(f"round {terms.number}: {few}{also}. The state is unchanged.", attendance.refused)
    return rule


def weigh(rule: Rule, found: Changes, p: Tensor, names: Sequence[str]) -> tuple[dict[str, float], Judged]:
    """Client -> the multiplier m_i of its change; and the report. p (n,): the weights, which sum to 1.

    Raises:
        HyperparameterError: the rule raised, or returned something other than coefficients.
    """
    geometry, kept = geometry_of(found)
    try:
        made = rule.weigh(geometry, p)
    except Exception as error:
        raise HyperparameterError(f"the rule {rule!r} raised {type(error).__name__}: {error}.") from error
    c = made.coefficients if isinstance(made, Weighed) else None
    if c is None or c.shape != p.shape or not bool((torch.isfinite(c) & (c >= 0)).all()):
        raise HyperparameterError(
            f"the rule {rule!r} gave {made!r:.200}; a Weighed is needed, with a finite coefficient >= 0 for each."
        )
    m = c / p * kept
    multipliers = dict(zip(names, m.tolist(), strict=True))
    apart = geometry.from_point(c) * geometry.unit
    clients = {
        name: Standing(
            norm=float(found.norms[k]), distance=float(apart[k]), before=float(p[k]), after=float(p[k] * m[k]),
            why=made.why.get(k, ""),
        )
        for k, name in enumerate(names)
    }  # fmt: skip
    return multipliers, Judged(rule.said, clients, dict(made.facts))


# ------------------------------------------------------------------------------------------------------------- inside


def _with_heads(adapter: Adapter, before: Mapping[str, Tensor], m: float) -> Adapter:
    heads = {
        name: torch.lerp(before[name].double(), head.detach().double(), m).to(
            torch.promote_types(head.dtype, torch.float32)
        )
        for name, head in adapter.heads.items()
    }
    return Adapter(adapter.modules, heads)


__all__ = ["Look", "Round", "far_counts", "judge", "look", "require_enough", "require_products", "weigh"]
