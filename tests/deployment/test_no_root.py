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

import pytest

pytest.importorskip("flwr")

import fedlora
from deployment.real_systemd import UID, Booted, booted, furnish, why_no_systemd
from fedlora.flower.places import FederationFolder, SiteFolder
from support.containers import PLACE
from support.deployed_folders import federation_folder, site_folder
from support.machines import unless

pytestmark = [pytest.mark.deployment_all, unless(why_no_systemd()), pytest.mark.timeout(300)]

UNITS = {"site": "fedlora-site.service", "server": "fedlora-server.service", "proxy": "fedlora-proxy.service"}
BUS = "/run/dbus/system_bus_socket"
OUTSIDER = f"""
import os, socket, time
line = socket.socket(socket.AF_UNIX)
line.bind("{BUS}")
line.listen()
open("/dev/shm/outside", "w").close()
print(os.getpid(), flush=True)
time.sleep(1000)
"""
HOSTILE = f"""
import json, os, socket, sys
def possible(path):
    try:
        socket.socket(socket.AF_UNIX).connect(path) if path == "{BUS}" else open(path, "r+b").close()
        return True
    except OSError:
        return False
report, *paths = sys.argv[1:]
open(report + ".part", "w").write(json.dumps({{path: possible(path) for path in paths}}))
os.rename(report + ".part", report)
"""


@contextlib.contextmanager
def outsider(machine: Booted) -> Iterator[str]:
    """A process of the user beside the units, as of somebody who has logged in, with what such people have open."""
    machine.run("install", "-d", "-o", "fedlora", "/run/dbus")
    process = subprocess.Popen(
        machine.command(sys.executable, "-c", OUTSIDER, user=True), stdout=subprocess.PIPE, text=True
    )
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
    (srv / "hostile.py").write_text(HOSTILE)
    own = root / "home" / "fedlora" / ".profile"
    for path in (*(state / "kept" for state in writable(root)), own):
        path.touch()
    for path in [srv, *srv.rglob("*"), own]:
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


def test_a_hostile_program_reaches_nothing_but_its_state(place: Path) -> None:
    """In each unit; beside it the same program, of the same user, can do all but what is root's: the unit holds."""
    states = {"site": ["/srv/site/state"], "server": ["/srv/fed/server", "/srv/fed/state"], "proxy": ["/srv/fed/proxy"]}
    kept = {kind: {f"{state}/kept" for state in own} for kind, own in states.items()}
    inside = [Path("/srv") / path.relative_to(place / "srv") for path in (place / "srv").rglob("*") if path.is_file()]
    settings = [str(path) for path in inside if not any(path.is_relative_to(s) for own in states.values() for s in own)]
    with booted(place) as machine, outsider(machine) as beside:
        install(machine)
        roots = {"/etc/passwd", *(f"/etc/systemd/system/{unit}" for unit in UNITS.values())}
        others = {BUS, "/dev/shm/outside", "/home/fedlora/.profile"}
        others |= {f"/proc/{beside}/root/home/fedlora/.profile"}
        for kind, unit in UNITS.items():
            command = [sys.executable, "/srv/hostile.py", f"{states[kind][0]}/report", *settings, *others, *roots]
            drop = place / "etc" / f"{unit}.d"
            drop.mkdir()
            words = " ".join([*command, *sorted(set[str]().union(*kept.values()))])
            (drop / "test.conf").write_text(f"[Service]\nExecStart=\nExecStart={words}\nRestart=no\n")
        machine.run("systemctl", "daemon-reload")
        for kind, unit in UNITS.items():
            machine.run("systemctl", "restart", unit)
            machine.until("test", "-f", f"{states[kind][0]}/report")
            assert possible(place, f"{states[kind][0]}/report") == kept[kind], kind
        machine.run(sys.executable, "/srv/hostile.py", "/srv/beside", *settings, *others, *roots, user=True)
        assert possible(place, "/srv/beside") >= {*settings, *others} - {f"/proc/{beside}/root/home/fedlora/.profile"}


def possible(place: Path, report: str) -> set[str]:
    found = json.loads((place / report.lstrip("/")).read_text())
    return {path for path, done in found.items() if done}
