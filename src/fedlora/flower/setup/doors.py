"""Checks this machine's open ports: the SuperLink must answer only on loopback, and the proxy only the nodes' part. It
looks at the listening sockets, and tries each address of this machine."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil

CONTROL = "/v1/control/list-runs"


def listening(port: int) -> list[str]:
    """The addresses that listen on a port."""
    found = psutil.net_connections("tcp")
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def own_addresses() -> list[str]:
    """The addresses of this machine, except loopback and those of one cable alone (link-local IPv6)."""
    named = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family.name.startswith("AF_INET")]
    found = [ipaddress.ip_address(name) for name in dict.fromkeys(named) if "%" not in name]
    return [str(a) for a in found if not a.is_loopback and not a.is_link_local]


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it; an IPv4 address within an IPv6 one counts as IPv4."""
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def control_answer(address: str, port: int, name: str, seconds: float = 5.0) -> tuple[int | None, bytes]:
    """The HTTP status of Flower's control part at an address and the certificate shown there (DER), whatever it is:
    with TLS, otherwise without and b""; None if nothing speaks HTTP there."""
    import httpx

    host = f"[{address}]" if ":" in address else address
    with httpx.Client(verify=False, timeout=seconds, trust_env=False) as client:
        for scheme in ("https", "http"):
            with contextlib.suppress(httpx.HTTPError):
                url, more = f"{scheme}://{host}:{port}{CONTROL}", {"sni_hostname": name}
                with client.stream("POST", url, headers={"Host": name}, extensions=more) as found:
                    tls = found.extensions["network_stream"].get_extra_info("ssl_object")
                    return found.status_code, tls.getpeercert(True) if tls else b""
    return None, b""


__all__ = ["CONTROL", "control_answer", "is_loopback", "listening", "own_addresses"]
