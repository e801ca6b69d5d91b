"""The rows of its own file that a site holds out: drawn when it first takes part, and then kept for all rounds.

A site's file may grow between rounds, but a split is of a whole file: a new draw would measure on trained rows. So the
site stores digests of the held-out rows beside its state, and trains on every other row, including new ones. Copies and
another order of the rows change nothing; a missing row is reported.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from fedlora.core import files
from fedlora.data.splits import Parts, digests, rearranged
from fedlora.errors import ConfigError
from fedlora.flower.site.node import state_of

log = logging.getLogger(__name__)
_HELD = ("validation", "test")
_ANEW = "write {} into held_out.json in the site's state: then they are drawn anew"
_CURE = f"Put the old rows back. Or, if no row of its file of now was trained on in this federation, {_ANEW}"


def record_of(state: Path, run: str, client: str) -> Path:
    """The file with the digests of a site's held-out rows in a federation, 32 letters per row. state: the site's."""
    return state_of(state, run, client) / "held_out.json"


def keep_held_out(drawn: Parts, record: Path, *, first: bool, counted: bool) -> Parts:
    """A site's parts: the rows held out in the rounds before stay held out, and no others.

    Args:
        drawn: the parts from a split of the current file. They are kept if nothing is recorded.
        record: from `record_of`; it is written if a draw is kept. first: no round is played yet, so nothing trained
            counts, and a recorded draw does not count either. counted: by the server, this site's training did.

    Raises:
        ConfigError: the record cannot be read, or is gone though training counted, or a part is empty. The message
            contains nothing of the data.
    """
    if not len(drawn[1]) and not len(drawn[2]):
        return drawn
    if not first and not record.exists() and counted:
        raise ConfigError(
            f"this site has trained in this federation, and {record} is gone, which says what it holds out: drawn "
            f"anew, it could be measured on rows that it has trained on. Restore it from a backup. Or, if its data "
            f"file is that of its first round, or no row of it was trained on, {_ANEW}."
        )
    kept = None if first else kept_by(record, drawn)
    if kept is None:
        held = {name: sorted(set(digests(part))) for name, part in zip(_HELD, drawn[1:], strict=True)}
        files.write(record, json.dumps(held))
    return kept or drawn


def kept_by(record: Path, drawn: Parts) -> Parts | None:
    """The same rows as a record arranges them; None if there is none, or it is {}. It raises as `keep_held_out`."""
    try:
        held = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        if held == {}:
            return None
        places = {one: k for k, name in enumerate(_HELD, 1) for one in held[name]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{record} cannot be read: {error}. It says which rows are held out. {_CURE}.") from error
    goes = [[places.get(one, 0) for one in digests(part)] for part in drawn]
    kept = rearranged(drawn, goes)
    if any(to != k for k, each in enumerate(goes) for to in each):
        _tell(held, kept)
    return kept


def _tell(held: dict[str, list[str]], kept: Parts) -> None:
    """Report in the site's own log that the file has changed. Raises `ConfigError` if a part is empty."""
    gone = {name: len(set(held[name]) - set(digests(part))) for name, part in zip(_HELD, kept[1:], strict=True)}
    empty = [name for name in _HELD if gone[name] == len(held[name]) > 0] + ["training"] * (not len(kept[0]))
    if empty:
        raise ConfigError(
            f"the data file of this site has changed since the rounds before, and it has no row left for "
            f"{' and '.join(empty)}. The rows that it holds out stay the same in all rounds, or it would be measured "
            f"on rows that it has trained on. {_CURE}."
        )
    log.warning(
        "the data file has changed since the rounds before. This site trains on %d examples, and holds out the same "
        "rows as before%s",
        len(kept[0]), "".join(f", without {n} for {name} that are gone" for name, n in gone.items() if n),
    )  # fmt: skip


__all__ = ["keep_held_out", "kept_by", "record_of"]
