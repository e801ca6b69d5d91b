"""What the server's app would try at a site, or an upload's code at the server, to reach what the unit keeps from it.
Run by a unit in place of its program, and once beside it, where it must succeed: then it is the unit that holds.

    python hostile_unit.py REPORT.json FOLDER STATE:... PID:ADDRESS UNIT    PID: a process of the same user beside it

The report: attempt -> whether it was possible. Standard library alone.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

report, folder, states, beside, unit = sys.argv[1:]
outsider, _, address = beside.partition(":")
writable = states.split(":")
HOME, found = Path("/home/fedlora"), {}


def tried(name, attempt):
    try:
        attempt()
        found[name] = True
    except BaseException as error:
        found[name] = False
        found.setdefault("why", {})[name] = f"{type(error).__name__}: {error}"


def append(path):
    with open(path, "r+b"):  # of a file that is there; its content stays
        pass


def make(path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("# hostile\n")


def connect(path):
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(3)
        line.connect(path)


def of_memory():
    libc = ctypes.CDLL(None, use_errno=True)

    class Piece(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    text = ctypes.create_string_buffer(b"taken")
    here, there = Piece(ctypes.addressof(text), 5), Piece(int(address), 5)
    if libc.process_vm_writev(int(outsider), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 5:
        raise OSError(ctypes.get_errno(), "process_vm_writev")


def of_anybody():
    """Another process of this user, whichever: its files as it sees them."""
    for path in Path("/proc").glob("[0-9]*/root/home/fedlora"):
        if path.parts[2] != str(os.getpid()):
            make(path / ".profile")
            return
    raise PermissionError("nobody is there")


def of_a_terminal():
    terminals = [path for path in Path("/dev/pts").iterdir() if path.name != "ptmx"]
    os.close(os.open(terminals[0], os.O_RDWR | os.O_NOCTTY))


def of_new_namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:  # CLONE_NEWUSER
        raise OSError(ctypes.get_errno(), "unshare")


def of_setuid():
    said = subprocess.run(["/srv/setuid-id", "-u"], capture_output=True, text=True)
    if said.stdout.strip() != "0":
        raise PermissionError(said.stdout + said.stderr)


for path in sorted(Path(folder).rglob("*")):
    if path.is_file() and not any(path.is_relative_to(place) for place in writable):
        tried(f"changes {path.relative_to(folder)}", lambda path=path: append(path))
tried("makes a file in the folder", lambda: make(f"{folder}/new.service"))
tried("puts another folder in its place", lambda: os.rename(folder, f"{folder}-moved"))
if not Path(folder).exists():
    os.rename(f"{folder}-moved", folder)
tried("changes the unit", lambda: append(f"/etc/systemd/system/{unit}"))
tried("makes a drop-in", lambda: make(f"/etc/systemd/system/{unit}.d/hostile.conf"))
tried("changes the program", lambda: append("/srv/program/fedlora"))
for name in (".bashrc", ".ssh/authorized_keys", ".config/systemd/user/a.service", ".local/bin/sudo"):
    tried(f"makes ~/{name}", lambda name=name: make(HOME / name))
tried("changes root's files", lambda: append("/etc/passwd"))
for name in (f"/run/user/{os.getuid()}/bus", "/run/dbus/system_bus_socket", "/run/docker.sock", "/tmp/tmux"):
    tried(f"speaks to {name}", lambda name=name: connect(name))
tried("changes another's /dev/shm", lambda: append("/dev/shm/outside"))
tried("sees an outsider's files", lambda: make(f"/proc/{outsider}/root/home/fedlora/.profile"))
tried("sees anybody's files", of_anybody)
tried("writes to a terminal", of_a_terminal)
tried("changes an outsider's memory", of_memory)
tried("becomes root by setuid", of_setuid)
tried("makes a user namespace", of_new_namespace)
tried("makes a job for cron", lambda: make("/var/spool/cron/crontabs/fedlora"))
for place in writable:
    tried(f"keeps {place}", lambda place=place: make(f"{place}/kept"))
found["uid"] = os.geteuid()
Path(report).write_text(json.dumps(found, indent=1))
