"""The Makefile's environment and its build, in a copy with stubs for pip: nothing is downloaded or built.

Kind: end-to-end of make. Expected values are what the Makefile's comments promise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "GIT_", "PYTHON"))}
    return subprocess.run(["make", *words], cwd=folder, env=kept, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "a, (folder) 's"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_an_old_python_is_one_line_and_makes_nothing(copy: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 10, 13)\nexec(sys.argv[2])\n")
    old.chmod(0o755)
    done = make(copy, "demo", f"PYTHON={old}")
    said, last = done.stderr.splitlines()
    assert re.match(f"fedlora needs Python 3.11 .*PYTHON={old} is 3.10.13", said) and "***" in last
    assert done.returncode == 2 and not (copy / ".venv").exists()


def test_a_moved_checkout_has_its_environment_made_anew(copy: Path, tmp_path: Path) -> None:
    """venv is real but for its pip, which takes seconds and is `true` here. Once made it stays; after a move nothing of
    it is kept."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" != venv ] || set -- "$@" --without-pip\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = (".venv/.demo", f"PYTHON={python}", "PIP=true")
    assert make(copy, *words).returncode == 0
    assert (copy / ".venv" / ".demo").read_text() == f"{copy.resolve()}\n"
    (copy / ".venv" / "left").touch()
    assert "up to date" in make(copy, *words).stdout and (copy / ".venv" / "left").exists()
    moved = copy.rename(copy.with_name("moved here"))
    assert "-m venv" in make(moved, *words).stdout and not (moved / ".venv" / "left").exists()
    assert (moved / ".venv" / ".demo").read_text() == f"{moved.resolve()}\n"
    assert "up to date" in make(moved, *words).stdout


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_build_of_files_that_are_not_committed_is_refused(copy: Path) -> None:
    (copy / "secret.pem").touch()
    assert make(copy, "committed").returncode == 0  # no .git: an unpacked source
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    done = make(copy, "dist", "VENV=none")
    assert done.returncode == 2 and "secret.pem" in done.stderr and "ALLOW_DIRTY=1" in done.stderr
    assert not (copy / "none").exists()
    assert make(copy, "committed", "ALLOW_DIRTY=1").returncode == 0
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "add", "."], cwd=copy, check=True)
    subprocess.run(["git", *author, "commit", "-qm", "all"], cwd=copy, check=True)
    assert make(copy, "committed").returncode == 0
