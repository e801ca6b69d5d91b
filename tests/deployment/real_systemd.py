"""A machine's systemd as process 1 of namespaces of its own: boots in a second, is switched off by a kill.

    with booted(folder) as machine:         folder/srv, folder/home and folder/etc stay from one boot to the next
        machine.run("systemctl", "is-active", "fedlora-site")

Its units are /etc/systemd/system alone, which is folder/etc: Debian's own are not there, and nothing of the host is set
or mounted. Needs root, and Debian's package systemd. /srv is folder/srv, /home is folder/home; one user, `fedlora`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fedlora
from support.machines import until

UID = 4242
SYSTEMD = Path("/lib/systemd/systemd")
_BOOT = """
set -e
mount --make-rprivate /
mount --bind "$0/srv" /srv
mount --bind "$0/home" /home
mount --bind "$0/passwd" /etc/passwd
mount --bind "$0/group" /etc/group
mount --bind "$0/empty" /lib/systemd/system
mount --bind "$0/etc" /etc/systemd/system
mount -t overlay -o "lowerdir=/root,upperdir=$0/root/over,workdir=$0/root/work" root /root
chmod 755 /root  # a Python below it is the units' too
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
export container=unshare
exec /lib/systemd/systemd --system --log-target=console --log-level=warning
"""
_NAMESPACES = ["--pid", "--mount", "--cgroup", "--net", "--ipc", "--uts"]


def why_no_systemd() -> str:
    """What is missing for it; empty where it can be booted."""
    if os.geteuid() != 0:
        return "a systemd of its own needs root"
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "systemd is not installed (Debian: systemd)"
    hidden = [str(path) for path in (sys.executable, fedlora.__file__) if Path(str(path)).is_relative_to("/tmp")]
    if hidden:
        return f"the booted machine has a /tmp of its own, so it does not see {hidden[0]}: use a checkout elsewhere"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "sh", "-c", "umount -R /sys/fs/cgroup; mount -t cgroup2 x /sys/fs/cgroup"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if tried.returncode == 0 else f"namespaces and cgroups do not work here: {tried.stderr.strip()}"


@dataclass
class Booted:
    """One that runs. pid: of its process 1, as the host counts."""

    folder: Path
    pid: int

    def run(self, *words: str, user: bool = False, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """A command beside the units, as root or as the user `fedlora`, to its end."""
        return subprocess.run(self.command(*words, user=user), capture_output=True, text=True, timeout=seconds)

    def command(self, *words: str, user: bool = False) -> list[str]:
        who = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user else []
        env = ["env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", f"HOME={'/home/fedlora' if user else '/root'}"]
        return ["nsenter", "-t", str(self.pid), "--mount", "--pid", "--net", "--ipc", *who, *env, *words]

    def until(self, *words: str, seconds: float = 30) -> None:
        """Until a command succeeds."""
        until(lambda: self.run(*words).returncode == 0, seconds, f"{' '.join(words)}; see {self.folder / 'console'}")


def furnish(folder: Path) -> None:
    """What a machine has before its first boot."""
    for name in ("srv", "home/fedlora", "etc", "empty", "root/over", "root/work"):
        (folder / name).mkdir(parents=True)
    os.chown(folder / "home" / "fedlora", UID, UID)
    os.chown(folder / "srv", UID, UID)
    root, nobody = "root:x:0:0::/root:/bin/sh\n", "nobody:x:65534:65534::/nonexistent:/bin/false\n"
    (folder / "passwd").write_text(f"{root}{nobody}fedlora:x:{UID}:{UID}::/home/fedlora:/bin/sh\n")
    (folder / "group").write_text(f"root:x:0:\nnogroup:x:65534:\nfedlora:x:{UID}:\n")
    for name in ("sysinit", "basic", "shutdown", "multi-user", "network-online"):
        (folder / "etc" / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (folder / "etc" / "default.target").symlink_to("multi-user.target")


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Booted]:
    """The machine, until the block ends: then everything in it is killed, as when the power fails."""
    with (folder / "console").open("ab") as console:
        shell = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "bash", "-c", _BOOT, str(folder)],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
        )  # fmt: skip
    try:
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        machine = Booted(folder, int(until(lambda: children.read_text().split(), 20, "it boots")[0]))
        machine.until("systemctl", "is-active", "multi-user.target")
        yield machine
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shell.pid, signal.SIGKILL)  # its child, process 1, goes with it, and all processes with that
        shell.wait()
