"""What `apply` did, or what `validate --base` found that it would do, in lines and as JSON."""

from __future__ import annotations

from typing import Any

from fedlora.adapters.apply import Applied
from fedlora.cli.screen import notes
from fedlora.core.echo import shown

_LISTED = 8  # names in a line; --json has all


def as_json(done: Applied) -> dict[str, Any]:
    where, most = done.worst
    return {
        "changed": list(done.changed),
        "added": list(done.added),
        "left_out": list(done.left_out),
        "notes": list(done.notes),
        "rounding": {"lost": done.loss, "most": most, "where": where, "vanished": list(done.vanished)},
    }


def tell(done: Applied, *, would: bool = False) -> None:
    """On stderr, a line each: what a reader should know before using the model. would: it is not written."""
    lines = [*done.notes[:_LISTED]]
    if len(done.notes) > _LISTED:
        lines.append(f"and {len(done.notes) - _LISTED} more notes; --json has all")
    if done.left_out:
        rest = f" and {len(done.left_out) - _LISTED} more" if len(done.left_out) > _LISTED else ""
        lines.append(f"left out of the base model: {', '.join(done.left_out[:_LISTED])}{rest}")
    verb = "would lose" if would else "loses"
    keeps = "; --dtype float32 keeps it" if done.loss > _NOTICEABLE else ""
    if done.vanished:
        lines.append(
            f"rounding {verb} all of the update in {len(done.vanished)} tensors (such as {shown(done.vanished[0])}): "
            f"it is smaller than the steps of their type{keeps}"
        )
    elif done.loss > _NOTICEABLE:
        lines.append(
            f"rounding {verb} {done.loss:.1%} of the update, and {done.worst[1]:.1%} of {shown(done.worst[0])}{keeps}"
        )
    for line in lines:
        notes.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


_NOTICEABLE = 0.01
