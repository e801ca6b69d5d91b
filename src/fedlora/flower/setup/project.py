"""`fedlora flower init`: everything that a federation's server needs, in one folder. `places` names its files.

It contains no site's data and no site's private key, except in a trial on one machine, whose sites have folders here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlora.adapters.io import write_adapter
from fedlora.core.folders import replacing_folder
from fedlora.flower.bundle import bundle, digest
from fedlora.flower.places import FederationFolder
from fedlora.flower.serving.superlink import LOOPBACK
from fedlora.flower.setup.policy_file import Rank, policy_text
from fedlora.flower.setup.proxy import nginx_configuration
from fedlora.flower.setup.start import Start
from fedlora.flower.terms import certificates
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.facts import server_facts, write_agreed
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.settings import FederationSettings


@dataclass(frozen=True, eq=False)
class Federation:
    """The source of a folder. clients: site -> rank, in order. known: the facts about the base model."""

    settings: FederationSettings
    clients: Mapping[str, Rank]
    start: Start
    known: Facts = field(default_factory=Facts)

    @property
    def policy(self) -> str:
        """The text of its first policy.toml."""
        private, shares = self.settings.privacy is not None, self.settings.server.memory is None
        return policy_text(self.clients, private=private, shares=shares)


def write_federation(building: Path, home: Path, made: Federation) -> None:
    """Write all files except a trial's sites, into the empty folder `building`, which will be moved to `home`.

    Raises:
        ConfigError: a path that the proxy's configuration cannot name.
    """
    building.chmod(0o700)
    there = FederationFolder(building)
    made.settings.write(there.settings)
    there.policy.write_text(made.policy, encoding="utf-8")
    write_adapter(there.start, made.start.adapter, made.start.spec)
    for place in (there.path / "keys", there.path / "requests", *there.written):
        place.mkdir(mode=0o700)
    network = made.settings.network
    certificates.write_loopback(there.certificates)
    if network.name is not None:
        certificates.write_public(there.public, network.name)
    write_agreed(there.agreement, made.known)
    write_derived(building, home, made, there)


def write_derived(building: Path, home: Path, made: Federation, authority: FederationFolder) -> None:
    """Write the files that follow from the others: proxy, join files.

    Args:
        building: an empty folder. home: their later place. authority: the folder with the certificates for sites.

    Raises:
        ConfigError: a path that the proxy's configuration cannot name.
    """
    there, network = FederationFolder(building), made.settings.network
    if network.name is not None:
        for place in (there.proxy.parent, there.proxy_state):
            place.mkdir(mode=0o700)
        adapter = made.start.adapter
        proxy = nginx_configuration(
            home, name=network.name, tensors=2 * len(adapter.modules) + len(adapter.heads), port=network.port,
            superlink_port=network.superlink_port,
        )  # fmt: skip
        there.proxy.write_text(proxy, encoding="utf-8")
    (building / "join").mkdir(mode=0o700)
    facts = server_facts(made.settings, made.known, made.start.adapter.modules).table()
    for name, rank in made.clients.items():
        text = join_file(authority, made.settings, name, rank, facts).text()
        there.join(name).write_text(text, encoding="utf-8")


def make_federation(folder: Path, made: Federation) -> None:
    """Make the folder of a federation with sites elsewhere. Raises `ConfigError`; then nothing is left."""
    with replacing_folder(folder) as building:
        write_federation(building, folder.resolve(), made)


def join_file(
    there: FederationFolder, settings: FederationSettings, name: str, rank: Rank, facts: Mapping[str, Any]
) -> JoinFile:
    """One site's join file: in a trial it names the SuperLink itself, on loopback, otherwise the proxy."""
    network = settings.network
    authority = there.certificates if network.name is None else there.public
    ca = (authority / "ca.crt").read_text(encoding="ascii")
    server, port = (LOOPBACK, network.superlink_port) if network.name is None else (network.name, network.port)
    largest = rank if isinstance(rank, int) else max(rank.values())
    agreed = settings.travelling()
    return JoinFile(settings.id, name, largest, server, port, ca, agreed, dict(facts), digest(bundle()))


__all__ = ["Federation", "join_file", "make_federation", "write_derived", "write_federation"]
