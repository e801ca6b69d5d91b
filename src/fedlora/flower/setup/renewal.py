"""`fedlora flower renew`: the next certificates, and all files that follow from federation.toml and policy.toml.

For an expiring certificate, another name or port, a folder that was moved, a fedlora that was upgraded. It leaves keys,
settings, policy, start and results alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedlora.core import files
from fedlora.flower.places import FederationFolder
from fedlora.flower.setup.members import changing
from fedlora.flower.setup.project import Federation, derived
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.settings import FederationSettings


@dataclass(frozen=True)
class Renewed:
    """The changes. loopback, public: new certificates. handed: what is new in the join files, of "server", "port" and
    "ca". changed: files with new content."""

    loopback: bool
    public: bool
    handed: tuple[str, ...]
    changed: tuple[Path, ...]


def renew(home: Path) -> Renewed:
    """Renew a federation's folder.

    Raises:
        ConfigError: no such folder, or an authority whose key is not here.
    """
    with changing(home) as (there, settings, policy):
        joins = {path: JoinFile.read(path) for path in sorted(there.join("x").parent.glob("*.toml"))}
        clients = {join.site: join.rank for join in joins.values()} | dict(policy.clients)  # also who is only invited
        made = Federation.stored(there, settings, clients)
        loopback, public = _certificates(there, settings)
        changed, handed = list[Path](), set[str]()
        for path, text in derived(there, there.path, made).items():
            if path.is_file() and path.read_text(encoding="utf-8") == text:
                continue
            files.write(path, text)
            changed.append(path)
            if (old := joins.get(path)) is not None:
                new = JoinFile.read(path)
                handed |= {part for part in ("server", "port", "ca") if getattr(old, part) != getattr(new, part)}
    return Renewed(loopback, public, tuple(sorted(handed)), tuple(changed))


def _certificates(there: FederationFolder, settings: FederationSettings) -> tuple[bool, bool]:
    """Make the next ones: for loopback if it expires soon, as a running SuperLink has the old; for the name always."""
    network = settings.network
    found = certificates.verdict(there.certificates, "127.0.0.1")
    loopback = not found.sound or found.days < certificates.SOON
    if loopback:
        certificates.write_loopback(there.certificates)
    if network.name is None:
        return loopback, False
    found = certificates.verdict(there.public, network.name)
    ours = (there.public / "ca.key").is_file() or not (there.public / "ca.crt").is_file()
    if ours or not found.sound:
        certificates.write_public(there.public, network.name)
    return loopback, ours


__all__ = ["Renewed", "renew"]
