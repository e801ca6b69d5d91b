"""What the server's app would try at a site, or an upload's code at the server, to reach what the unit keeps from it.
Run by a unit in place of its program, and once beside it, where it must succeed: then it is the unit that holds.

    python hostile_unit.py REPORT.json FOLDER STATE:... PID UNIT        PID: a process of the same user beside it

The report: attempt -> whether it was possible. Standard library alone.
"""

import json
import os
import socket
import sys
from pathlib import Path

report, folder, states, outsider, unit = sys.argv[1:]
writable, found = states.split(":"), {}


def tried(what, path, attempt):
    try:
        attempt(path)
        found[f"{what} {path}"] = True
    except OSError:
        found[f"{what} {path}"] = False


def change(path):
    with open(path, "r+b"):  # of a file that is there; its content stays
        pass


def make(path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("# hostile\n")


def connect(path):
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(3)
        line.connect(path)


settings = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
for path in (path for path in settings if not any(path.is_relative_to(place) for place in writable)):
    tried("changes", path, change)
for path in (f"/etc/systemd/system/{unit}", "/etc/passwd", "/srv/program/fedlora", "/dev/shm/outside"):
    tried("changes", path, change)
for path in (f"{folder}/new", f"/etc/systemd/system/{unit}.d/hostile.conf", f"/proc/{outsider}/root/home/fedlora/a"):
    tried("makes", path, make)
for name in (".bashrc", ".ssh/authorized_keys", ".config/systemd/user/a.service", ".local/bin/sudo"):
    tried("makes", f"/home/fedlora/{name}", make)
for path in (f"/run/user/{os.getuid()}/bus", "/run/dbus/system_bus_socket", "/run/docker.sock", "/tmp/tmux"):
    tried("speaks to", path, connect)
for place in writable:
    tried("makes", f"{place}/kept", make)
found["uid"] = os.geteuid()
Path(report).write_text(json.dumps(found, indent=1))
