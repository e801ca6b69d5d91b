"""A node's verdict on a certificate, without a network: both ends of a TLS handshake in memory."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

SOON = 30  # days before expiry from which it is reported


@dataclass(frozen=True)
class Certificate:
    """The state of a server's certificate. wrong: why a node would refuse it, otherwise "". days: until expiry."""

    days: int
    wrong: str

    @property
    def sound(self) -> bool:
        return not self.wrong

    def said(self) -> str:
        """The state in words."""
        if self.wrong:
            return self.wrong
        return f"valid for {self.days} days" + (": renew it soon (fedlora flower renew)" if self.days < SOON else "")


def verdict(folder: Path, name: str) -> Certificate:
    """server.crt, server.key and ca.crt of `folder`, as a client that dials `name` would see them."""
    paths = {file: folder / file for file in ("ca.crt", "server.crt", "server.key")}
    lacks = [file for file, path in paths.items() if not path.is_file()]
    if lacks:
        return Certificate(0, f"{', '.join(lacks)} missing in {folder}")
    try:
        found = x509.load_pem_x509_certificate(paths["server.crt"].read_bytes())
        x509.load_pem_x509_certificates(paths["ca.crt"].read_bytes())
    except (OSError, ValueError) as error:
        return Certificate(0, f"a certificate in {folder} cannot be read: {error}")
    days = (found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    return Certificate(days, _refused(paths, name))


def _refused(paths: dict[str, Path], name: str) -> str:
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(paths["server.crt"], paths["server.key"], password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        return f"{paths['server.key']} does not belong to {paths['server.crt']}, or has a password: {error}"
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


__all__ = ["Certificate", "verdict"]
