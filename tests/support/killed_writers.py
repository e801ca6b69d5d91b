"""Writers that are killed before each of their steps. Run as a program of its own, since it forks:

    python killed_writers.py FOLDER SCENARIO ...

prints a JSON table of the scenarios, with one entry for each kill: at which step, what stood there after it, what the
next command says, what stands there after that, and what is left beside it. A kill is `os._exit`: nothing of Python's
own end runs. A killed process is no power cut: steps that wait for the disk count, and do not wait.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.folders import ANY_FOLDER, replacing_folder
from fedlora.errors import FedLoRAError

STEPS = ("mkdir", "open", "rename", "replace", "rmdir", "unlink", "chmod", "fchmod", "fsync")
Look = Callable[[], str]


def die_at(step: int, steps: tuple[str, ...] = STEPS) -> list[str]:
    """From now on the process dies before its `step`-th step; returns the list that its steps are written to."""
    seen: list[str] = []

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == step:
                os._exit(9)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    for name in steps:
        counted(os, name)
    return seen


def killed(prepare: Callable[[], None], write: Callable[[], None], look: Look, after: Callable[[], None], home: Path,
           steps: tuple[str, ...] = STEPS) -> list[dict[str, Any]]:  # fmt: skip
    """write: what is killed. after: the next command."""
    found = []
    for step in itertools.count(1):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        prepare()
        child = os.fork()
        if child == 0:
            seen = die_at(step, steps)
            try:
                write()
            except BaseException as error:
                print(f"the writer failed by itself: {error!r}", file=sys.stderr)
                os._exit(1)
            os._exit(0 if len(seen) < step else 2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, 9):
            raise RuntimeError(f"step {step}: code {code}")
        entry: dict[str, Any] = {"step": step, "killed": code == 9, "then": look()}
        try:
            after()
            entry["next"] = "done"
        except FedLoRAError as error:
            entry["next"] = str(error)
        entry["finally"] = look()
        entry["left"] = sorted(str(path.relative_to(home)) for path in home.rglob(".*.part"))
        found.append(entry)
        if code == 0:
            return found
    raise AssertionError


# ---- scenarios -------------------------------------------------------------------------------------------------------


def fill(target: Path, what: str, *, force: bool = False) -> None:
    with replacing_folder(target, force=force, kind=ANY_FOLDER) as building:
        (building / "deep").mkdir()
        (building / "deep" / "one.txt").write_text(what)
        (building / "two.txt").write_text(what)


def content(target: Path) -> str:
    """Which of the two it is: "new", "old", "none", or all that is in it where it is a mixture."""
    if not target.exists():
        return "none"
    found = {str(p.relative_to(target)): p.read_text() for p in sorted(target.rglob("*")) if p.is_file()}
    for what in ("new", "old"):
        if found == {"deep/one.txt": what, "two.txt": what}:
            return what
    return json.dumps(found)


def folder_scenario(name: str, home: Path) -> list[dict[str, Any]]:
    target = home / "a" / "b" / "out" if name == "parents" else home / "out"

    def prepare() -> None:
        if name == "replaced":
            fill(target, "old")

    def after() -> None:
        fill(target, "new", force=True)

    def look() -> str:
        if name == "replaced" and not target.exists():
            return ", ".join(sorted(content(path) for path in home.glob(".*.part")))  # beside it
        return content(target)

    return killed(prepare, lambda: fill(target, "new", force=True), look, after, home)


def file_scenario(home: Path) -> list[dict[str, Any]]:
    path = home / "file.txt"
    write = lambda: files.write(path, "new")  # noqa: E731
    return killed(lambda: files.write(path, "old"), write, path.read_text, write, home)


if __name__ == "__main__":
    os.fsync = lambda descriptor: None
    place = Path(sys.argv[1]) / "home"
    told = {one: file_scenario(place) if one == "file" else folder_scenario(one, place) for one in sys.argv[2:]}
    print(json.dumps(told))
