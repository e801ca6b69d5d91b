"""A site's folder, and `fedlora flower node`: wait until the server lets this site in, start Flower's SuperNode, and
train what it is asked, until the SuperNode ends.

It asks the server again after growing pauses, and reports obstacles. Whoever started this process (systemd, or compose)
restarts it when it ends. A SuperNode without a server for a minute ends, so that the next start reports why. The
SuperNode is a child that the kernel ends with this process; the ClientApps that it starts watch this process and end
with it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from fedlora.core import files
from fedlora.core.process import how_ended
from fedlora.flower import processes
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.checks import Found
from fedlora.flower.site.supernode import BROKEN_OFF
from fedlora.flower.site.trainer import Trainer, answer, listening_at, say
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.site_file import Site

PAUSES = (2.0, 4.0, 8.0, 15.0, 30.0)  # seconds between tries; the last one repeats
GONE = 60  # seconds without the server until a SuperNode ends; by then Flower has also given up this site


def fill_site(folder: Path, join: JoinFile, site: Site) -> None:
    """Write a site's files into an existing folder, with a new pair of keys. site: with paths as they are to stand."""
    here = SiteFolder(folder)
    here.path.chmod(0o700)
    here.state.mkdir(mode=0o700, exist_ok=True)
    files.write(here.join, join.text())
    tables = {table: dict(keys) for table, keys in site.own.items()}
    files.write(here.site, tomli_w.dumps({"name": site.name, **tables}))
    private, public = certificates.new_key()
    certificates.write_private(here.key, private)
    files.write(here.public_key, public)


def wait_until_admitted(look: Callable[[], Found], pauses: tuple[float, ...] = PAUSES) -> None:
    """Ask the server until it would let this site in. Each obstacle is reported when it begins."""
    last, tries = "", 0
    while (found := look()).fate != "admitted":
        if found.fate != last:
            last = found.fate
            say(f"waiting: {found.why}")
        time.sleep(pauses[min(tries, len(pauses) - 1)])
        tries += 1


def take_part(site: SiteFolder, join: JoinFile) -> None:
    """Start this site's SuperNode and train what it is asked, until it or this process ends."""
    os.umask(0o077)
    listening, work = listening_at(site), Trainer(site)
    env = {**processes.environment(site.state / "flwr"), processes.OWNER: str(os.getpid())}
    authority = os.memfd_create("ca.crt")  # so that join.toml is the one place that says whom to believe
    os.write(authority, join.server.ca.encode())
    command = supernode_command(site, join.address, f"/proc/self/fd/{authority}")
    supernode = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[authority])
    ending = threading.Event()
    try:
        threading.Thread(target=_end_with, args=(supernode, ending), daemon=True).start()
        answer(listening, work, site.path)  # in the main thread, which signals interrupt
    finally:
        ending.set()
        supernode.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supernode.wait(5.0)
        supernode.kill()


def _end_with(supernode: subprocess.Popen[bytes], ending: threading.Event) -> None:
    """End this process when its SuperNode ends, even in the middle of a training whose answer nobody could send."""
    code = supernode.wait()
    if ending.is_set():
        return
    say(f"the SuperNode ended {how_ended(code)}")
    os._exit(code if code > 0 else BROKEN_OFF)


def supernode_command(site: SiteFolder, address: str, authority: str) -> list[str]:
    """The command that starts this site's SuperNode; its own API gets a free port on loopback. authority: the file of
    who vouches for the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "fedlora.flower.site.supernode", str(os.getpid()), "--superlink", address]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-wait-time", str(GONE)]
    command += ["--node-config", f"site={json.dumps(str(site.site))}"]
    return [*command, "--root-certificates", authority, "--auth-supernode-private-key", str(site.key)]
