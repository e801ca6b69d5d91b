"""Checks for `fedlora doctor FED`: the federation's folder is sound, and this machine is open only to sites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from fedlora.errors import FedLoRAError, counted
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import opening
from fedlora.flower.site.checks import Row
from fedlora.flower.terms.certificates import verdict
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings, NetworkSection

CONTROL = "/v1/control/list-runs"
Found = tuple[str, bool | None]


def checked_folder(folder: Path) -> list[Row]:
    """(check, finding, whether it is sound); None means not there yet, which is not a fault."""
    there = FederationFolder(folder.resolve())
    try:
        settings, policy = FederationSettings.load(there.settings), Policy.read(there.policy)
    except (FedLoRAError, OSError) as error:
        return [("federation", str(error), False)]
    what = f"{settings.id}, {settings.network.name}; {settings.method.name}, {counted(settings.run.rounds, 'round')}"
    rows: list[Row] = [("federation", what, True)]
    network = settings.network
    parts: dict[str, Callable[[], list[Found]]] = {
        "serve": lambda: _begins(there),
        "sites": lambda: _sites(there, settings, policy),
        f"certificate of {network.name}": lambda: [verdict(there.certificates, network.name)],
        "proxy": lambda: _proxy(network),
    }
    for what, part in parts.items():
        try:
            rows += [(what, said, sound) for said, sound in part()]
        except (FedLoRAError, OSError, ValueError) as error:
            rows.append((what, str(error), False))
    return rows


def _begins(there: FederationFolder) -> list[Found]:
    """The checks that `serve` and its ServerApp make when they start, and of what would fail at the sites."""
    damaged: list[str] = []
    opening(there.path, damaged.append)
    begins: list[Found] = [("would begin: nothing in the settings is refused", True)]
    return begins + [(f"{line} Is the disk failing?", False) for line in damaged]


def _sites(there: FederationFolder, settings: FederationSettings, policy: Policy) -> list[Found]:
    waits = [name for name in policy.clients if not there.key(name).is_file()]
    ready = len(policy.clients) - len(waits)
    said = f"{ready} of {len(policy.clients)} admitted" + (f"; not yet: {', '.join(waits[:5])}" if waits else "")
    return [(said, True if ready >= (settings.server.quorum or 1) else None)]


def _proxy(network: NetworkSection) -> list[Found]:
    """Flower's control part must be closed wherever others reach this machine: it has no accounts."""
    if network.port == network.superlink_port:  # of `up`: sites on this machine alone
        return []
    asked = [("127.0.0.1", network.port), (network.name, network.port), (network.name, network.superlink_port)]
    found = {at: control_answer(*at, network.name) for at in asked}
    for (address, port), status in found.items():
        if status not in (None, 403):
            return [(
                f"{address}:{port} answers {status} to {CONTROL}, which must be 403: Flower's control part has no "
                f"accounts. Is it nginx with the nginx.conf of examples/deploy?", False,
            )]  # fmt: skip
    if 403 in found.values():
        return [(f"port {network.port}: answers, and the control part is closed (403)", True)]
    return [(f"port {network.port}: nothing answers yet", None)]


def control_answer(address: str, port: int, name: str, seconds: float = 5.0) -> int | None:
    """The HTTP status of Flower's control part at an address, with TLS, whatever its certificate, otherwise without;
    None if nothing speaks HTTP there."""
    import httpx

    with httpx.Client(verify=False, timeout=seconds, trust_env=False) as client:
        for scheme in ("https", "http"):
            with contextlib.suppress(httpx.HTTPError):
                url, more = f"{scheme}://{address}:{port}{CONTROL}", {"sni_hostname": name}
                with client.stream("POST", url, headers={"Host": name}, extensions=more) as found:
                    return found.status_code
    return None
