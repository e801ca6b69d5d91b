"""Membership: admit sites, give them another key or rank, remove them; also while `fedlora flower serve` runs,
which looks at these files every few seconds.

    FED/policy.toml        name = rank: the clients to ask. The rounds read it again each time, so it is written last
                           when a site comes, and first when it goes
    FED/keys/NAME.pub      the key that the SuperLink accepts for that name
    FED/requests/NAME.toml the site's request
    FED/join/NAME.toml     the join file for the site
    FED/removed/           removed files, by name and time

Each file is written completely or not at all, and a call that an error or a crash cut short can be repeated.
"""

from __future__ import annotations

import datetime
import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedlora.adapters.io import read_adapter
from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import playable
from fedlora.flower.setup.policy_file import Rank, with_client, without_client
from fedlora.flower.setup.project import Federation, derived
from fedlora.flower.setup.start import Start, check_ranks
from fedlora.flower.terms import certificates
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.facts import admitted, agreed, write_agreed
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.names import check_site, checked_rank
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings


@dataclass(frozen=True)
class Admitted:
    """The change. rank: the site's current one. before: its previous rank, None for a new site. old_key: the
    fingerprint of its previous key, if that changed. known: everything was there already. learned: facts that nobody
    had known. notes: what the change leaves wrong."""

    site: str
    fingerprint: str
    rank: Rank
    before: Rank | None
    old_key: str | None
    known: bool
    learned: tuple[str, ...]
    notes: tuple[str, ...]


def admit(home: Path, request: Path, *, rank: int | None = None, rotate: bool = False) -> Admitted:
    """Admit a site by its request.

    Args:
        rank: for a site that is not in the policy, instead of its join file's; for one that is, another rank.
        rotate: its key may differ from the previous one.

    Raises:
        ConfigError: a request from another federation or from an uninvited site, another key, a rank with which the
            rounds could not continue. Disagreement: another base model, other versions.
    """
    asked = Request.read(request)
    with changing(home) as (there, settings, policy):
        if asked.federation != settings.id:
            raise ConfigError(
                f"the request of {asked.site!r} is for the federation {quoted(asked.federation)}, but this one is "
                f"{settings.id!r}: the site joined with another server's join.toml. Send it {there.join(asked.site)}."
            )
        _refuse_retired(there, asked)
        name, before = asked.site, policy.clients.get(asked.site)
        now = _rank(there, name, before, rank, list(policy.clients))
        old = _old_key(there, asked, rotate)
        model, learned = admitted(settings, agreed(there.agreement), name, Facts.from_table(asked.facts))
        policy_now, notes = there.policy.read_text(encoding="utf-8"), list[str]()
        if now != before:
            policy_now = with_client(policy_now, name, now)
            notes = _check_playable(there, settings, policy, policy_now, {name: now})
        known = there.key(name).is_file() and old is None and now == before and not learned
        if old is not None:
            _retire(there, "rotated", [there.key(name)])
        files.write(there.request(name), asked.text())
        files.write(there.key(name), f"{asked.public_key.strip()}\n")
        if learned:
            write_agreed(there.agreement, model)
        if now != before:
            files.write(there.policy, policy_now)
    return Admitted(name, asked.fingerprint, now, before, old, known, learned, tuple(notes))


def invite(home: Path, name: str, rank: int | None) -> Path:
    """Write the join file of a new site, or of one in the policy again. Returns its path.

    Raises:
        ConfigError: an invalid name, a new site without a rank, a rank that contradicts the policy's, or with which
            the rounds could not continue.
    """
    with changing(home) as (there, settings, policy):
        known = policy.clients.get(name)
        if known is None:
            check_site(name, list(policy.clients))
            if rank is None:
                raise ConfigError(f"{quoted(name)} is a new site and has no rank yet; give one: --new {name}=8.")
            checked_rank(rank, name)
            text = with_client(there.policy.read_text(encoding="utf-8"), name, rank)
            _check_playable(there, settings, policy, text, {name: rank})
        elif rank is not None and rank != known:
            raise ConfigError(
                f"{name!r} already takes part, with rank {known}: --new {name} writes its join file again. For "
                f"another rank, admit its request again with --rank {rank}."
            )
        made = Federation.stored(there, settings, {name: known or rank or 1})
        files.write(there.join(name), derived(there, there.path, made)[there.join(name)])
        return there.join(name)


def remove(home: Path, name: str) -> list[str]:
    """Remove a site; its key, request and join file go to removed/. Returns notes.

    Raises:
        ConfigError: no such site; the rounds could not continue without it.
    """
    with changing(home) as (there, settings, policy):
        check_site(name)
        present = [p for p in (there.key(name), there.request(name), there.join(name)) if p.is_file()]
        if name not in policy.clients and not present:
            raise ConfigError(f"there is no site {quoted(name)}; there are {', '.join(map(quoted, policy.clients))}.")
        notes: list[str] = []
        if name in policy.clients:
            if len(policy.clients) == 1:
                raise ConfigError(f"{name!r} is the only site; no other would be left. Stop the server instead.")
            text = without_client(there.policy.read_text(encoding="utf-8"), name)
            notes = _check_playable(there, settings, policy, text, {}, f"without {name!r}: ")
            files.write(there.policy, text)
        _retire(there, "removed", present)
        for path in present:
            path.unlink()
        return notes


# -------------------------------------------------------------------------------------------------------------- inside


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


def _rank(there: FederationFolder, name: str, before: Rank | None, given: int | None, others: list[str]) -> Rank:
    if given is not None:
        checked_rank(given, name)
    if before is not None:
        return before if given is None else given
    check_site(name, others)
    if given is not None:
        return given
    if not there.join(name).is_file():
        raise ConfigError(
            f"the site {name!r} is not in {there.policy}, and has no join file here: it was not invited, or it was "
            f"removed (then its files are in {there.removed}). To admit it, give it a rank: fedlora flower admit ... "
            f"--rank 8."
        )
    return JoinFile.read(there.join(name)).rank


def _check_playable(
    there: FederationFolder, settings: FederationSettings, before: Policy, text: str, new: Mapping[str, Rank],
    said: str = "",
) -> list[str]:  # fmt: skip
    """Raises `ConfigError` if the rounds could be played under the policy before, but not under one of this text. If
    they could be played under neither, the change may be a step of the repair: why not, as a note. new: ranks that are
    given here, none of which may be useless. said: begins an error.
    """
    start = Start(*read_adapter(there.start, scaling=settings.lora.unit))
    check_ranks(start.shapes, new)
    try:
        playable(settings, Policy.of(text, there.policy), start.adapter)
    except FedLoRAError as error:
        try:
            playable(settings, before, start.adapter)
        except FedLoRAError:
            return [f"the rounds cannot be played yet: {error}"]
        raise ConfigError(f"{said}{error} Nothing was changed.") from error
    return []


def _old_key(there: FederationFolder, asked: Request, rotate: bool) -> str | None:
    """The fingerprint of the key that this request replaces."""
    new = asked.fingerprint
    for path in sorted(there.key(asked.site).parent.glob("*.pub")):
        if path != there.key(asked.site) and certificates.fingerprint(path.read_text()) == new:
            raise ConfigError(
                f"the key {new} already belongs to {path.stem!r}, and each site needs its own: was a site's folder "
                f"copied? Make a new key there: fedlora flower site FOLDER --rotate."
            )
    if not there.key(asked.site).is_file():
        return None
    old = certificates.fingerprint(there.key(asked.site).read_text())
    if old == new:
        return None
    if not rotate:
        raise ConfigError(
            f"{asked.site!r} is admitted with the key {old}, but this request has another one, {new}. If the site "
            f"confirms by telephone that it made a new key, call this again with --rotate."
        )
    return old


def _refuse_retired(there: FederationFolder, asked: Request) -> None:
    """Raises `ConfigError` for a key that was rotated or removed here: somebody else may have it."""
    for path in sorted(there.removed.glob("*.pub")):
        if certificates.fingerprint(path.read_text()) == asked.fingerprint:
            raise ConfigError(
                f"the key {asked.fingerprint} was retired here (it is {path.name} in {there.removed}), and is not "
                f"accepted again. If this is an old request of {asked.site!r}, ask for the newest one. Otherwise let "
                f"the site make a new key (fedlora flower site FOLDER --rotate) and send its new request.toml."
            )


def _retire(there: FederationFolder, why: str, paths: list[Path]) -> None:
    """Put copies of a site's files away, with the time and why."""
    at = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    for path in paths:
        files.write(there.removed / f"{path.stem}-{at}-{why}-{path.parent.name}{path.suffix}", path.read_bytes())


__all__ = ["Admitted", "admit", "changing", "invite", "remove"]
