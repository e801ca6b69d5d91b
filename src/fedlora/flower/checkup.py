"""Is a federation's folder sound, and will it work on this machine? For `fedlora doctor`."""

from __future__ import annotations

import datetime
import shutil
import socket
import stat
from pathlib import Path

from cryptography import x509

from fedlora.core.messages import Client
from fedlora.errors import FedLoRAError
from fedlora.flower.federation import open_federation
from fedlora.flower.policy import Policy
from fedlora.flower.project import connection
from fedlora.runs.config import load_config

Row = tuple[str, str, bool]


def checked_folder(folder: Path) -> list[Row]:
    """What is checked, what was found, whether it is sound."""
    rows: list[Row] = []
    try:
        config, policy = load_config(folder / "run.toml", []), Policy.read(folder / "policy.toml")
        strategy, _ = open_federation(folder, resume=True, identify=lambda grid: {})
    except (FedLoRAError, OSError) as error:
        return [("federation", str(error), False)]
    rows.append(("clients", f"{len(policy.clients)}: {', '.join(list(policy.clients)[:5])}", True))
    quorum, count = strategy.server.quorum or 1, len(policy.clients)
    rows.append(("quorum", f"{quorum} of {count}", quorum <= count))
    sizes = []
    for name, rank in policy.clients.items():
        download = strategy.server.download(strategy.memory.state.server, Client(name, rank))
        tensors = [t for lora in download.adapter.modules.values() for t in lora.tensors().values()]
        sizes.append(sum(t.numel() * t.element_size() for t in [*tensors, *download.adapter.heads.values()]))
    rows.append(("largest message", f"{max(sizes) / 1e6:.1f} MB", max(sizes) < 2e9))
    needed = sum(sizes) * 2 * config.run.rounds + 2 * sum(sizes)  # the SuperLink's database keeps what has passed
    free = shutil.disk_usage(folder).free
    rows.append(("disk", f"{free / 1e9:.1f} GB free; up to {needed / 1e9:.1f} GB may be used", free > needed))
    rows.append(("rounds done", f"{strategy.round} of {config.run.rounds}", True))
    rows += [*_secrets(folder, list(policy.clients)), _port(folder)]
    return rows


def _secrets(folder: Path, names: list[str]) -> list[Row]:
    if not (folder / "certs").is_dir():
        return [("TLS", "off: made with --insecure", False)]
    rows = []
    for name in ("ca.crt", "server.crt"):
        try:
            found = x509.load_pem_x509_certificate((folder / "certs" / name).read_bytes())
        except (OSError, ValueError) as error:
            rows.append((f"certificate {name}", f"cannot be read: {error}", False))
            continue
        left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        rows.append((f"certificate {name}", f"valid for {left.days} days", left.days > 0))
    for path in [folder / "certs" / "server.key", *(folder / "keys" / name for name in names)]:
        if not path.is_file():
            rows.append((f"key {path.name}", "missing", False))
        elif path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            rows.append((f"key {path.name}", "readable by others: chmod 600", False))
    if all(sound for what, _, sound in rows if what.startswith("key")):
        rows.append(("keys", f"{len(names)} nodes and the server, readable by this user only", True))
    return rows


def _port(folder: Path) -> Row:
    address, _ = connection(folder)
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(2)
        used = probe.connect_ex((host, int(port))) == 0
    return ("SuperLink", f"{address}: {'something answers there' if used else 'free'}", True)
