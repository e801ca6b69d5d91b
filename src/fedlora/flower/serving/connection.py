"""How to start and reach the SuperLink of a federation's folder, and who may speak to it."""

from __future__ import annotations

import sys
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedlora.errors import ConfigError
from fedlora.flower import children
from fedlora.flower.places import FederationFolder
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings

LOOPBACK = "127.0.0.1"


def connection(folder: FederationFolder) -> str:
    """The SuperLink's address, on loopback. Raises `ConfigError` if this is not a federation's folder."""
    return f"{LOOPBACK}:{FederationSettings.load(folder.settings).network.superlink_port}"


def check_ports(folder: FederationFolder) -> None:
    """Refuse a folder whose files name other ports than its federation.toml, which would be ignored silently.

    Raises:
        ConfigError: they differ (the message has the file, both ports and what to do), or settings cannot be read.
    """
    network, names = FederationSettings.load(folder.settings).network, sorted(Policy.read(folder.policy).clients)
    joins, key, wanted = [folder.join(name) for name in names], "network.port", network.port
    renew = f"`fedlora flower renew {folder.path}` writes all files that follow from it"
    todo = f"{renew}; hand every site its new join file then. Or set it back."
    if network.name is None:  # a trial: its sites dial this port
        joins += [folder.site(name).join for name in names]
        key, wanted = "network.superlink_port", network.superlink_port
        todo = (
            "The ports of a trial are set when it is made: set it back, or make the trial anew with `fedlora flower "
            f"init --superlink-port {wanted}`."
        )
    elif f"server {connection(folder)} " not in folder.proxy.read_text(encoding="utf-8"):
        raise ConfigError(
            f"{folder.settings} says network.superlink_port = {network.superlink_port}, and {folder.proxy} passes "
            f"requests on to another port. {renew}. Or set it back."
        )
    for path in joins:
        if (port := _port_of(path)) not in (None, wanted):
            raise ConfigError(f"{folder.settings} says {key} = {wanted}, and {path} says {port}. {todo}")


def _port_of(join: Path) -> int | None:
    """The port in a join file; None if the file is missing or unreadable, which its readers will report."""
    try:
        return JoinFile.read(join).port
    except ConfigError:
        return None


def superlink_command(folder: FederationFolder, address: str) -> list[str]:
    """The command that starts the SuperLink: on loopback, with its database, TLS and node authentication."""
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
        raise ConfigError(f"{path} is not a public key that Flower accepts: {error}") from error
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


__all__ = ["LOOPBACK", "check_ports", "connection", "public_key", "superlink_command"]
