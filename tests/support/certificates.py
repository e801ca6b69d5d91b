"""Certificates with whatever names and dates a test asks for."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.timedelta()
DAY = datetime.timedelta(days=1)
Key = ec.EllipticCurvePrivateKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def named(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def signed(
    subject: x509.Name,
    key: Key,
    issuer: x509.Name,
    signer: Key,
    begins: datetime.timedelta,
    ends: datetime.timedelta,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """Of an authority, or with `hosts` of a server; it holds from `begins` to `ends`, counted from now."""
    now, ca = datetime.datetime.now(datetime.UTC), not hosts
    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment"), False)
    no |= dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **no)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now + begins).not_valid_after(now + ends)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )  # fmt: skip
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return made.sign(signer, hashes.SHA256())


def write_server(folder: Path, certificate: x509.Certificate, key: Key) -> None:
    """server.crt, and server.key, which nobody else may read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").touch(mode=0o600)
    (folder / "server.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


def certificates(
    folder: Path,
    hosts: Sequence[str],
    *,
    begins: datetime.timedelta = -DAY,
    ends: datetime.timedelta = 30 * DAY,
    of: Path | None = None,
) -> None:
    """ca.crt, server.crt, server.key in `folder`: an authority, and a certificate for `hosts` that holds from `begins`
    to `ends`, counted from now. of: the folder of an authority that is there, ca.crt and ca.key."""
    folder.mkdir(exist_ok=True)
    authority, key, issuer = new_key(), new_key(), named("test CA")
    if of is None:
        root = signed(issuer, authority, issuer, authority, -60 * DAY, 60 * DAY)
        (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    else:
        kept = serialization.load_pem_private_key((of / "ca.key").read_bytes(), None)
        assert isinstance(kept, Key)
        authority, issuer = kept, x509.load_pem_x509_certificate((of / "ca.crt").read_bytes()).subject
    write_server(folder, signed(named(hosts[0]), key, issuer, authority, begins, ends, hosts), key)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
