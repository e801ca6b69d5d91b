"""Keys and certificates: one authority, one server's certificate, and a pair of keys for each node.

The certificate names the server, localhost and 127.0.0.1: the proxy shows it to the sites, and the SuperLink to the
proxy. The authority's key stays in FED/certs/ca.key, so that the next certificate can be signed with it; sites get
ca.crt in join.toml.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import ConfigError

AUTHORITY_DAYS, SERVER_DAYS = 3650, 397
SOON = 30  # days before expiry from which it is reported
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


Signer = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]  # an authority, and the key that signs with it


def write_server(folder: Path, name: str) -> None:
    """Write server.crt and server.key for the server's name and for loopback, and ca.crt and ca.key if there are none:
    an existing authority signs again.

    Raises:
        ConfigError: the existing authority cannot be read.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if (folder / "ca.crt").exists():
        signer = _kept_authority(folder)
    else:
        signer = _authority(f"fedlora {name}"[:64])
        write_private(folder / "ca.key", _private(signer[1], serialization.PrivateFormat.PKCS8))
        files.write(folder / "ca.crt", _pem(signer[0]))
    _write_server(folder, signer, tuple(dict.fromkeys((name, "localhost", "127.0.0.1"))), SERVER_DAYS)


def verdict(folder: Path, name: str) -> tuple[str, bool]:
    """What a node that dials `name` would say of server.crt, server.key and ca.crt in `folder`, and whether it would go
    on: from both ends of a TLS handshake in memory."""
    paths = {file: folder / file for file in ("ca.crt", "server.crt", "server.key")}
    try:
        found = x509.load_pem_x509_certificate(paths["server.crt"].read_bytes())
        wrong = _why_refused(paths, name)
    except (OSError, ValueError) as error:  # ssl's too
        wrong = f"{', '.join(paths)} in {folder} do not belong together, or cannot be read: {error}"
    if wrong:
        return wrong, False
    days = (found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    return f"valid for {days} days" + (": renew it soon (fedlora flower renew)" if days < SOON else ""), True


def new_key() -> tuple[bytes, bytes]:
    """A node's (private key, public key), in OpenSSH's format, on the curve P-384."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return _private(key, serialization.PrivateFormat.OpenSSH), public + b"\n"


def public_key(text: str) -> ec.EllipticCurvePublicKey:
    """A node's public key from its one line.

    Raises:
        ConfigError: a private key, another kind of key, or none.
    """
    if "PRIVATE KEY" in text:
        raise ConfigError(
            "this is a private key, which must never leave its site. Delete this copy, make a new pair of keys at the "
            "site, and send key.pub."
        )
    try:
        found = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm, UnicodeEncodeError) as error:
        raise ConfigError(f"{quoted(text[:60])} is not a public key in OpenSSH's format.") from error
    if not isinstance(found, ec.EllipticCurvePublicKey) or not isinstance(found.curve, _CURVES):
        raise ConfigError(
            f"Flower does not accept keys of kind {quoted(text.split(' ')[0])}: it needs an elliptic curve of NIST. "
            f"ssh-keygen -t ecdsa -b 384 makes one, and so does fedlora flower site."
        )
    return found


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _authority(name: str) -> Signer:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    found = (
        _begun(subject, subject, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(ca=True), critical=True).sign(key, hashes.SHA384())
    )  # fmt: skip
    return found, key


def _kept_authority(folder: Path) -> Signer:
    try:
        found = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"ca.crt and ca.key in {folder}, which sign, cannot be read: {error}.") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey), "`write_server` made it"
    return found, key


def _write_server(folder: Path, signer: Signer, hosts: Sequence[str], days: int) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])] if len(hosts[0]) <= 64 else [])
    authority, secret = signer
    found = (
        _begun(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=not list(subject))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(secret.public_key()), critical=False)
        .add_extension(_usage(ca=False), critical=True).sign(secret, hashes.SHA384())
    )  # fmt: skip
    write_private(folder / "server.key", _private(key, serialization.PrivateFormat.PKCS8))
    files.write(folder / "server.crt", _pem(found))


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
    return builder.not_valid_after(now + datetime.timedelta(days=days))


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _why_refused(paths: dict[str, Path], name: str) -> str:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(paths["server.crt"], paths["server.key"], password=lambda: "")
    node = ssl.create_default_context(cafile=str(paths["ca.crt"]))
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    one, other = node.wrap_bio(here, there, server_hostname=name), server.wrap_bio(there, here, server_side=True)
    for side in 8 * (one, other):  # each turn gives the other side something to read
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason or error
            return f"a node would refuse {paths['server.crt']}: {why}. To make a new one: fedlora flower renew"
    return ""


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _pem(found: x509.Certificate) -> bytes:
    return found.public_bytes(serialization.Encoding.PEM)
