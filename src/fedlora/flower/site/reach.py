"""Whether this site can reach its server and would be let in: one request of Flower's own kind, and its answer.

The request is to go online with a heartbeat interval of 0, which every SuperLink refuses: the answer says whether the
key is registered, whether the clocks agree and whether the server is there, and nothing changes. If the request fails,
the system's or OpenSSL's own error says at which step.
"""

from __future__ import annotations

import email.utils
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from fedlora.core.text import shown
from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.terms.joining import JoinFile

# Seconds by which a site's clock may be ahead of the SuperLink's, or behind it: the age of a message that it takes.
AHEAD, BEHIND = SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


@dataclass(frozen=True)
class Found:
    """The result. fate: "admitted", or one word for the obstacle. why: a sentence for people."""

    fate: str
    why: str


def look(server: JoinFile, here: SiteFolder) -> Found:
    """Ask the server, as the site's join file names it, whether it would let this site in."""
    import httpx

    try:
        return _asked(server, here.ca.read_bytes(), private_key(here.key))
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        return _unreached(server, error)


_OBSTACLES: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        socket.gaierror,
        "name",
        "the name {name!r} is not known on this machine ({said}). Is it spelled as the server's people gave it, and do "
        "they or your DNS (or /etc/hosts) know it?",
    ),
    (
        ConnectionRefusedError,
        "closed",
        "{at} refuses the connection: the machine is there, and nothing listens at port {port}. Is the proxy running "
        "there, and is this its port?",
    ),
    (
        ssl.SSLCertVerificationError,
        "certificate",
        "the certificate of {at} is not trusted: {said}. By this machine's clock it is {now:%Y-%m-%d %H:%M} UTC: if "
        "that is wrong, set it. If the certificate has expired, the server must renew it. If name or authority differ, "
        "ask the server for its new join file; otherwise a device in between answers in its place. This site sends "
        "nothing until then.",
    ),
    (BaseException, "silent", "{at} cannot be reached from here: {said}."),
)


def _unreached(server: JoinFile, error: BaseException) -> Found:
    """Why the request did not get through."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    words = getattr(error, "verify_message", "").rstrip(".") or getattr(error, "strerror", None) or error
    fate, why = next((fate, why) for kinds, fate, why in _OBSTACLES if isinstance(error, kinds))
    said = shown(words or type(error).__name__)
    return Found(
        fate, why.format(at=server.address, name=server.server, port=server.port, said=said, now=datetime.now(UTC))
    )


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's own key. Raises `ConfigError` if the file does not hold one."""
    try:
        found = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
        return found
    except Exception as error:
        raise ConfigError(f"the key {path} cannot be read: {error}.") from error


def _asked(server: JoinFile, ca: bytes, secret: ec.EllipticCurvePrivateKey) -> Found:
    """The request. Raises httpx.TransportError if it does not get through."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    known: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(secret, secret.public_key()),
    ]
    with FleetHttpClient.from_server_address(server.address, False, ca, interceptors=known) as client:
        asked_at = time.time()
        try:
            request = ActivateNodeRequest(public_key=public_key_to_bytes(secret.public_key()), heartbeat_interval=0.0)
            client.ActivateNode(request)
        except httpx.HTTPStatusError as error:
            return _said(server, error.response, _ahead(error.response.headers.get("date"), asked_at, time.time()))
        except (RuntimeError, ValueError) as error:  # an answer of 200 that is not Flower's
            return Found("refused", f"{server.address} answers, but not as Flower does: {shown(error)}.")
    return Found("refused", f"{server.address} answers, but not as Flower does.")


# Flower's code, or an HTTP status -> the fate, and what it means
_ANSWERS: dict[int, tuple[str, str]] = {
    2003: ("admitted", "{at} answers and knows this site's key."),
    2004: (
        "not admitted",
        "{at} answers, but this site's key is not registered there. Send request.toml to the server; the site "
        "continues by itself after `fedlora flower admit` there (with --rotate for a new key). If it took part before, "
        "ask whether it was removed.",
    ),
    **dict.fromkeys((502, 504), (
        "no federation",
        "{at} answers, but no SuperLink stands behind it ({status}): `fedlora flower serve` is not running there, or "
        "is just starting, or has played all rounds: ask its operator whether the federation is over.",
    )),
}  # fmt: skip


def _said(server: JoinFile, reply: Any, ahead: float) -> Found:
    """The meaning of the server's answer. ahead: of this machine's clock, in seconds."""
    status = reply.status_code
    try:
        code = int(reply.json()["code"])  # Flower's own
    except (ValueError, KeyError, TypeError):
        code = 0
    if (clock := clock_trouble(ahead)) and (code in (2003, 2004) or status == 401):  # it may answer before it checks
        return Found("clock", clock)
    if (known := _ANSWERS.get(code) or _ANSWERS.get(status)) is not None:
        return Found(known[0], known[1].format(at=server.address, status=status))
    return Found("refused", f"{server.address} answers with status {status}: {shown(reply.text, 200)}")


def clock_trouble(ahead: float) -> str:
    """Why these clocks are too far apart, in a sentence; "" if they are not. ahead: of this machine's, in seconds."""
    if 5 - BEHIND < ahead < AHEAD - 1:  # the measurement is accurate to a second
        return ""
    way = "ahead of" if ahead > 0 else "behind"
    return (
        f"this machine's clock is {_long(abs(ahead))} {way} the server's, and the server refuses what is signed more "
        f"than {AHEAD:.0f} seconds ahead or {BEHIND:.0f} seconds behind its own time. Set the clock (timedatectl "
        f"set-ntp true), here or there."
    )


def _long(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes" if seconds < 7200 else (
        f"{seconds / 3600:.0f} hours" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
    )  # fmt: skip


def _ahead(date: str | None, asked: float, answered: float) -> float:
    """The seconds by which the middle of the request is ahead of the server's time, which is in whole seconds; 0 if it
    does not say its time."""
    try:
        told = email.utils.parsedate_to_datetime(date or "")
    except ValueError:
        return 0.0
    return (asked + answered) / 2 - (told.timestamp() + 0.5)


__all__ = ["Found", "clock_trouble", "look", "private_key"]
