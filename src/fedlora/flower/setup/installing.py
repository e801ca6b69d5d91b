"""`fedlora flower install`: the script with which root makes the units its own files. It runs only `install` and
`systemctl`, and `mkdir` as the units' user; none of our code. It holds the units' texts itself, so that root reads no
file that the user, or code running as the user, could have changed in between.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.setup import units
from fedlora.flower.site.site_checks import is_site
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site

UNITS = Path("/etc/systemd/system")


@dataclass(frozen=True)
class Step:
    """A command, and the text piped to it."""

    words: tuple[str, ...]
    said: str = ""

    def shown(self) -> str:
        """The step as a line for a shell."""
        line = shlex.join(self.words)
        return f"{line} <<'END_OF_UNIT'\n{self.said}END_OF_UNIT" if self.said else line


def steps(folder: Path, *, user: str | None, memory: str | None, label: str = "", place: Path = UNITS) -> list[Step]:
    """The steps with which root installs the units of a site's folder, or of a federation's server. place: of systemd's
    units.

    Raises:
        ConfigError: neither kind of folder; something that a unit cannot express; a unit of that name for another
            folder; root by sudo.
    """
    if os.geteuid() == 0 and "SUDO_USER" in os.environ:
        raise ConfigError(
            "call this without sudo: it only prints a script, and root runs that. (Otherwise all of fedlora would run "
            "as root, and anybody who can write its virtual environment would be root.)"
        )
    home = folder.resolve()
    user = user or _owner(home)
    _check_user(user)
    units_of = _site if is_site(home) else _server
    texts, folders = units_of(home, user, memory, label)
    for name in texts:
        _check_free(place / name, home)
    made = [place for place in folders if not place.is_dir()]  # a unit does not start if one is missing
    put = ("install", "-m", "0644", "-o", "root", "-g", "root", "/dev/stdin")
    return [
        *([Step(("runuser", "-u", user, "--", "mkdir", "-p", *map(str, made)))] if made else []),
        *(Step((*put, str(place / name)), text) for name, text in texts.items()),
        Step(("systemctl", "daemon-reload")),
        Step(("systemctl", "enable", "--now", *texts)),
    ]


def _owner(folder: Path) -> str:
    """The name of a folder's owner. Raises `ConfigError` for an owner without a name."""
    uid = folder.stat().st_uid if folder.exists() else os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError as error:
        raise ConfigError(f"the owner of {folder}, user id {uid}, has no name, which a unit needs.") from error


Made = tuple[dict[str, str], list[Path]]  # units by name, and the folders that they write


def _site(home: Path, user: str, memory: str | None, label: str) -> Made:
    site = Site.read(SiteFolder(home).site)
    reads = [Path(path) for path in (site.data, site.model) if Path(path).is_absolute()]
    unit = units.site_unit(home, user=user, label=label, reads=reads, memory=memory)
    return {units.unit_name("site", label): unit}, [SiteFolder(home).state]


def _server(home: Path, user: str, memory: str | None, label: str) -> Made:
    there = FederationFolder(home)
    settings = FederationSettings.load(there.settings)
    if settings.network.name is None:
        raise ConfigError(f"{home} is a trial on this machine, which `fedlora flower up` plays: it has no units.")
    ledger = None if settings.privacy is None else Path(settings.privacy.ledger)
    mine = settings.at_server
    reads = [Path(path) for path in (mine.model, mine.validation, mine.test) if path and Path(path).is_absolute()]
    texts = {
        units.unit_name("proxy", label): units.proxy_unit(home, settings.network.port, user=user, label=label),
        units.unit_name("server", label): units.server_unit(
            home, user=user, memory=memory, ledger=ledger, label=label, reads=reads
        ),
    }
    outside = [] if ledger is None else [ledger.parent]
    return texts, [*there.written, there.proxy_state, *outside]


def _check_user(user: str) -> None:
    try:
        pwd.getpwnam(user)
    except KeyError as error:
        raise ConfigError(
            f"this machine has no user {quoted(user)}: create it, or name another with --user."
        ) from error


def _check_free(path: Path, home: Path) -> None:
    """Raises `ConfigError` if a unit of that name belongs to another folder."""
    try:
        found = re.search(r"^WorkingDirectory=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return
    if found is not None and found[1].replace("%%", "%") != str(home):
        raise ConfigError(
            f"{path} is the unit of {found[1]}. Give a second one on this machine its own name, such as --name "
            f"{home.name}. If that folder was moved here: systemctl disable --now {path.stem}, and delete {path} first."
        )


__all__ = ["UNITS", "Step", "steps"]
