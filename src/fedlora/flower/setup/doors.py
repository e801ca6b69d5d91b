"""Which doors of this machine are open: the SuperLink must answer on loopback alone, and through the proxy nothing but
the nodes' part may. Found by the sockets that listen, and by trying each address that this machine has."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
from pathlib import Path

CONTROL = "/v1/control/list-runs"
_LISTEN = "0A"


def listening(port: int, proc: Path = Path("/proc/net")) -> list[str] | None:
    """The addresses on which something listens at a port; None where this machine does not say."""
    found: list[str] = []
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / name).read_text().splitlines()[1:]
        except OSError:
            if name == "tcp":
                return None
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTEN and int(number, 16) == port:
                found.append(str(_address(address)))
    return found


def own_addresses(proc: Path = Path("/proc/net")) -> list[str]:
    """The addresses of this machine that are not loopback."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        trie = (proc / "fib_trie").read_text()
        found += re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", trie)
    with contextlib.suppress(OSError):
        for line in (proc / "if_inet6").read_text().splitlines():
            address = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
            if not address.is_link_local:
                found.append(str(address))
    return [a for a in dict.fromkeys(found) if not ipaddress.ip_address(a).is_loopback]


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


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As /proc has it: the bytes of each 32-bit word in this machine's order."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[k : k + 4][::-1] for k in range(0, len(raw), 4))
    return ipaddress.IPv4Address(words) if len(words) == 4 else ipaddress.IPv6Address(words)


__all__ = ["CONTROL", "answers", "control_answer", "is_loopback", "listening", "own_addresses"]
