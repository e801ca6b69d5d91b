"""How the SuperLink of a federation's folder is started and reached, and who may speak to it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder


def connection(folder: FederationFolder) -> str:
    """The SuperLink's address, as $FLWR_HOME has it. Raises `ConfigError`."""
    path = folder.flower_home / "config.toml"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]
        return str(known[known["default"]]["address"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder.path} is no folder of `fedlora flower init`: {path} says no address.") from error


def superlink_command(folder: FederationFolder, address: str) -> list[str]:
    """What starts the SuperLink: on loopback, with its database, TLS and node authentication."""
    host, _, port = address.rpartition(":")
    command = ["flower-superlink", "--host", host, "--port", port, "--database", str(folder.database)]
    command += ["--disable-runtime-dependency-installation"]
    certs = folder.certificates
    return [
        *command, "--ssl-ca-certfile", f"{certs}/ca.crt", "--ssl-certfile", f"{certs}/server.crt",
        "--ssl-keyfile", f"{certs}/server.key", "--enable-supernode-auth",
    ]  # fmt: skip


def public_key(path: Path) -> bytes:
    """A node's public key as Flower stores it, from an OpenSSH file. Raises `ConfigError`."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key in OpenSSH's format: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not key.curve.name.startswith("secp"):
        raise ConfigError(f"{path} is a key of another kind; Flower takes elliptic curves by NIST (P-384).")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


__all__ = ["connection", "public_key", "superlink_command"]
