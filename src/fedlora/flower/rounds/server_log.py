"""What a ServerApp says of its rounds: a line a round, and one for each who was asked and did not train."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from fedlora.flower.rounds.events import Fated, PolicyChanged
from fedlora.flower.terms.policy import Policy
from fedlora.server.judged import told

log = logging.getLogger(__name__)


def listen() -> None:
    """Print what fedlora logs, where nobody else does: Flower gives a ServerApp a handler for its own logger only."""
    package = logging.getLogger("fedlora")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    if package.getEffectiveLevel() > logging.INFO:
        package.setLevel(logging.INFO)


def fate(fated: Fated) -> None:
    """Of one who was asked, or is missing."""
    if fated.fate not in ("trained", "not drawn"):
        log.warning("round %d, %s: %s, %s", fated.round, fated.client, fated.fate, fated.why)


def done(line: Mapping[str, Any], rounds: int, policy: Policy) -> None:
    """Of a finished round."""
    number = line["round"]
    for name, shares in line["capped"].items():
        log.warning(
            "round %d: %s counts %.0f %% instead of %.0f %% (max_weight_share = %.2g, max_examples = %g)",
            number, name, 100 * shares["counted"], 100 * shares["claimed"], policy.share, policy.max_examples,
        )  # fmt: skip
    for name, times in line["far"].items():
        log.warning(
            "round %d: the update of %s has norm %.4g, %.4g times the round's median: look at its data and at train.lr",
            number, name, line["norms"][name], times,
        )  # fmt: skip
    if line.get("defence") and (said := told(line["defence"])):
        log.warning("round %d: %s", number, said)
        for name, one in line["defence"]["clients"].items():
            if one["why"]:
                log.info("round %d, %s: %s", number, name, one["why"])
    log.info("%s", round_line(line, rounds))


def round_line(line: Mapping[str, Any], rounds: int) -> str:
    """A finished round on one line.

    Example:
        >>> fates = {"acme": {"fate": "trained", "why": ""}, "cork": {"fate": "late", "why": "no answer within 600 s"}}
        >>> line = {"round": 3, "seconds": 12.34, "loss": 0.43219, "losses": {"acme": 0.43219}, "fates": fates}
        >>> round_line(line, 6)
        'round 3 of 6: 1 of 2 trained in 12.3 s, loss 0.4322 (acme 0.4322); late: cork'
    """
    fates, losses = line["fates"], line["losses"]
    trained = [name for name, said in fates.items() if said["fate"] == "trained"]
    text = f"round {line['round']} of {rounds}: {len(trained)} of {len(fates)} trained in {line['seconds']:.1f} s"
    if line.get("loss") is not None:
        listed = [f"{name} {loss:.4g}" for name, loss in losses.items()]
        more = f", and {len(listed) - 8} more" if len(listed) > 8 else ""
        text += f", loss {line['loss']:.4g} ({', '.join(listed[:8])}{more})"
    others: dict[str, list[str]] = {}
    for name, said in fates.items():
        if said["fate"] != "trained":
            others.setdefault(said["fate"], []).append(name)
    for kind, names in others.items():
        text += f"; {kind}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
    return text


def policy_changed(change: PolicyChanged) -> None:
    """Of a policy that was read anew."""
    if change.why:
        log.warning("round %d: %s", change.round, change.why)
        return
    parts = [f"{name} is added at rank {rank}" for name, rank in change.added.items()]
    parts += [f"{name} is removed" for name in change.removed]
    parts += [f"{name} has rank {new} instead of {old}" for name, (old, new) in change.changed.items()]
    log.info("round %d: the policy has changed: %s", change.round, "; ".join(parts) or "its limits")


__all__ = ["done", "fate", "listen", "policy_changed", "round_line"]
