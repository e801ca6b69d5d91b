"""What units and containers may write holds nothing that is run, believed or secret: of each unit, of each service of
examples/containers, and of each file that setup writes. Kind: *enumeration*, without systemd
(tests/deployment/test_no_root.py tries it under a real one)."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import fedlora
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.setup.installing import steps
from fedlora.flower.setup.units import server_unit
from support.command_line import Said
from support.containers import services
from support.deployed_folders import federation_folder, site_folder

pytest.importorskip("yaml")
STARTS = ("ExecStartPre", "ExecStart", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost", "ExecCondition")
WRITES = ("ReadWritePaths", "BindPaths", "StateDirectory", "RuntimeDirectory", "LogsDirectory", "CacheDirectory")
HELD = {  # what the kernel is to keep from the app; the lines that a unit of root's could do without have no place here
    "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "read-only", "PrivateTmp": "yes",
    "TemporaryFileSystem": "/run:ro /dev/shm:mode=1777", "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes",
    "SystemCallFilter": "@system-service", "ProtectProc": "invisible", "UMask": "0077",
}  # fmt: skip
WRITTEN = {"server", "checkpoints", "now", "rounds", "adapter", "summary", "state", "database", "logs", "lock"} | {
    "played_with", "private", "flower_home", "proxy_state",
}  # fmt: skip
"""Of the places of both folders, those that are written at run time."""


@pytest.fixture
def both(tmp_path: Path) -> tuple[FederationFolder, SiteFolder]:
    fed = federation_folder(tmp_path / "fed")
    return fed, site_folder(tmp_path / "site", fed.join("one"))


def units(*folders: Path) -> dict[str, list[tuple[str, str]]]:
    """The lines of all units that `fedlora flower install` would install, by name."""
    found = {}
    for folder in folders:
        for step in steps(folder, user="nobody", memory=None):
            if step.said:
                lines = [line for line in step.said.splitlines() if "=" in line and not line.startswith("#")]
                found[Path(step.words[-1]).name] = [(key, value) for key, _, value in (s.partition("=") for s in lines)]
    return found


def kept(*folders: Path) -> list[Path]:
    """All that setup has left in folders, but the empty ones that are written later; and the program. A site's
    held_out.json is empty until its first round: {}."""
    found = [path for folder in folders for path in (folder, *folder.rglob("*")) if path.is_file() or path == folder]
    found = [path for path in found if path.name != "held_out.json" or path.read_text() != "{}"]
    return [*found, Path(sys.prefix), Path(sys.base_prefix), Path(fedlora.__file__ or "").parent]


def below(place: Path, writable: list[Path]) -> bool:
    return any(place.resolve().is_relative_to(one.resolve()) for one in writable)


def test_no_unit_can_write_what_is_run_or_believed(both: tuple[FederationFolder, SiteFolder]) -> None:
    fed, site = both
    found = units(fed.path, site.path)
    assert sorted(found) == ["fedlora-proxy.service", "fedlora-server.service", "fedlora-site.service"]
    for name, lines in found.items():
        said = dict(reversed(lines))
        assert HELD.items() <= said.items(), (name, HELD.items() - said.items())
        assert (said.get("PrivateUsers") == "yes") == (name != "fedlora-proxy.service")
        assert said["User"] == "nobody" and said["RestartPreventExitStatus"] == "2"
        writable = [Path(w) for key, value in lines if key in WRITES for w in shlex.split(value)]
        assert writable and all(w.is_relative_to(fed.path) or w.is_relative_to(site.path) for w in writable)
        for path in kept(fed.path, site.path):
            assert not below(path, writable), (name, path)
        for key, value in lines:
            if key.startswith("Exec"):
                assert key in STARTS and value.startswith("/"), f"{name}: {key}={value} has a prefix"
                for word in shlex.split(value):
                    ours = word.startswith("/") and not word.endswith(".log")
                    assert not (ours and below(Path(word), writable)), (name, word)


def test_no_container_can_write_what_is_run_or_believed(both: tuple[FederationFolder, SiteFolder]) -> None:
    fed, site = both
    found = services("server.yaml", FED=fed.path, OWNER="7:7", NAME="fl.example.org")
    found |= services("site.yaml", SITE=site.path, OWNER="7:7")
    assert sorted(found) == ["proxy", "server", "site"]
    for name, service in found.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        writable = [Path(mount.partition(":")[0]) for mount in service["volumes"] if not mount.endswith(":ro")]
        assert writable
        for path in kept(fed.path, site.path):
            assert not below(path, writable), (name, path)


def test_each_place_is_written_at_run_time_or_kept(both: tuple[FederationFolder, SiteFolder]) -> None:
    """A new place in `places` is in one of the two: what is written lies below what the units may write, and nothing
    else does."""
    for folder, writable in ((both[0], [*both[0].written, both[0].proxy_state]), (both[1], [both[1].state])):
        names = [name for name, value in vars(type(folder)).items() if isinstance(value, property)]
        for name in set(names) - {"written"}:
            assert below(getattr(folder, name), writable) == (name in WRITTEN), (type(folder).__name__, name)


def test_what_setup_writes_is_its_owners(both: tuple[FederationFolder, SiteFolder]) -> None:
    """The folders are closed to others; in them no file can be written by others, and a private key not be read."""
    for folder in (both[0].path, both[1].path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in folder.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert not mode & 0o022, path
            if path.is_file() and re.search(rb"PRIVATE KEY", path.read_bytes()):
                assert mode == 0o600, path
    for place in (*both[0].written, both[0].proxy_state, both[1].state):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_ledger_beside_the_settings_is_refused(tmp_path: Path) -> None:
    """The server may write to its folder, so that nothing else may lie there."""
    for ledger in (tmp_path / "fed" / "ledger.jsonl", tmp_path / "ledger.jsonl", Path(sys.prefix) / "ledger.jsonl"):
        with pytest.raises(ConfigError, match="a folder of its own"):
            server_unit(tmp_path / "fed", user="me", ledger=ledger)
    fed = federation_folder(tmp_path / "whole")
    for folder in [path for path in fed.path.rglob("*") if path.is_dir()] + [fed.path / "new", fed.proxy_state / "x"]:
        if folder not in fed.written:
            with pytest.raises(ConfigError, match="a folder of its own"):
                server_unit(fed.path, user="me", ledger=folder / "ledger.jsonl")
    said = server_unit(tmp_path / "fed", user="me", ledger=tmp_path / "ledgers" / "ledger.jsonl")
    assert f"{tmp_path}/fed/state {tmp_path}/ledgers\n" in said


def test_a_mounted_path_with_a_colon_is_refused() -> None:
    """systemd mounts what stands before it at what stands behind it; /tmp is mounted, for a unit has its own."""
    with pytest.raises(ConfigError, match="':'"):
        server_unit(Path("/tmp/fed:/etc"), user="me")


def test_the_command_shows_all_that_root_runs_and_sudo_is_not_called_twice(
    both: tuple[FederationFolder, SiteFolder], main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = both[1]
    said = main("flower", "install", site.path, "--user", "nobody", "--name", "study2")
    shown = said.out.splitlines()
    assert said.code == 0 and shown[0] == "set -e" and "/etc/systemd/system/fedlora-site-study2.service" in shown[1]
    assert shown[-2:] == [
        "systemctl daemon-reload", "systemctl enable --now fedlora-site-study2.service"
    ]  # fmt: skip
    assert not list(site.path.rglob("*.service")) and not list(both[0].path.rglob("*.service"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "somebody")
    assert "call this without sudo" in main("flower", "install", site.path).error()


def test_what_a_unit_writes_is_made_as_its_user_before_it_starts(both: tuple[FederationFolder, SiteFolder]) -> None:
    """systemd starts no unit where a path of ReadWritePaths is missing (status 226), and with a "-" before it the unit
    would find it read-only: a state folder that was lost is made again, and not by root."""
    fed, site = both
    for home, lost in ((site.path, [site.state]), (fed.path, [*fed.written, fed.proxy_state])):
        assert not [step for step in steps(home, user="nobody", memory=None) if "mkdir" in step.words]
        for place in lost:
            shutil.rmtree(place, ignore_errors=True)
        made, *others = steps(home, user="nobody", memory=None)
        assert made.words[-len(lost) :] == tuple(map(str, lost)) and "mkdir" in made.words and "nobody" in made.words
        assert all("mkdir" not in step.words for step in others)


def test_a_second_folder_takes_no_others_unit(both: tuple[FederationFolder, SiteFolder], tmp_path: Path) -> None:
    fed, site = both
    (tmp_path / "fedlora-site.service").write_text("[Service]\nWorkingDirectory=/srv/other%%site\n")
    more: dict[str, Any] = {"user": "nobody", "memory": None, "place": tmp_path}
    with pytest.raises(ConfigError, match="--name site"):
        steps(site.path, **more)
    assert steps(site.path, label="two", **more) and steps(fed.path, **more)
    for step in steps(fed.path, **more):
        if step.said:
            Path(step.words[-1]).write_text(step.said)
    assert steps(fed.path, **more)  # its own: written anew


@pytest.mark.parametrize("user", ["nosuchuser", "nobody$"])
def test_no_script_is_printed_for_units_that_could_not_run(
    both: tuple[FederationFolder, SiteFolder], main: Callable[..., Said], user: str
) -> None:
    """Before, systemd found out: exit code 2, which it does not restart."""
    said = main("flower", "install", both[0].path, "--user", user)
    assert user in said.error() and not said.out


def test_a_folder_that_ends_in_a_space_gets_no_unit() -> None:
    """systemd would strip it: before, the unit failed with status 200 for ever."""
    with pytest.raises(ConfigError, match="space at an end"):
        server_unit(Path("/srv/fed "), user="me")
