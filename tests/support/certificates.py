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
    now = datetime.datetime.now(datetime.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("test CA")
    if of is not None:
        kept = serialization.load_pem_private_key((of / "ca.key").read_bytes(), None)
        assert isinstance(kept, ec.EllipticCurvePrivateKey)
        authority, issuer = kept, x509.load_pem_x509_certificate((of / "ca.crt").read_bytes()).subject

    def one(subject: x509.Name, public: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.CertificateBuilder:
        no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment"), False)
        no |= dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False)
        usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **no)
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 60 * DAY if ca else now + begins)
            .not_valid_after(now + 60 * DAY if ca else now + ends)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )  # fmt: skip

    root = one(issuer, authority.public_key(), ca=True).sign(authority, hashes.SHA256())
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    leaf = one(_name(hosts[0]), key.public_key(), ca=False).add_extension(names, critical=False)
    if of is None:
        (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    signed = leaf.sign(authority, hashes.SHA256())
    (folder / "server.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").touch(mode=0o600)
    (folder / "server.key").write_bytes(private)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
