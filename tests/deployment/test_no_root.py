"""The units under a real systemd, with a hostile program in place of ours: all it can write is its state, and whoever
it could ask to do more is out of its reach. Beside the unit, as the same user, nearly all of it is possible. Kind:
*attack*."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import fedlora
from deployment.real_systemd import UID, Booted, booted, furnish, why_no_systemd
from fedlora.flower.places import FederationFolder, SiteFolder
from support.containers import PLACE
from support.deployed_folders import federation_folder, site_folder
from support.machines import unless

pytestmark = [pytest.mark.deployment_all, unless(why_no_systemd()), pytest.mark.timeout(300)]

HOSTILE = Path(__file__).parent / "hostile_unit.py"
UNITS = {"site": "fedlora-site.service", "server": "fedlora-server.service", "proxy": "fedlora-proxy.service"}
SOCKETS = ("/run/user/4242/bus", "/run/dbus/system_bus_socket", "/run/docker.sock", "/tmp/tmux")
OUTSIDER = """
import os, socket, sys, time
lines = []
for path in sys.argv[1:]:
    lines.append(socket.socket(socket.AF_UNIX))
    lines[-1].bind(path)
    lines[-1].listen()
open("/dev/shm/outside", "w").close()
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def outsider(machine: Booted) -> Iterator[str]:
    """A process of the user beside the units, as of somebody who has logged in, with what such people have open."""
    folders = ["/run/user/4242", "/run/dbus"]
    machine.run("install", "-d", "-o", "fedlora", *folders)
    machine.run("chown", "fedlora", "/run")
    command = machine.command(sys.executable, "-c", OUTSIDER, *SOCKETS, user=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()  # of nsenter; the process itself goes with its machine
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine with a site's folder and a federation's, of the user `fedlora`."""
    root = tmp_path_factory.mktemp("machine")
    furnish(root)
    srv = root / "srv"
    fed = federation_folder(srv / "fed")
    site_folder(srv / "site", fed)
    shutil.copy(PLACE / "nginx.conf", fed.path / "nginx.conf")
    (srv / "program").mkdir()
    (srv / "program" / "fedlora").write_text("#!/bin/sh\n")
    (srv / "hostile_unit.py").write_bytes(HOSTILE.read_bytes())
    for path in [srv, *srv.rglob("*")]:
        os.chown(path, UID, UID)
    return root


def install(machine: Booted) -> None:
    """The static units, with this machine's places in them, as the page installs them."""
    for unit in UNITS.values():
        text = (PLACE / unit).read_text().replace("/srv/fedlora/env/bin/fedlora", f"{sys.executable} -m fedlora.cli")
        code = f"[Service]\nEnvironment=PYTHONPATH={Path(fedlora.__file__ or '').parents[1]}\n"  # that under test
        text = text.replace("/srv/fedlora/", "/srv/").replace("[Service]\n", code)
        (machine.folder / "srv" / unit).write_text(text)
    names = " ".join(UNITS.values())
    lines = [f"for unit in {names}; do install -m 644 /srv/$unit /etc/systemd/system/$unit; rm /srv/$unit; done",
             "systemctl daemon-reload", f"systemctl enable --now {names}"]  # fmt: skip
    done = machine.run("sh", "-ec", "\n".join(lines), seconds=120)
    assert done.returncode == 0, done.stderr[-3000:] + (machine.folder / "console").read_text()[-3000:]


def properties(machine: Booted, unit: str, *names: str) -> dict[str, str]:
    said = machine.run("systemctl", "show", *(f"--property={name}" for name in names), unit).stdout
    return dict(line.split("=", 1) for line in said.splitlines())


def test_the_units_are_roots_and_start_what_they_are_for(place: Path) -> None:
    """The proxy and the SuperLink answer within their unit's limits. The site's data
    are not there: its node ends with code 2, and is not started again."""
    made = time.time()
    with booted(place) as machine:
        machine.run("ip", "link", "set", "lo", "up")
        install(machine)
        for unit in UNITS.values():
            path = place / "etc" / unit
            assert path.is_file() and not path.is_symlink()
            assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o644)
        machine.until("systemctl", "is-failed", UNITS["site"], seconds=90)
        found = properties(machine, UNITS["site"], "ExecMainStatus", "NRestarts", "Result")
        assert found == {"ExecMainStatus": "2", "NRestarts": "0", "Result": "exit-code"}
        for port in (443, 18080):
            ask = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
            machine.until(sys.executable, "-c", ask, seconds=90)
        for kind in ("server", "proxy"):
            found = properties(machine, UNITS[kind], "ActiveState", "NRestarts", "User")
            assert found == {"ActiveState": "active", "NRestarts": "0", "User": "fedlora"}
        files = [path for path in (place / "srv").rglob("*") if path.is_file()]
        written = [path for path in files if path.stat().st_mtime > made]
        assert written and all(any(path.is_relative_to(w) for w in writable(place)) for path in written), written


def writable(place: Path) -> list[Path]:
    fed, site = FederationFolder(place / "srv" / "fed"), SiteFolder(place / "srv" / "site")
    return [fed.server, fed.state, fed.proxy, site.state]


def test_a_hostile_app_reaches_nothing_and_is_not_root_after_the_next_boot(place: Path) -> None:
    fed, site = FederationFolder(Path("/srv/fed")), SiteFolder(Path("/srv/site"))
    of = {
        "site": (site.path, [site.state]), "server": (fed.path, [fed.server, fed.state]),
        "proxy": (fed.path, [fed.proxy]),
    }  # fmt: skip
    with booted(place) as machine:
        install(machine)
    before = {path: path.read_bytes() for path in (place / "etc").rglob("*") if path.is_file()}
    for _ in range(2):  # the second time is after a reboot
        with booted(place) as machine, outsider(machine) as beside:
            words = {
                kind: [sys.executable, "/srv/hostile_unit.py", f"{states[0]}/report", str(folder),
                       ":".join(map(str, states)), beside, UNITS[kind]]
                for kind, (folder, states) in of.items()
            }  # fmt: skip
            for kind, unit in UNITS.items():
                drop = place / "etc" / f"{unit}.d"
                drop.mkdir(exist_ok=True)
                text = f"[Service]\nExecStart=\nExecStart={' '.join(words[kind])}\nRestart=no\n"
                (drop / "test.conf").write_text(text)
                before[drop / "test.conf"] = text.encode()
            machine.run("systemctl", "daemon-reload")
            for kind, unit in UNITS.items():
                report = place / Path(*of[kind][1][0].parts[1:]) / "report"
                report.unlink(missing_ok=True)
                machine.run("systemctl", "restart", unit)
                machine.until("test", "-f", f"{of[kind][1][0]}/report")
                found = read(report)
                possible = {name for name, done in found.items() if done is True}
                assert found["uid"] == UID and possible == {f"makes {p}/kept" for p in of[kind][1]}, (kind, possible)
            after = {path: path.read_bytes() for path in (place / "etc").rglob("*") if path.is_file()}
            assert after == before
            out = place / "srv" / "beside.json"
            machine.run(words["site"][0], words["site"][1], "/srv/beside.json", *words["site"][3:], user=True)
            refused = {name for name, done in read(out).items() if done is False}
            out.unlink()
            roots = {name for name in refused if " /etc/" in name or " /proc/" in name}  # /proc: where Yama refuses it
            assert refused == roots and len(refused) < 5


def read(path: Path) -> dict[str, Any]:
    end = time.monotonic() + 10
    while True:
        try:
            return dict(json.loads(path.read_text()))
        except ValueError:
            assert time.monotonic() < end
            time.sleep(0.1)
