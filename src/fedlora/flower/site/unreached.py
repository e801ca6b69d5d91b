"""Finds why no request reaches a server: it checks its name, its port, TLS and its certificate, one after the other."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cryptography import x509

from fedlora.core.echo import shown

Fate = Literal[
    "admitted", "not admitted", "clock", "refused", "name", "closed", "silent", "certificate", "plain", "no federation",
    "stranger",
]  # fmt: skip
_PATIENCE = 8.0  # seconds for each step


@dataclass(frozen=True)
class Server:
    """A server's address. ca: the file with the trusted authority."""

    name: str
    port: int
    ca: Path

    @property
    def address(self) -> str:
        """The address in Flower's form: host:port."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Found:
    """The result. why: a sentence for people. ahead: the seconds by which this machine's clock is ahead of the
    server's, to about one; None if the server did not send its time."""

    fate: Fate
    why: str
    ahead: float | None = None

    @property
    def answered(self) -> bool:
        """Whether a SuperLink answered."""
        return self.fate in ("admitted", "not admitted", "clock", "refused")


def diagnosed(server: Server) -> Found | None:
    """Why no request gets through: name, port, TLS, certificate; None if all of them are right."""
    try:
        addresses = socket.getaddrinfo(server.name, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Found(
            "name",
            f"the name {server.name!r} is not known on this machine ({error.strerror or error}). Is it spelled right, "
            f"and does your DNS (or /etc/hosts) have it?",
        )
    found: Found | None = None
    for family, kind, protocol, _, address in addresses:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(_PATIENCE)
        with connection:
            try:
                connection.connect(address)
            except OSError as error:
                found = _unconnected(server, str(address[0]), error)
                continue
            return _greeted(server, connection)
    return found


def _unconnected(server: Server, address: str, error: OSError) -> Found:
    at = server.address if address == server.name else f"{server.address} ({address})"
    if isinstance(error, ConnectionRefusedError):
        return Found(
            "closed",
            f"{at} refuses the connection: the machine is up, but nothing listens at port {server.port}. Is the proxy "
            f"running there, and is this its port?",
        )
    if isinstance(error, TimeoutError):
        return Found(
            "silent",
            f"{at} does not answer within {_PATIENCE:.0f} seconds: the machine or the line is down, or a firewall here "
            f"or there blocks port {server.port}.",
        )
    return Found("silent", f"{at} cannot be reached from here: {error.strerror or error}. Is the line up?")


def _greeted(server: Server, connection: socket.socket) -> Found | None:
    """The TLS handshake, as Flower makes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=server.ca.read_text(encoding="ascii"))
    except (OSError, ValueError, ssl.SSLError) as error:
        return Found("certificate", f"{server.ca} is no file of certificates: {shown(error)}.")
    try:
        with context.wrap_socket(connection, server_hostname=server.name):
            return None
    except ssl.SSLCertVerificationError as error:
        return Found("certificate", _distrusted(server, error))
    except (TimeoutError, OSError) as error:
        if isinstance(error, TimeoutError):
            return Found(
                "silent",
                f"{server.address} takes the connection, but did not answer the TLS handshake within {_PATIENCE:.0f} "
                f"seconds: it is overloaded, or this is not the port of the proxy.",
            )
        return Found(
            "plain",
            f"{server.address} takes the connection, but not TLS ({shown(getattr(error, 'reason', None) or error)}). "
            f"A site sends nothing there: is it the port of the proxy, and was the proxy started with its certificate?",
        )


def _distrusted(server: Server, error: ssl.SSLCertVerificationError) -> str:
    """Why the certificate is not trusted, from OpenSSL's number (x509_vfy.h) and the certificate itself."""
    shown_there, ours = _certificate_of(server), _first_certificate(server.ca)
    said = error.verify_message or str(error)
    if shown_there is None:
        return f"the certificate of {server.address} is not believed: {said}."
    begin, end = shown_there.not_valid_before_utc, shown_there.not_valid_after_utc
    here = f"by this machine's clock, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code == 10:
        if ours is not None and ours.not_valid_after_utc < datetime.now(UTC) < end:
            ended = f"{ours.not_valid_after_utc:%Y-%m-%d}"
            return f"{server.ca} ended on {ended} ({here}): ask the server for a new join file."
        return (
            f"the certificate of {server.address} ended on {end:%Y-%m-%d %H:%M} UTC ({here}). The server must renew "
            f"it; nothing is sent before. If the date is wrong, set this machine's clock."
        )
    if error.verify_code == 9:
        return (
            f"the certificate of {server.address} begins on {begin:%Y-%m-%d %H:%M} UTC, and {here} it is not that "
            f"late. Is this machine's clock right?"
        )
    if error.verify_code in (62, 64):
        names = ", ".join(_names(shown_there)) or "nobody"
        return (
            f"the certificate at {server.address} is for {names}, not for {server.name}. Is the name right, or did "
            f"another server answer?"
        )
    issuer = shown_there.issuer.rfc4514_string()
    by = f"; ours is {ours.subject.rfc4514_string()!r}" if ours is not None else ""
    return (
        f"the certificate of {server.address} is signed by {issuer!r}, and not by the CA of the join file{by} "
        f"({said}). The server has another certificate now (ask it for a new join file), or something in between "
        f"answers in its place."
    )


def _certificate_of(server: Server) -> x509.Certificate | None:
    """The server's certificate, trusted or not."""
    try:
        shown_there = ssl.get_server_certificate((server.name, server.port), timeout=_PATIENCE)
        return x509.load_pem_x509_certificate(shown_there.encode())
    except (OSError, ValueError):
        return None


def _first_certificate(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None


def _names(certificate: x509.Certificate) -> list[str]:
    """The names in a certificate."""
    try:
        said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [*said.get_values_for_type(x509.DNSName), *map(str, said.get_values_for_type(x509.IPAddress))]


__all__ = ["Fate", "Found", "Server", "diagnosed"]
