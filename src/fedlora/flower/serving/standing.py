"""A federation's standing, from its folder alone: requested and finished rounds, and whether there is room."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.finishing import fitting_summary
from fedlora.flower.server.journal import rounds_done
from fedlora.flower.server.private import has_released
from fedlora.flower.server.state import least_usable
from fedlora.flower.serving.superlink import LOOPBACK
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import FederationPrivacy
from fedlora.flower.terms.settings import FederationSettings

_LEAST_ROOM = 16_000_000  # bytes


@dataclass(frozen=True)
class Standing:
    """name: the federation's. rounds: the requested number. done: the finished number. needed: the usable answers that
    a round needs; for a private federation, the sites that must be online before it begins, and 0 after that. ranks: of
    the clients that may take part. why: "complete" or "stopped early" if nothing is left to do, otherwise "". privacy:
    the table, if rounds are private.
    """

    name: str
    rounds: int
    done: int
    needed: int
    ranks: Mapping[str, Any]
    why: str = ""
    privacy: FederationPrivacy | None = None

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that may take part."""
        return tuple(self.ranks)

    @property
    def needs(self) -> str:
        """What a round needs from the sites, in words. Private rounds have no quorum: they wait once, before the first.

        Example:
            >>> Standing("demo", rounds=3, done=0, needed=2, ranks={"acme": 4, "berlin": 4, "cork": 8}).needs
            'a round needs 2 of 3'
        """
        if self.privacy is None:
            return f"a round needs {self.needed} of {len(self.ranks)}"
        if self.needed:
            return f"round 1 waits for all {len(self.ranks)}, and no later one waits"
        return "no quorum: who is missing counts as zero"

    @property
    def finished(self) -> bool:
        return bool(self.why)


def standing(folder: FederationFolder) -> Standing:
    """Read the standing; call it again for news: rounds may be added and sites admitted while `serve` runs.

    Raises:
        ConfigError: settings or policy cannot be read.
    """
    settings = FederationSettings.load(folder.settings)
    policy, run, rounds = Policy.read(folder.policy), settings.run, settings.run.rounds
    ranks = policy.clients
    done, why = rounds_done(folder.rounds), ""
    if (summary := fitting_summary(folder.summary, settings, done)) is not None:
        why = "complete" if done >= rounds else "stopped early" if summary.get("stopped_early") else ""
    if why == "stopped early" and settings.privacy is not None and _charged_since(settings.privacy, folder):
        why = ""  # it ended for lack of budget, but the ledger may have changed since: ask it again
    least = least_usable(policy, settings.server.quorum, settings.defence.build(), run.participation) or 1
    if settings.privacy is not None:  # it begins when all were there, and later waits for nobody
        least = 0 if done or has_released(folder) else len(ranks)
    return Standing(settings.id, rounds, done, least, ranks, why, settings.privacy)


def check_derived(folder: FederationFolder) -> None:
    """Refuse a folder whose proxy was set up for another place or port than federation.toml names.

    Raises:
        ConfigError: they differ (the message says in what, and what to do), or settings cannot be read.
    """
    network = FederationSettings.load(folder.settings).network
    if network.name is None:  # a trial
        return
    proxy, inner = folder.proxy.read_text(encoding="utf-8"), network.superlink_port
    there = {
        f"network.port = {network.port}": f"{network.port} ssl;",
        f"network.superlink_port = {inner}": f"server {LOOPBACK}:{inner} ",
        f"the path {folder.path}": f"{folder.public}/server.crt",
    }
    if other := [said for said, words in there.items() if words not in proxy]:
        raise ConfigError(
            f"this folder has {' and '.join(other)}, and {folder.proxy} is for another. `fedlora flower renew "
            f"{folder.path}` writes all files that follow from it; hand every site its new join file then. Or set it "
            f"back."
        )


def _charged_since(privacy: FederationPrivacy, folder: FederationFolder) -> bool:
    try:
        return Path(privacy.ledger).stat().st_mtime_ns > folder.summary.stat().st_mtime_ns
    except OSError:
        return False


def keys_of(folder: FederationFolder) -> dict[str, Path]:
    """Site -> its admitted public key."""
    return {path.stem: path for path in sorted((folder.path / "keys").glob("*.pub"))}


def room_of(folder: FederationFolder) -> int:
    """The free bytes where the folder is; where less is free, on another disk that is mounted below it for what the
    server writes."""
    places = [place for place in (folder.path, *folder.written) if place.is_dir()]
    return min(shutil.disk_usage(place).free for place in places)


def needed_room(folder: FederationFolder) -> int:
    """The bytes that a round needs to begin: two of the newest checkpoint, and a little."""
    sizes = []
    for path in folder.checkpoints.glob("round-*"):
        try:
            facts = path.stat()
        except FileNotFoundError:  # an old one was removed meanwhile
            continue
        sizes.append((facts.st_mtime, facts.st_size))
    return _LEAST_ROOM + 2 * (max(sizes)[1] if sizes else 0)


__all__ = ["Standing", "check_derived", "keys_of", "needed_room", "room_of", "standing"]
