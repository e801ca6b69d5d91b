"""How to start and reach the SuperLink of a federation's folder, and who may speak to it."""

from __future__ import annotations

import sys
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedlora.errors import ConfigError
from fedlora.flower import children
from fedlora.flower.places import FederationFolder
from fedlora.flower.terms import certificates
from fedlora.flower.terms.settings import FederationSettings

LOOPBACK = "127.0.0.1"


def connection(folder: FederationFolder) -> str:
    """The SuperLink's address, on loopback. Raises `ConfigError` if this is not a federation's folder."""
    return f"{LOOPBACK}:{FederationSettings.load(folder.settings).network.superlink_port}"


def check_derived(folder: FederationFolder) -> None:
    """Refuse a folder whose other files name another place or port than its federation.toml: one would be ignored.

    Raises:
        ConfigError: they differ (the message has the file, what differs and what to do), or settings cannot be read.
    """
    network = FederationSettings.load(folder.settings).network
    if network.name is None:  # a trial
        return
    proxy = folder.proxy.read_text(encoding="utf-8")
    for what, words in (
        (f"{folder.settings} says network.port = {network.port}", f"{network.port} ssl;"),
        (f"{folder.settings} says network.superlink_port = {network.superlink_port}", f"server {connection(folder)} "),
        (f"the folder is {folder.path}", f"{folder.public}/server.crt"),
    ):
        if words not in proxy:
            raise ConfigError(
                f"{what}, and {folder.proxy} has another one. `fedlora flower renew {folder.path}` writes all files "
                f"that follow from it; hand every site its new join file then. Or set it back."
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


__all__ = ["LOOPBACK", "check_derived", "connection", "public_key", "superlink_command"]
