"""Checks for `fedlora doctor FED`: the federation's folder is sound, and this machine is open only to sites."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fedlora.errors import FedLoRAError, counted
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import opening
from fedlora.flower.site.checks import Row
from fedlora.flower.terms.certificates import verdict
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings, NetworkSection

CONTROL = "/v1/control/list-runs"


def checked_folder(folder: Path) -> list[Row]:
    """(check, finding, whether it is sound); None means not there yet, which is not a fault."""
    there = FederationFolder(folder.resolve())
    try:
        settings, policy = FederationSettings.load(there.settings), Policy.read(there.policy)
    except (FedLoRAError, OSError) as error:
        return [("federation", str(error), False)]
    network = settings.network
    what = f"{settings.id}, {network.name}; {settings.method.name}, {counted(settings.run.rounds, 'round')}"
    waits = [name for name in policy.clients if not there.key(name).is_file()]
    ready = len(policy.clients) - len(waits)
    admitted = f"{ready} of {len(policy.clients)} admitted" + (f"; not yet: {', '.join(waits[:5])}" if waits else "")
    return [
        ("federation", what, True),
        *_begins(there),
        ("sites", admitted, True if ready >= (settings.server.quorum or 1) else None),
        (f"certificate of {network.name}", *verdict(there.certificates, network.name)),
        *_proxy(network),
    ]


def _begins(there: FederationFolder) -> list[Row]:
    """The checks that `serve` and its ServerApp make when they start, and of what would fail at the sites."""
    damaged: list[str] = []
    try:
        opening(there.path, damaged.append)
    except (FedLoRAError, OSError, ValueError) as error:
        return [("serve", str(error), False)]
    begins: Row = ("serve", "would begin: nothing in the settings is refused", True)
    return [begins, *(("serve", f"{line} Is the disk failing?", False) for line in damaged)]


def _proxy(network: NetworkSection) -> list[Row]:
    """Flower's control part must be closed wherever others reach this machine: it has no accounts."""
    if network.port == network.superlink_port:  # of `up`: sites on this machine alone
        return []
    asked = [("127.0.0.1", network.port), (network.name, network.port), (network.name, network.superlink_port)]
    found = {at: control_answer(*at, network.name) for at in asked}
    for (address, port), status in found.items():
        if status not in (None, 403):
            return [(
                "proxy", f"{address}:{port} answers {status} to {CONTROL}, which must be 403: Flower's control part "
                f"has no accounts. Is it nginx with the nginx.conf of examples/deploy?", False,
            )]  # fmt: skip
    if 403 in found.values():
        return [("proxy", f"port {network.port}: answers, and the control part is closed (403)", True)]
    return [("proxy", f"port {network.port}: nothing answers yet", None)]


def control_answer(address: str, port: int, name: str, seconds: float = 5.0) -> int | None:
    """The HTTP status of Flower's control part at an address, with TLS, whatever its certificate, otherwise without;
    None if nothing speaks HTTP there."""
    import httpx

    with httpx.Client(verify=False, timeout=seconds, trust_env=False) as client:
        for scheme in ("https", "http"):
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
                url, more = f"{scheme}://{address}:{port}{CONTROL}", {"sni_hostname": name}
                with client.stream("POST", url, headers={"Host": name}, extensions=more) as found:
                    return found.status_code
    return None
