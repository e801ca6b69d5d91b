"""FED/server/settings.json: the settings of all rounds so far, and whether a federation may continue with others.

A list, the newest last: {"rounds": the number finished by then, "settings": as they travel, "held_out": the data that
rounds are measured on, "changed": {key: [before, after]}}. It contains no path of the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import CheckpointError, ConfigError
from fedlora.flower.terms.settings import MEASURED, Change, FederationSettings, changed
from fedlora.given_files import RECORDS, parse_json, read_given


@dataclass(frozen=True)
class History:
    """The entries of settings.json, the newest last."""

    entries: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def read(cls, path: Path) -> History:
        """The history; empty if there is no file. Raises `CheckpointError` for a damaged one."""
        try:
            found = parse_json(read_given(path, RECORDS), nan_as_none=True)
            if not all(isinstance(entry["settings"], dict) and isinstance(entry["rounds"], int) for entry in found):
                raise ValueError("it is no list of settings")
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. It records the settings of the played rounds; restore "
                f"it from a backup."
            ) from error
        return cls(tuple(found))

    def comparable_since(self) -> int:
        """The round after which all rounds were measured on the same examples, in the same way."""
        pairs = zip(self.entries, self.entries[1:], strict=False)
        return max((int(new["rounds"]) for old, new in pairs if _measured_otherwise(old, new)), default=0)

    def with_(self, settings: FederationSettings, rounds: int, held_out: str) -> History:
        """The history with these settings from that round on.

        Raises:
            ConfigError: a setting that may not change between rounds did: each key with both values.
        """
        played = History(tuple(old for old in self.entries if old["rounds"] < rounds))  # no round had any other
        changes = played._changes(settings)
        _check(changes, settings, rounds)
        if played.entries and not changes and played.entries[-1]["held_out"] == held_out:
            return played
        entry = {
            "rounds": rounds,
            "settings": json.loads(settings.travelling()),
            "held_out": held_out,
            "changed": {change.key: [change.before, change.after] for change in changes},
        }
        return History((*played.entries, entry))

    def told(self, last: int | None = None) -> tuple[str, ...]:
        """The changes since round 1, and the round after which each holds. last: only the newest so many times."""
        pairs = [*zip(self.entries, self.entries[1:], strict=False)]
        found: list[str] = []
        for old, new in pairs[-last:] if last else pairs:
            said = [f"{key} is {_shown(now)} in place of {_shown(was)}" for key, (was, now) in new["changed"].items()]
            if _measured_otherwise(old, new):
                said.append("it is measured on other examples or otherwise, and rounds before it are not compared")
            found += [f"after round {new['rounds']}: {one}" for one in said]
        return tuple(found)

    def waiting(self, settings: FederationSettings, rounds: int) -> str:
        """How federation.toml differs from the settings of the current rounds; "" if it does not."""
        changes = self._changes(settings)
        if not changes:
            return ""
        try:
            self.with_(settings, rounds, "")
        except ConfigError as error:
            return str(error)
        named = "; ".join(f"{one.key} = {_shown(one.after)} (it was {_shown(one.before)})" for one in changes)
        return f"federation.toml has {named}, and no round yet. If the server was not restarted since, restart it"

    def _changes(self, settings: FederationSettings) -> tuple[Change, ...]:
        if not self.entries:
            return ()
        before = FederationSettings.from_travelling(json.dumps(self.entries[-1]["settings"]))
        return changed(before, FederationSettings.from_travelling(settings.travelling()))

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        files.write(path, json.dumps(list(self.entries), indent=2, sort_keys=True) + "\n")


def _measured_otherwise(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether scores of the rounds of two entries say nothing about each other."""
    return bool(old["held_out"] != new["held_out"] or not MEASURED.isdisjoint(new["changed"]))


def _check(changes: Sequence[Change], settings: FederationSettings, rounds: int) -> None:
    """Raises `ConfigError` for a setting that may not change after so many rounds; for their planned number, if it was
    the base of a schedule, or of a promise of epsilon."""
    named = {one.key: f"{one.key} was {_shown(one.before)} and is {_shown(one.after)} now" for one in changes}
    if fixed := [named[one.key] for one in changes if one.fixed]:
        raise ConfigError(
            f"{rounds} rounds are played, and federation.toml says something else than it did for them: "
            f"{'; '.join(fixed)}. Sites and server would hold parts that do not belong together, or sites would be "
            f"measured on what they trained on. Set it back, or make another federation (fedlora flower init)."
        )
    if "run.rounds" in named and settings.train.schedule != "constant":
        raise ConfigError(
            f"{named['run.rounds']}: with train.schedule = {settings.train.schedule!r} the learning rate of every "
            f"round depends on their number, and {rounds} are played. Set it back, or set train.schedule = 'constant' "
            f"too."
        )
    if "run.rounds" in named and settings.privacy is not None:
        raise ConfigError(
            f"{named['run.rounds']}: {rounds} private rounds are played, and epsilon was promised for another number. "
            f"Set it back. For more rounds make another federation that charges the same ledger."
        )


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)
