"""systemd's units, judged by systemd itself where it is installed; and what they forbid does not stop torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.setup.units import program, proxy_unit, server_unit, site_unit, unit_name

NAMES = ["plain", "with space", "per%cent%n", "größe"]
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


SERVER, PROXY, SITE = (unit_name(kind) for kind in ("server", "proxy", "site"))


def written(folder: Path, user: str = "nobody") -> dict[str, Path]:
    """The three units of a folder, in it."""
    folder.mkdir()
    texts = {SERVER: server_unit(folder, user=user), SITE: site_unit(folder, user=user)}
    texts[PROXY] = proxy_unit(folder, 443, user=user)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def analyzed(*words: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    return subprocess.run(["systemd-analyze", *map(str, words)], capture_output=True, text=True, check=False, env=env)


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_systemd_takes_them_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    """No word of complaint about any of them. nginx may be missing here: then a stand-in would be in its place."""
    for unit, path in written(tmp_path / name).items():
        if unit == PROXY and not Path("/usr/sbin/nginx").exists():
            continue
        said = analyzed("verify", path)
        assert said.returncode == 0 and str(tmp_path) not in said.stdout + said.stderr, (said.stdout, said.stderr)


@needs_systemd
@pytest.mark.parametrize(("unit", "most"), [(SERVER, 2.5), (PROXY, 3), (SITE, 2.5)])
def test_systemd_calls_them_ok(unit: str, most: float, tmp_path: Path) -> None:
    said = analyzed("security", "--offline=true", written(tmp_path / "f")[unit]).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+) OK", said)
    assert found is not None and float(found[1]) < most, said


def test_they_call_this_fedlora_by_absolute_paths(tmp_path: Path) -> None:
    units = {name: path.read_text() for name, path in written(tmp_path / "f").items()}
    assert f"ExecStart={program()[0]} " in units[SERVER] and Path(program()[0]).is_absolute()
    assert f"flower serve {tmp_path / 'f'}\n" in units[SERVER] and f"flower node {tmp_path / 'f'}\n" in units[SITE]
    said = subprocess.run([*program(), "flower", "--help"], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "Restart=on-failure" in units[SERVER]  # a federation that has ended stays so
    assert "Restart=always" in units[SITE] and "StartLimitIntervalSec=0" in units[SITE]  # nodes may end with code 0
    assert all("RestartPreventExitStatus=2" in text for text in units.values())  # the folder's own fault
    told = server_unit(Path("/srv/fed"), user="me", memory="2G")
    assert "MemoryMax=2G" in told


def test_only_a_port_below_1024_needs_the_right_to_it(tmp_path: Path) -> None:
    low, high = proxy_unit(tmp_path, 443, user="me"), proxy_unit(tmp_path, 8443, user="me")
    assert "CAP_NET_BIND_SERVICE" in low and "CAP_" not in high and "CAP_" not in server_unit(tmp_path, user="me")


def test_what_cannot_be_said_is_refused(tmp_path: Path) -> None:
    for wrong in (lambda: server_unit(tmp_path / "line\nbreak", user="me"), lambda: server_unit(tmp_path, user="a b"),
                  lambda: server_unit(tmp_path, user="me", memory="lots"), lambda: unit_name("site", "a/b"),
                  *(lambda odd=odd: site_unit(tmp_path / odd, user="me") for odd in
                    ("bell\a", "quo'te", 'dou"ble', "dol$lar", "semi;c", "back\\slash"))):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()


def test_roots_folder_gets_no_unit() -> None:
    for made in (server_unit, site_unit, lambda folder, user: proxy_unit(folder, 443, user=user)):
        with pytest.raises(ConfigError, match="this whole machine"):
            made(Path("/srv/x"), user="root")


FORBIDDEN = """
import ctypes, os, socket, sys
libc, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(seccomp.seccomp_init(0x7FFF0000))  # allow
deny = 0x00050000 | 1  # EPERM
for name in sys.argv[1].split(","):
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        assert seccomp.seccomp_rule_add(context, ctypes.c_uint32(deny), number, 0) == 0, name
assert libc.prctl(38, 1, 0, 0, 0) == 0 and seccomp.seccomp_load(context) == 0
try:
    os.chroot("/")
except PermissionError:
    pass
else:
    raise SystemExit("nothing is forbidden")
import torch
from transformers import BertConfig, BertForSequenceClassification
model = BertForSequenceClassification(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                                 intermediate_size=16, vocab_size=50))
model(input_ids=torch.zeros(2, 5, dtype=torch.long), labels=torch.tensor([0, 1])).loss.backward()
socket.create_server(("127.0.0.1", 0)).close()
print("trained")
"""


@needs_systemd
@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/lib/x86_64-linux-gnu/libseccomp.so.2").exists(), reason="libseccomp is not installed")
def test_torch_trains_without_the_forbidden_calls() -> None:
    """Every call of systemd's @privileged, @mount, @reboot, @swap, @raw-io, @module, @debug, @cpu-emulation, @clock and
    @obsolete is refused by the same kernel filter that the unit's SystemCallFilter becomes, and a model is trained."""
    groups = (
        "@privileged",
        "@mount",
        "@reboot",
        "@swap",
        "@raw-io",
        "@module",
        "@debug",
        "@cpu-emulation",
        "@obsolete",
    )
    calls = []
    for group in groups:
        listed = analyzed("syscall-filter", group).stdout.splitlines()
        calls += [line.strip() for line in listed if re.fullmatch(r"\s+[a-z0-9_]+", line)]
    said = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, ",".join(calls)], capture_output=True, text=True, check=False
    )
    assert said.stdout.strip().endswith("trained"), (said.stdout, said.stderr[-800:])


def test_what_is_filled_in_means_itself() -> None:
    """Neither Jinja nor systemd (systemd.unit(5), specifiers) reads a part of a folder's name as something else."""
    said = server_unit(Path("/srv/# user 5%n"), user="me")
    assert "WorkingDirectory=/srv/# user 5%%n\n" in said and 'flower serve "/srv/# user 5%%n"\n' in said
    assert "# Made by `fedlora flower install /srv/# user 5%n`" in said
