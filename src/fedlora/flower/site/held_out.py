"""The rows of its own file that a site holds out: drawn when it first takes part, and then kept for all rounds.

A site's file may grow between rounds. Drawing the split again from the larger file would measure on trained rows. So
the site stores digests of the held-out rows beside its state, and trains on every other row, including new ones. Copies
and another order of the rows change nothing; a missing row is reported.
"""

from __future__ import annotations

import json
import logging
from itertools import chain
from pathlib import Path

from fedlora.core import files
from fedlora.data.splits import Parts, digests, rearranged
from fedlora.errors import ConfigError
from fedlora.flower.site.node import state_of

log = logging.getLogger(__name__)
_HELD = ("validation", "test")
_ANEW = "write {} into held_out.json in the site's state: the site then draws them again"
_CURE = f"Put the old rows back. Or, if this federation never trained on a row of the present file, {_ANEW}"


def record_of(state: Path, run: str, client: str) -> Path:
    """The file with the digests of a site's held-out rows in a federation, 32 letters per row. state: the site's."""
    return state_of(state, run, client) / "held_out.json"


def keep_held_out(drawn: Parts, record: Path, *, first: bool, counted: bool) -> Parts:
    """A site's parts: exactly the rows that were held out in earlier rounds stay held out.

    Args:
        drawn: the parts from a split of the current file. They are kept if nothing is recorded.
        record: from `record_of`; it is written if a draw is kept. first: this site has not trained yet, so no recorded
            draw counts. counted: the server counted this site's training.

    Raises:
        ConfigError: the record cannot be read, or is missing although training counted, or a part is empty. The
            message contains nothing of the data.
    """
    if (kept := None if first else kept_by(record, drawn)) is not None:
        return kept  # also if the server's message says that nothing is held out any more
    if not len(drawn[1]) and not len(drawn[2]):
        return drawn
    if not first and not record.exists() and counted:
        raise ConfigError(
            f"this site has trained in this federation, but {record}, which lists its held-out rows, is missing: a "
            f"new draw could measure it on rows that it has trained on. Restore it from a backup. Or, if its data "
            f"file is still that of its first round, or no row of it was trained on, {_ANEW}."
        )
    held = {name: sorted(set(digests(part))) for name, part in zip(_HELD, drawn[1:], strict=True)}
    files.write(record, json.dumps(held))
    return drawn


def kept_by(record: Path, drawn: Parts) -> Parts | None:
    """The rows, split as the record says; None if there is no record, or it is {}. Raises as `keep_held_out`."""
    try:
        held = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        if held == {}:
            return None
        places = {one: k for k, name in enumerate(_HELD, 1) for one in held[name]}
        if not places:
            raise ValueError("it names no row")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{record} cannot be read: {error}. It says which rows are held out. {_CURE}.") from error
    found = [digests(part) for part in drawn]
    goes = [[places.get(one, 0) for one in each] for each in found]
    kept = rearranged(drawn, goes)
    if places.keys() - {*chain(*found)} or any(to != k for k, each in enumerate(goes) for to in each):
        _tell(held, kept)
    return kept


def _tell(held: dict[str, list[str]], kept: Parts) -> None:
    """Report in the site's own log that the file has changed. Raises `ConfigError` if a part is empty."""
    gone = {name: len(set(held[name]) - set(digests(part))) for name, part in zip(_HELD, kept[1:], strict=True)}
    empty = [name for name in _HELD if gone[name] == len(held[name]) > 0] + ["training"] * (not len(kept[0]))
    if empty:
        raise ConfigError(
            f"the data file of this site has changed since earlier rounds, and has no row left for "
            f"{' and '.join(empty)}. The held-out rows stay the same in all rounds; otherwise the site would be "
            f"measured on rows that it has trained on. {_CURE}."
        )
    log.warning(
        "the data file has changed since earlier rounds. This site trains on %d examples, and holds out the same rows "
        "as before%s",
        len(kept[0]), "".join(f", without {n} for {name} that are gone" for name, n in gone.items() if n),
    )  # fmt: skip


__all__ = ["keep_held_out", "kept_by", "record_of"]
