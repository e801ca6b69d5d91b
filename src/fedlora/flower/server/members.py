"""Membership: admit sites, give them another key or rank, remove them; also while `fedlora flower serve` runs, which
looks at these files every few seconds.

    FED/policy.toml        name = rank: the clients to ask. The rounds read it again each time, so it is written last
                           when a site comes, and first when it goes
    FED/keys/NAME.pub      the key that the SuperLink accepts for that name

Each file is written completely or not at all, and a call that an error or a crash cut short can be repeated.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedlora.adapters.io import read_adapter
from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.init import write_join
from fedlora.flower.server.opening import playable
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import site_key
from fedlora.flower.terms.policy import Policy, Rank, check_site, with_client, without_client
from fedlora.flower.terms.settings import FederationSettings


@dataclass(frozen=True)
class Admitted:
    """The change. rank: the site's current one. before: its previous one, None for a new site. key: "new", "another" in
    place of its old one, or "the same". note: what the change leaves wrong, or ""."""

    rank: Rank
    before: Rank | None
    key: str
    note: str


def admit(home: Path, name: str, rank: int | None, key: Path | None) -> Admitted:
    """Admit a site by its public key, or give one that takes part another key or rank.

    Args:
        rank: needed for a site that is not in the policy. key: the file that the site sent; needed for a site without.

    Raises:
        ConfigError: no rank, no key, a key of another site, a rank with which the rounds could not continue.
    """
    with changing(home) as (there, settings, policy):
        before = policy.clients.get(name)
        now = before if rank is None else rank
        if now is None:
            raise ConfigError(f"the site {quoted(name)} is new: give it a rank, {name}=8, or check the name.")
        if before is None:
            check_site(name, [*policy.clients])
        if key is None and not there.key(name).is_file():
            raise ConfigError(f"the site {quoted(name)} has no key here yet: give the key.pub that it sent.")
        text, note = there.policy.read_text(encoding="utf-8"), ""
        if now != before:
            text = with_client(text, {name: now})
            note = _check_playable(there, settings, policy, text)
        said = "the same" if key is None else _put_key(there, name, site_key(key))
        if now != before:
            files.write(there.policy, text)
    return Admitted(now, before, said, note)


def _put_key(there: FederationFolder, name: str, line: str) -> str:
    """Raises `ConfigError` for a key that another site has."""
    for path in sorted(there.keys.glob("*.pub")):
        if path.stem != name and path.read_text(encoding="ascii").split()[:2] == line.split():
            raise ConfigError(
                f"this key already belongs to {path.stem!r}, and each site needs its own: was a site's folder copied? "
                f"Make a new key there: ssh-keygen -t ecdsa -b 384 -N '' -f FOLDER/key"
            )
    old = there.key(name).read_text(encoding="ascii").strip() if there.key(name).is_file() else ""
    if old == line:
        return "the same"
    files.write(there.key(name), f"{line}\n")
    return "another" if old else "new"


def remove(home: Path, name: str) -> str:
    """Remove a site and its key. Returns a note, or "".

    Raises:
        ConfigError: no such site; the rounds could not continue without it.
    """
    with changing(home) as (there, settings, policy):
        check_site(name)
        if name not in policy.clients and not there.key(name).is_file():
            raise ConfigError(f"there is no site {quoted(name)}; there are {', '.join(map(quoted, policy.clients))}.")
        note = ""
        if name in policy.clients:
            if len(policy.clients) == 1:
                raise ConfigError(f"{name!r} is the only site; no other would be left. Stop the server instead.")
            text = without_client(there.policy.read_text(encoding="utf-8"), name)
            note = _check_playable(there, settings, policy, text)
            files.write(there.policy, text)
        there.key(name).unlink(missing_ok=True)
        return note


def renew(home: Path) -> bool:
    """Sign the server's next certificate, if the authority's key is here, and write join.toml anew. Returns whether
    join.toml is another one: then the sites need it. Raises `ConfigError`."""
    with changing(home) as (there, settings, _):
        if (there.certificates / "ca.key").is_file():  # otherwise somebody else's authority signs
            certificates.write_server(there.certificates, settings.network.name)
        return write_join(there, settings)


@contextmanager
def changing(home: Path) -> Iterator[tuple[FederationFolder, FederationSettings, Policy]]:
    """A federation's folder, settings and policy, for one change at a time. Raises `ConfigError`."""
    there = FederationFolder(home.resolve())
    settings = FederationSettings.load(there.settings)
    try:
        with (there.path / "members.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield there, settings, Policy.read(there.policy)
    except OSError as error:
        raise ConfigError(f"{home} cannot be changed: {error}.") from error


def _check_playable(there: FederationFolder, settings: FederationSettings, before: Policy, text: str) -> str:
    """Raises `ConfigError` if the rounds could be played under the policy before, but not under one of this text. If
    they could be played under neither, the change may be a step of the repair: why not, as a note."""
    start, _ = read_adapter(there.start, scaling=settings.lora.unit)
    try:
        playable(settings, Policy.of(text, there.policy), start)
    except FedLoRAError as error:
        try:
            playable(settings, before, start)
        except FedLoRAError:
            return f"the rounds cannot be played yet: {error}"
        raise ConfigError(f"{error} Nothing was changed.") from error
    return ""


__all__ = ["Admitted", "admit", "changing", "remove", "renew"]
