"""`fedlora flower node`: check for obstacles, then become Flower's SuperNode in this process.

First it asks the server whether it would let this site in (`reach`); it reports obstacles, and asks again after growing
pauses. Whoever started this process (systemd, or compose) restarts it when the SuperNode ends. A SuperNode without a
server for a minute ends, so that the check reports why.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from fedlora.flower import processes
from fedlora.flower.places import SiteFolder
from fedlora.flower.processes import locked
from fedlora.flower.site.reach import Found

PAUSES = (2.0, 4.0, 8.0, 15.0, 30.0)  # seconds between tries; the last one repeats
GONE = 60  # seconds without the server until a SuperNode ends; by then Flower has also given up this site


def wait_until_admitted(
    look: Callable[[], Found], say: Callable[[str], None], pauses: tuple[float, ...] = PAUSES
) -> None:
    """Ask the server until it would let this site in. Each obstacle is reported when it begins."""
    told, tries = "", 0
    while (found := look()).fate != "admitted":
        if found.fate != told:
            told = found.fate
            say(f"waiting: {found.why}")
        time.sleep(pauses[min(tries, len(pauses) - 1)])
        tries += 1


def become_supernode(command: list[str], site: SiteFolder, lock: int) -> NoReturn:
    """Turn this process, which stays the owner of the site's trainer and of its lock, into Flower's SuperNode.

    Args:
        lock: from `held`; it is held until the SuperNode ends, however it does.
    """
    os.umask(0o077)
    os.set_inheritable(lock, True)
    os.execve(command[0], command, {**processes.environment(site.state / "flwr"), processes.OWNER: str(os.getpid())})


@contextlib.contextmanager
def held(site: SiteFolder) -> Iterator[int]:
    """Hold the site's folder for this process. Yields the lock's descriptor. Raises `ConfigError` if another process
    has it."""
    site.state.mkdir(mode=0o700, exist_ok=True)
    with locked(site.state / "node.lock", lambda who: (
        f"`fedlora flower node` already runs for {site.path} (process {who}). One is enough: the server could not tell "
        f"two apart. Is it the systemd unit?"
    )) as descriptor:  # fmt: skip
        yield descriptor


def supernode_command(site: SiteFolder, address: str) -> list[str]:
    """The command that starts this site's SuperNode; its own API gets a free port on loopback."""
    command = [sys.executable, "-m", "fedlora.flower.site.supernode", str(site.site), "--superlink", address]
    command += ["--host", "127.0.0.1", "--port", str(free_port()), "--max-wait-time", str(GONE)]
    command += ["--node-config", f"site={json.dumps(str(site.site))}"]
    return [*command, "--root-certificates", str(site.ca), "--auth-supernode-private-key", str(site.key)]


def free_port() -> int:
    """A loopback port that is free at the moment."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = [
    "PAUSES", "become_supernode", "free_port", "held", "supernode_command", "wait_until_admitted",
]  # fmt: skip
