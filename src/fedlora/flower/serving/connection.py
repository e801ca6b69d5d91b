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
        ConfigError: they differ (the message has the file, the port and what to do), or settings cannot be read.
    """
    network = FederationSettings.load(folder.settings).network
    if network.name is None:  # a trial: its sites dial this port
        for name in Policy.read(folder.policy).clients:
            join = folder.site(name).join
            if join.is_file() and (port := JoinFile.read(join).port) != network.superlink_port:
                raise ConfigError(
                    f"{folder.settings} says network.superlink_port = {network.superlink_port}, and {join} says "
                    f"{port}. The ports of a trial are set when it is made: set it back, or make the trial anew with "
                    f"`fedlora flower init --superlink-port {network.superlink_port}`."
                )
        return
    proxy = folder.proxy.read_text(encoding="utf-8")
    for key, port, words in (
        ("network.port", network.port, f"{network.port} ssl;"),
        ("network.superlink_port", network.superlink_port, f"server {connection(folder)} "),
    ):
        if words not in proxy:
            raise ConfigError(
                f"{folder.settings} says {key} = {port}, and {folder.proxy} has another port. `fedlora flower renew "
                f"{folder.path}` writes all files that follow from it; hand every site its new join file then. Or set "
                f"it back."
            )


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
