"""Membership: admit sites, give them another key or rank, remove them; also while `fedlora flower serve` runs, which
looks at these files every few seconds.

    FED/policy.toml        name = rank: the clients to ask. The rounds read it again each time, so it is written last
                           when a site comes, and first when it goes
    FED/keys/NAME.pub      the key that the SuperLink accepts for that name

Each file is written completely or not at all, and a call that an error or a crash cut short can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlora.adapters.io import read_adapter
from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import locked
from fedlora.flower.server.init import write_join
from fedlora.flower.server.journal import rounds_done
from fedlora.flower.server.opening import check_agreed, playable
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile, site_key
from fedlora.flower.terms.policy import Policy, check_site, with_client, without_client
from fedlora.flower.terms.settings import FederationSettings
from fedlora.given_files import parse_toml


def admit(home: Path, name: str, rank: int | None, key: Path | None) -> int:
    """Admit a site by its public key, or give one that takes part another key or rank. Returns its rank.

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
        text = there.policy.read_text(encoding="utf-8")
        if now != before:
            text = with_client(text, {name: now})
            _check_playable(there, settings, text)
        if key is not None:
            _put_key(there, name, site_key(key))
        if now != before:
            files.write(there.policy, text)
    return now


def _put_key(there: FederationFolder, name: str, line: str) -> None:
    """Raises `ConfigError` for a key that another site has."""
    for path in sorted(there.keys.glob("*.pub")):
        if path.stem != name and path.read_text(encoding="ascii").split()[:2] == line.split():
            raise ConfigError(
                f"this key already belongs to {path.stem!r}, and each site needs its own: was a site's folder copied? "
                f"Make a new key there: ssh-keygen -t ecdsa -b 384 -N '' -f FOLDER/key"
            )
    files.write(there.key(name), f"{line}\n")


def remove(home: Path, name: str) -> None:
    """Remove a site and its key.

    Raises:
        ConfigError: no such site; the rounds could not continue without it.
    """
    with changing(home) as (there, settings, policy):
        check_site(name)
        if name not in policy.clients and not there.key(name).is_file():
            raise ConfigError(f"there is no site {quoted(name)}; there are {', '.join(map(quoted, policy.clients))}.")
        if name in policy.clients:
            text = without_client(there.policy.read_text(encoding="utf-8"), name)
            _check_playable(there, settings, text)
            files.write(there.policy, text)
        there.key(name).unlink(missing_ok=True)


def renew(home: Path) -> bool:
    """Sign the server's next certificate, if the authority's key is here, and write join.toml anew. Returns whether
    the sites need it: address or terms are others. Raises `ConfigError`: also for settings that may not change any
    more."""
    with changing(home) as (there, settings, _):
        join = JoinFile.read(there.join)
        if rounds := rounds_done(there.rounds):
            check_agreed(there, settings, join, rounds)
        if (there.certificates / "ca.key").is_file():  # otherwise somebody else's authority signs
            certificates.write_server(there.certificates, settings.network.name)
        write_join(there, settings, join.facts)
        now = JoinFile.read(there.join)
        return (join.server, join.terms()) != (now.server, now.terms())


@contextmanager
def changing(home: Path) -> Iterator[tuple[FederationFolder, FederationSettings, Policy]]:
    """A federation's folder, settings and policy, for one change at a time. Raises `ConfigError`."""
    there = FederationFolder(home.resolve())
    settings = FederationSettings.load(there.settings)
    try:
        with locked(there.path / "members.lock", f"changes the members of {home}"):
            yield there, settings, Policy.read(there.policy)
    except OSError as error:
        raise ConfigError(f"{home} cannot be changed: {error}.") from error


def _check_playable(there: FederationFolder, settings: FederationSettings, text: str) -> None:
    """Raises `ConfigError` if no round could be played under a policy of this text."""
    start, _ = read_adapter(there.start, scaling=settings.lora.unit)
    try:
        playable(settings, Policy.made(parse_toml(text), "the policy"), start)
    except FedLoRAError as error:
        raise ConfigError(f"{error} Nothing was changed.") from error
