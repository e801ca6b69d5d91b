"""Checks for `fedlora doctor FED`: the federation's folder is sound, and this machine is open only to sites."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable
from pathlib import Path

import psutil

from fedlora.errors import FedLoRAError, counted
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import opening
from fedlora.flower.site.checks import Row
from fedlora.flower.terms.certificates import verdict
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import promise
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.privacy.accounting import epsilon_up
from fedlora.privacy.ledger import Ledger

CONTROL = "/v1/control/list-runs"


def checked_folder(folder: Path) -> list[Row]:
    """(check, finding, whether it is sound); None means not there yet, which is not a fault."""
    there = FederationFolder(folder.resolve())
    try:
        settings, policy = FederationSettings.load(there.settings), Policy.read(there.policy)
    except (FedLoRAError, OSError) as error:
        return [("federation", str(error), False)]
    what = f"{settings.id}, {settings.network.name}; {settings.method.name}, {counted(settings.run.rounds, 'round')}"
    rows: list[Row] = [("federation", what, True)]
    parts: dict[str, Callable[[], list[Row]]] = {
        "serve": lambda: _begins(there),
        "sites": lambda: _sites(there, settings, policy),
        "ledger": lambda: _ledger(settings),
        "certificate": lambda: _certificates(there, settings.network),
        "SuperLink": lambda: _doors(there, settings.network),
    }
    for what, part in parts.items():
        try:
            rows += part()
        except (FedLoRAError, OSError, ValueError) as error:
            rows.append((what, str(error), False))
    return rows


def _begins(there: FederationFolder) -> list[Row]:
    """The checks that `serve` and its ServerApp make when they start, and of what would fail at the sites."""
    damaged: list[str] = []
    opening(there.path, damaged.append)
    rows: list[Row] = [("checkpoint", f"{line} Is the disk failing?", False) for line in damaged]
    return [("serve", "would begin: nothing in the settings is refused", True), *rows]


def _sites(there: FederationFolder, settings: FederationSettings, policy: Policy) -> list[Row]:
    names = list(policy.clients)
    ready = [name for name in names if there.key(name).is_file()]
    waits = [name for name in names if name not in ready]
    said = f"{len(ready)} of {len(names)} admitted" + (f"; not yet: {', '.join(waits[:5])}" if waits else "")
    return [("sites", said, True if len(ready) >= (settings.server.quorum or 1) else None)]


def _ledger(settings: FederationSettings) -> list[Row]:
    """A private federation's guarantee, and what it has spent."""
    if (terms := settings.privacy) is None:
        return []
    spent = Ledger(Path(terms.ledger), terms.population).describe(terms.delta)
    said = f"epsilon {epsilon_up(spent['epsilon'])} in {spent['events']} releases"
    return [
        ("privacy", promise(terms, settings.run.rounds), True),
        ("ledger", f"{terms.ledger}: {said if spent['events'] else 'nothing is charged yet'}", True),
    ]


def _certificates(there: FederationFolder, network: NetworkSection) -> list[Row]:
    found = verdict(there.certificates, network.name)
    return [(f"certificate of {network.name}", found.said(), found.sound)]


def _doors(there: FederationFolder, network: NetworkSection) -> list[Row]:
    port = network.superlink_port
    found = listening(port)
    open_ = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if open_:
        why = "whoever reaches it can run Python on this machine. Start it by fedlora flower serve, which does not"
        return [("SuperLink", f"port {port} answers on {', '.join(open_)}, not on loopback alone: {why}", False)]
    said = "answers, on loopback only" if found else "not running"
    rows: list[Row] = [("SuperLink", f"127.0.0.1:{port}, {said}", bool(found) or None)]
    if network.port == port:  # of `up`: sites on this machine alone
        return rows
    return [*rows, *_proxy(network, [*own_addresses(), "127.0.0.1"])]


def _proxy(network: NetworkSection, addresses: list[str]) -> list[Row]:
    found = {a: control_answer(a, network.port, network.name) for a in addresses}
    open_ = {a: status for a, status in found.items() if status not in (None, 403)}
    if open_:
        address, status = next(iter(open_.items()))
        said = f"{address}:{network.port} answers {status} to {CONTROL}, which must be 403: Flower's control part"
        return [("proxy", f"{said} has no accounts. Is it nginx with the nginx.conf of examples/deploy?", False)]
    if 403 in found.values():
        return [("proxy", f"port {network.port}: answers, and the control part is closed (403)", True)]
    return [("proxy", f"port {network.port}: nothing answers yet", None)]


def listening(port: int) -> list[str]:
    """The addresses that listen on a port."""
    found = psutil.net_connections("tcp")
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def own_addresses() -> list[str]:
    """The addresses of this machine, except loopback and those of one cable alone (link-local IPv6)."""
    named = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family.name.startswith("AF_INET")]
    found = [ipaddress.ip_address(name) for name in dict.fromkeys(named) if "%" not in name]
    return [str(a) for a in found if not a.is_loopback and not a.is_link_local]


def control_answer(address: str, port: int, name: str, seconds: float = 5.0) -> int | None:
    """The HTTP status of Flower's control part at an address, with TLS, whatever its certificate, otherwise without;
    None if nothing speaks HTTP there."""
    import httpx

    host = f"[{address}]" if ":" in address else address
    with httpx.Client(verify=False, timeout=seconds, trust_env=False) as client:
        for scheme in ("https", "http"):
            with contextlib.suppress(httpx.HTTPError):
                url, more = f"{scheme}://{host}:{port}{CONTROL}", {"sni_hostname": name}
                with client.stream("POST", url, headers={"Host": name}, extensions=more) as found:
                    return found.status_code
    return None


__all__ = ["CONTROL", "checked_folder", "control_answer", "listening", "own_addresses"]
