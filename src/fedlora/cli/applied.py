"""What `apply` did, or what `validate --base` found that it would do, in lines and as JSON."""

from __future__ import annotations

from typing import Any

from fedlora.applying.apply import Applied, Cost
from fedlora.cli.screen import notes
from fedlora.core.echo import shown

_LISTED = 8  # names in a line; --json has all
_NOTICEABLE = 0.01


def as_json(done: Applied) -> dict[str, Any]:
    found: dict[str, Any] = {
        "changed": list(done.changed),
        "added": list(done.added),
        "left_out": list(done.left_out),
        "notes": list(done.notes),
    }
    if (cost := done.cost) is not None:
        rounding = {"lost": cost.loss, "most": cost.most, "where": cost.where, "vanished": list(cost.vanished)}
        found["rounding"] = rounding
    return found


def tell(done: Applied) -> None:
    """On stderr, a line each: what a reader should know before using the model."""
    lines = [*done.notes[:_LISTED]]
    if len(done.notes) > _LISTED:
        lines.append(f"and {len(done.notes) - _LISTED} more notes; --json has all")
    if done.left_out:
        rest = f" and {len(done.left_out) - _LISTED} more" if len(done.left_out) > _LISTED else ""
        lines.append(f"left out of the base model: {', '.join(done.left_out[:_LISTED])}{rest}")
    if done.cost is not None:
        lines += _costs(done.cost)
    for line in lines:
        notes.warn(line)


def _costs(cost: Cost) -> list[str]:
    keeps = "; --dtype float32 keeps it" if cost.loss > _NOTICEABLE else ""
    if cost.vanished:
        return [
            f"rounding loses all of the update in {len(cost.vanished)} tensors (such as {shown(cost.vanished[0])}): it "
            f"is smaller than the steps of their type{keeps}"
        ]
    if cost.loss > _NOTICEABLE:
        return [f"rounding loses {cost.loss:.1%} of the update, and {cost.most:.1%} of {shown(cost.where)}{keeps}"]
    return []
