"""Certificates of any name, date and authority, and a server that shows them. No evidence by itself."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Who vouches for servers."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()


def authority(name: str = "a CA") -> Authority:
    key = ec.generate_private_key(ec.SECP384R1())
    return Authority(key, _certificate(name, [], key, name, key, -1, 30, ca=True))


def server_files(
    folder: Path, by: Authority, names: Sequence[str], begin: float = -1, end: float = 30
) -> tuple[Path, Path]:
    """(certificate, key) of a server of those names, from `begin` to `end` days from now."""
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = by.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    made = _certificate(names[0], names, key, str(issuer), by.key, begin, end, ca=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "server.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return folder / "server.crt", folder / "server.key"


def _certificate(
    name: str, names: Sequence[str], key: Any, by: str, signer: Any, begin: float, end: float, *, ca: bool
) -> Any:
    now = datetime.datetime.now(datetime.UTC)

    def said(of: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, of)])

    def host(text: str) -> x509.GeneralName:
        with contextlib.suppress(ValueError):
            return x509.IPAddress(ipaddress.ip_address(text))
        return x509.DNSName(text)

    made = (
        x509.CertificateBuilder().subject_name(said(name)).issuer_name(said(by)).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now + begin * DAY).not_valid_after(now + end * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
    )  # fmt: skip
    if ca:
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    else:
        made = made.add_extension(x509.SubjectAlternativeName([host(n) for n in names]), critical=False)
        made = made.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    return made.sign(signer, hashes.SHA384())


@contextlib.contextmanager
def answering(
    status: int, body: bytes = b"", *, files: tuple[Path, Path] | None = None, late: float = 0.0, dated: bool = True
) -> Iterator[int]:
    """A server on loopback that answers everything so; its port. files: with TLS. late: seconds of its clock behind
    ours. dated: whether it says its time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response_only(status)
            if dated:
                self.send_header("Date", self.date_time_string(_time() - late))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *said: Any) -> None: ...

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None: ...

    server = Quiet(("127.0.0.1", 0), Handler)
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*map(str, files))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _time() -> float:
    return datetime.datetime.now().timestamp()
