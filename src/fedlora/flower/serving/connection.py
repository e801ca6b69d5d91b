"""How the SuperLink of a federation's folder is started and reached, and who may speak to it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedlora.errors import ConfigError
from fedlora.flower import children
from fedlora.flower.places import FederationFolder
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings


def connection(folder: FederationFolder) -> str:
    """The SuperLink's address, as $FLWR_HOME has it. Raises `ConfigError`."""
    path = folder.connection
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]
        return str(known[known["default"]]["address"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder.path} is no folder of `fedlora flower init`: {path} says no address.") from error


def check_ports(folder: FederationFolder) -> None:
    """Refuse a folder whose files name other ports than its federation.toml, which would be ignored without a word.

    Raises:
        ConfigError: they differ; says which file, both ports and what to do. Or: settings that cannot be read.
    """
    network = FederationSettings.load(folder.settings).network
    there, key = int(connection(folder).rpartition(":")[2]), "network.superlink_port"
    found, wanted = folder.connection, network.superlink_port
    names = sorted(Policy.read(folder.policy).clients)
    if there == wanted:
        joins = [folder.join(name) for name in names]
        if network.name is None:  # a trial: what its sites dial
            joins += [folder.site(name).join for name in names]
        else:
            key, wanted = "network.port", network.port
        others = [(path, port) for path in joins if (port := _port_of(path)) is not None and port != wanted]
        found, there = others[0] if others else (found, wanted)
    if there == wanted:
        return
    if network.name is None:
        todo = (
            f"The ports of a trial are set when it is made: set {key} back to {there}, or make the trial anew with "
            f"`fedlora flower init --superlink-port {wanted}`."
        )
    else:
        hand = "; hand every site its new join file then" if key == "network.port" else ""
        todo = f"`fedlora flower renew {folder.path}` writes all files that follow from it{hand}. Or set it back."
    raise ConfigError(f"{folder.settings} says {key} = {wanted}, and {found} says {there}. {todo}")


def _port_of(join: Path) -> int | None:
    """What a join file dials; None where there is none or none that can be read, which who needs it will say."""
    try:
        return JoinFile.read(join).port
    except ConfigError:
        return None


def superlink_command(folder: FederationFolder, address: str) -> list[str]:
    """What starts the SuperLink: on loopback, with its database, TLS and node authentication."""
    host, _, port = address.rpartition(":")
    certs = folder.certificates
    return [
        sys.executable, "-m", children.SUPERLINK, "--host", host, "--port", port, "--database", str(folder.database),
        "--disable-runtime-dependency-installation", "--ssl-ca-certfile", f"{certs}/ca.crt",
        "--ssl-certfile", f"{certs}/server.crt", "--ssl-keyfile", f"{certs}/server.key", "--enable-supernode-auth",
    ]  # fmt: skip


def public_key(path: Path) -> bytes:
    """A node's public key as Flower stores it, from an OpenSSH file. Raises `ConfigError`."""
    try:
        key = certificates.public_key(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no public key that Flower takes: {error}") from error
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


__all__ = ["check_ports", "connection", "public_key", "superlink_command"]
