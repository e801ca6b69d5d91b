"""The steps of the Dockerfile of examples/deploy, executed without Docker. Kind: end-to-end.

RUN lines go to a shell as they are, in an environment that stands for the image. pip is the environment's. Users are
made below a folder (`useradd --prefix`), and /wheels lies there too. Two options of pip are left out: the index of CPU
builds, which a machine with a mirror cannot reach (a CPU torch must lie where pip looks), and `--no-cache-dir`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
from pathlib import Path

import pytest

from release.conftest import Built
from support.containers import PLACE
from support.environments import Environment, run, uv

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]
LEFT_OUT = (" --index-url https://download.pytorch.org/whl/cpu", " --no-cache-dir")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("useradd"), reason="makes users below a folder: root")
def test_the_images_steps_make_an_environment_that_serves(built: Built, tmp_path: Path) -> None:
    image = Image(tmp_path / "image")
    (image.root / "wheels").mkdir()
    shutil.copy(built.wheel, image.root / "wheels")
    text = (PLACE / "Dockerfile").read_text(encoding="utf-8")
    for part in LEFT_OUT:
        assert part in text
        text = text.replace(part, "")
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        image.step(word, rest)
    assert "fedlora:x:1000:1000" in (image.root / "etc" / "passwd").read_text()
    found = image.python.distributions()
    assert "flwr" in found and not [name for name in found if name.startswith("nvidia-")]
    assert "Usage" in image.entry("--help")
    assert "flwr" in image.entry("doctor")
    assert "serve" in image.entry("flower", "--help") and "node" in image.entry("flower", "--help")


class Image:
    """What a Dockerfile has made so far: a folder for the root, an environment for its Python, its variables."""

    def __init__(self, root: Path) -> None:
        self.root, self.variables, self.command = root, {"HOME": str(root)}, [""]
        for name in ("etc", "home", "bin"):
            (root / name).mkdir(parents=True)
        for name in ("passwd", "group", "shadow", "gshadow"):
            (root / "etc" / name).touch()
        self.python = Environment(root / "python")
        uv("venv", "-q", "--seed", self.python.path)
        for tool in ("useradd", "groupadd"):
            file = root / "bin" / tool
            file.write_text(f'#!/bin/sh\nexec {shutil.which(tool)} --prefix {shlex.quote(str(root))} "$@"\n')
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def step(self, word: str, rest: str) -> None:
        """One line of a Dockerfile."""
        if word in ("ARG", "ENV"):
            self.variables |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "RUN":
            run(["sh", "-euc", rest.replace("/wheels", f"{self.root}/wheels")], self.root, self._environment())
        elif word == "ENTRYPOINT":
            self.command = json.loads(rest)
        else:
            assert word in ("FROM", "COPY", "USER", "CMD", "#", ""), word

    def entry(self, *words: str) -> str:
        """The image's entry point, with these words."""
        return run([self.python.path / "bin" / self.command[0], *words], self.python.work, self._environment())

    def _environment(self) -> dict[str, str]:
        path = f"{self.python.path}/bin:{self.root}/bin:{os.environ['PATH']}"
        return {**self.variables, "PATH": path, "HOME": os.environ["HOME"]}
