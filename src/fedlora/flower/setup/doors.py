"""Which doors of this machine are open: the SuperLink must answer on loopback alone, and through the proxy nothing but
the nodes' part may. Found by the sockets that listen, and by trying each address that this machine has."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl

import psutil

CONTROL = "/v1/control/list-runs"


def listening(port: int) -> list[str]:
    """The addresses on which something listens at a port, as far as this machine says."""
    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.net_connections("tcp")
        return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    return []


def own_addresses() -> list[str]:
    """The addresses of this machine that are not loopback, nor of one cable alone (link-local IPv6)."""
    named = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family.name.startswith("AF_INET")]
    found = [ipaddress.ip_address(name) for name in dict.fromkeys(named) if "%" not in name]
    return [str(a) for a in found if not a.is_loopback and not a.is_link_local]


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it; the IPv4 within an IPv6 counts as what it is."""
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def answers(address: str, port: int, seconds: float = 1.0) -> bool:
    """Whether something takes a connection there."""
    try:
        with socket.create_connection((address, port), seconds):
            return True
    except OSError:
        return False


def control_answer(address: str, port: int, name: str, seconds: float = 5.0) -> int | None:
    """The HTTP status that Flower's control part has behind an address, without looking at the certificate, with TLS
    and else without; None where nothing speaks HTTP there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = (
        f"POST {CONTROL} HTTP/1.1\r\nHost: {name}\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n"
        f"Connection: close\r\n\r\n"
    ).encode()
    for tls in (True, False):
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as open_:
            plain = open_.enter_context(socket.create_connection((address, port), seconds))
            line = open_.enter_context(context.wrap_socket(plain, server_hostname=name)) if tls else plain
            line.sendall(request)
            words = line.recv(64).split(b" ")
            if words[0].startswith(b"HTTP/"):
                return int(words[1])
    return None


__all__ = ["CONTROL", "answers", "control_answer", "is_loopback", "listening", "own_addresses"]
