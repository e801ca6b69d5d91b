"""Files and folders that appear whole. Kinds of evidence: contract (the old one, the new one, or what the next command
puts right, after a kill before every single step), end to end (the command line under attack).

What a kill leaves is looked at from another process (support.killed_writers); a full disk is a real one where this user
may mount, and a limit on the size of files elsewhere.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import support
from fedlora import read_adapter, write_adapter
from fedlora.adapters.io import AdapterSpec
from fedlora.core import beside, files, folders
from fedlora.core.folders import FolderKind, check_target, recover, replacing_folder
from fedlora.errors import ConfigError
from support.adapter_folders import saved
from support.command_line import Said
from support.processes import Program

NOTES = FolderKind("a note", "note.txt", r"note\.txt|deep/[^/]+")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; links as what they say."""
    return {
        str(p.relative_to(folder)): os.readlink(p).encode() if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_symlink() or p.is_file()
    }


def put(target: Path, text: str = "new", **how: Any) -> None:
    with replacing_folder(target, **how) as building:
        (building / "note.txt").write_text(text)


# ---- a kill at any step ----------------------------------------------------------------------------------------------


Kills = dict[str, list[dict[str, Any]]]
SCENARIOS = (
    "fresh",
    "empty",
    "parents",
    "exchanged",
    "renamed twice",
    "refused afterwards",
    "file",
)


def killed(place: Path, program: Callable[..., Program], *scenarios: str) -> Kills:
    """Scenario -> what was found after each kill (support.killed_writers)."""
    done = program(Path(str(support.__file__)).parent / "killed_writers.py", place, *scenarios).ended()
    assert done.returncode == 0, done.stderr
    found: Kills = json.loads(done.stdout)
    for entries in found.values():  # until the writer came to its end
        assert [entry["killed"] for entry in entries] == [True] * (len(entries) - 1) + [False] and len(entries) > 5
    return found


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory, program: Callable[..., Program]) -> Kills:
    return killed(tmp_path_factory.mktemp("kills"), program, *SCENARIOS)


@pytest.mark.parametrize(
    ("scenario", "before"), [("fresh", "none"), ("empty", "empty"), ("parents", "none"), ("exchanged", "old")]
)
def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new_one(scenario: str, before: str, kills: Kills) -> None:
    """Never a mixture, never nothing where something was; the next writing gives the new one, and nothing is left."""
    found = kills[scenario]
    then = [entry["then"] for entry in found]
    assert set(then) == {before, "new"} and then == sorted(then, key=[before, "new"].index), then
    assert {(entry["next"], entry["finally"], *entry["left"]) for entry in found} == {("done", "new")}


def test_without_an_exchange_the_next_command_puts_the_old_folder_back(kills: Kills) -> None:
    """Between two renames there is one step with nothing in its place. A next command that may not replace finds the
    old folder there again; one that may, replaces it."""
    found = kills["refused afterwards"]
    assert Counter(entry["then"] for entry in found)["none"] == 1
    for entry in found:
        assert entry["finally"] == ("old" if entry["then"] == "none" else entry["then"]) != "none"
        assert "is not empty" in entry["next"] and entry["left"] == []
    found = kills["renamed twice"]
    assert {(entry["next"], entry["finally"], *entry["left"]) for entry in found} == {("done", "new")}


def test_a_kill_at_any_step_leaves_the_old_file_or_the_new_one(kills: Kills) -> None:
    found = kills["file"]
    assert {entry["then"] for entry in found} == {"old", "new"}
    assert {(entry["finally"], *entry["left"]) for entry in found} == {("new",)}


@pytest.mark.exhaustive  # quick: an adapter is written as any folder, and those are killed above
def test_a_kill_at_any_step_never_mixes_two_adapters(tmp_path: Path, program: Callable[..., Program]) -> None:
    """Weights and card of one of the two: config, weights and README appear together."""
    found = killed(tmp_path, program, "adapter")["adapter"]
    assert {entry["then"] for entry in found} == {"1.0", "2.0"}
    assert {(entry["finally"], *entry["left"]) for entry in found} == {("2.0",)}


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_parents_appear_with_the_folder_and_not_before(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with replacing_folder(target) as building:
        assert not (tmp_path / "a").exists()
        assert stat.S_IMODE(next(p for p in tmp_path.iterdir()).stat().st_mode) == 0o700, "private while it is built"
        (building / "x").write_text("x")
    assert tree(tmp_path) == {"a/b/out/x": b"x"}
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "c" / "out"):
        raise RuntimeError
    assert tree(tmp_path) == {"a/b/out/x": b"x"} and os.listdir(tmp_path) == ["a"]


def test_parents_that_another_process_makes_meanwhile(tmp_path: Path) -> None:
    with replacing_folder(tmp_path / "up" / "one") as building:
        (building / "x").write_text("1")
        put(tmp_path / "up" / "two")
        (tmp_path / "up" / "three").mkdir()
    assert sorted(os.listdir(tmp_path / "up")) == ["one", "three", "two"]
    assert tree(tmp_path / "up") == {"one/x": b"1", "two/note.txt": b"new"}


def test_what_is_not_empty_is_refused_and_with_force_only_what_is_ours(tmp_path: Path) -> None:
    target = tmp_path / "out"
    put(target, "old")
    with pytest.raises(ConfigError, match=r"out is not empty.* --force"):
        put(target, kind=NOTES)
    with pytest.raises(ConfigError, match=r"is not empty(?!.*--force)"):
        put(target, force=True)  # no kind: nothing is ever replaced there
    put(target, force=True, kind=NOTES)
    for name, said in (("mine.txt", "holds 'mine.txt'"), ("sub/", "holds 'sub/'")):
        (target / name).mkdir() if name.endswith("/") else (target / name).write_text("dear")
        before = tree(target)
        with pytest.raises(ConfigError, match=said):
            put(target, force=True, kind=NOTES)
        assert tree(target) == before
        (target / name).rmdir() if name.endswith("/") else (target / name).unlink()
    (target / "note.txt").rename(target / "deep.txt")
    with pytest.raises(ConfigError, match=r"has no note\.txt"):
        put(target, force=True, kind=NOTES)
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_fills_while_another_is_built_is_not_replaced(tmp_path: Path) -> None:
    """Two writers that were not told to replace: the first one's result stays."""
    with pytest.raises(ConfigError, match="is not empty"), replacing_folder(tmp_path / "out", kind=NOTES) as building:
        (building / "note.txt").write_text("second")
        put(tmp_path / "out", "first")
    assert tree(tmp_path) == {"out/note.txt": b"first"}
    with pytest.raises(ConfigError, match=r"holds 'x'"), replacing_folder(tmp_path / "out", force=True, kind=NOTES):
        (tmp_path / "out" / "x").write_text("what came while the other was built is kept as well")
    assert sorted(os.listdir(tmp_path / "out")) == ["note.txt", "x"] and os.listdir(tmp_path) == ["out"]


def test_places_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here / "sub")
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = tree(tmp_path)
    for target, said in {
        "": "current directory", ".": "current directory", "..": "current directory", "/": "current directory",
        str(here): "current directory", "x/../..": "current directory", "/proc": "mounted|written",
        str(tmp_path / "file"): "is a file; name a directory", str(tmp_path / "file" / "x"): "Not a directory",
        str(tmp_path / "link"): "is a link", str(tmp_path / "dangling"): "is a link",
        str(tmp_path / "link") + "/": "is a link", "a\0b": "null byte", "n" * 256: "name too long",
        "p/" + "n" * 256: "name too long", "a\nb\x1b" + "n" * 256: r"^a\\nb\\x1bn",
        "/".join(["n" * 200] * 30): "name too long",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=said) as refused:
            put(Path(target) if target else Path(), force=True, kind=folders.ANY_FOLDER)
        assert "\n" not in str(refused.value) and ".part" not in str(refused.value) and len(str(refused.value)) < 300
    assert tree(tmp_path) == before and sorted(os.listdir(tmp_path)) == ["dangling", "file", "here", "link", "real"]
    put(tmp_path / "link" / "out")  # a link above the last part is the user's own way to write to another disk
    assert tree(tmp_path / "real") == {"out/note.txt": b"new"}


def test_no_input_is_replaced_or_written_into(tmp_path: Path) -> None:
    """By whatever name: through links, dots, and as a part of it."""
    put(tmp_path / "in" / "a", "input")
    (tmp_path / "alias").symlink_to("in")
    for target in ("in/a", "in", "alias/a", "in/../in/a", "in/a/new", "alias/a/new/deep"):
        with pytest.raises(ConfigError, match="the input"):
            put(tmp_path / target, force=True, kind=folders.ANY_FOLDER, inputs=[tmp_path / "in" / "a"])
        with pytest.raises(ConfigError, match="the input"):
            put(tmp_path / target, force=True, kind=folders.ANY_FOLDER, inputs=[tmp_path / "alias" / "a"])
    assert tree(tmp_path / "in") == {"a/note.txt": b"input"}
    put(tmp_path / "in" / "b", inputs=[tmp_path / "in" / "a"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: run as another user below")
def test_folders_that_may_not_be_written_to(tmp_path: Path) -> None:
    _not_allowed(tmp_path)


def _not_allowed(tmp_path: Path) -> None:
    put(tmp_path / "home" / "out", "old")
    (tmp_path / "home").chmod(0o500)
    try:
        for target in ("home/out", "home/new", "home/new/deep"):
            with pytest.raises(ConfigError, match=r"home.* may not"):
                put(tmp_path / target, force=True, kind=NOTES)
        with pytest.raises(PermissionError):
            files.write(tmp_path / "home" / "x", "x")
    finally:
        (tmp_path / "home").chmod(0o700)
    assert tree(tmp_path) == {"home/out/note.txt": b"old"}
    (tmp_path / "home" / "out").chmod(0o500)  # what may not be changed is not exchanged
    with pytest.raises(ConfigError, match="cannot be written"):
        put(tmp_path / "home" / "out", force=True, kind=NOTES)
    assert tree(tmp_path) == {"home/out/note.txt": b"old"} and os.listdir(tmp_path / "home") == ["out"]
    (tmp_path / "home" / "out").chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_folders_that_another_user_may_not_write_to() -> None:
    place = Path(tempfile.mkdtemp())  # pytest's own folder is root's alone
    try:
        os.chown(place, 65534, 65534)
        child = os.fork()
        if child == 0:
            try:
                os.setresuid(65534, 65534, 65534)
                _not_allowed(place)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(place)


# ---- leftovers -------------------------------------------------------------------------------------------------------


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living = threading.Event(), threading.Event()

    def live() -> None:
        with replacing_folder(tmp_path / "out"):
            with files.replacing(tmp_path / "file"):
                living[0].set()
                living[1].wait(60)
            raise RuntimeError

    def quiet() -> None:
        with pytest.raises(RuntimeError):
            live()

    thread = threading.Thread(target=quiet)
    thread.start()
    living[0].wait(60)
    working = set(os.listdir(tmp_path))
    assert len(working) == 2
    dead = tmp_path / ".out.0123456789ab.part"
    (dead / "new" / "deep").mkdir(parents=True)
    (dead / "lock").write_text(f"{dead.stat().st_ino}\n")
    (dead / "new" / "deep").chmod(0o500)  # also what may not be changed
    (tmp_path / ".out.ba9876543210.part").mkdir()  # killed before it had a lock
    (tmp_path / ".file.0123456789ab.part").write_text("half")
    others = [".out.x.part", ".outer.0123456789ab.part", "out.0123456789ab.part", ".file.0123456789abc.part"]
    for name in others:  # of other targets, and of nobody
        (tmp_path / name).write_text("mine")
    put(tmp_path / "out")
    files.write(tmp_path / "file", "whole")
    assert set(os.listdir(tmp_path)) == working | {"out", "file", *others}
    living[1].set()
    thread.join(60)
    assert set(os.listdir(tmp_path)) == {"out", "file", *others}
    assert (tmp_path / "file").read_text() == ""  # the last writer's, who wrote nothing
    assert tree(tmp_path / "out") == {"note.txt": b"new"}


def test_what_was_taken_away_is_never_lost(tmp_path: Path) -> None:
    """Killed between two renames, and then somebody puts another folder there: both stay."""
    dead = tmp_path / ".out.0123456789ab.part"
    for part in ("old", "new"):
        (dead / part).mkdir(parents=True)
        (dead / part / "note.txt").write_text(part)
    (dead / "lock").write_text(f"{dead.stat().st_ino}\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("another")
    recover(tmp_path / "out")
    assert (tmp_path / "out" / "note.txt").read_text() == "another"
    assert (dead / "old" / "note.txt").read_text() == "old"
    (tmp_path / "out" / "note.txt").unlink()
    (tmp_path / "out").rmdir()
    recover(tmp_path / "out")
    assert tree(tmp_path) == {"out/note.txt": b"old"}


@pytest.mark.parametrize("says", ["", "1\n", None])
def test_what_somebody_planted_as_a_leftover_stays_and_leads_nowhere(says: str | None, tmp_path: Path) -> None:
    """A repository or an archive can hold anything: here what looks like a crash between two renames, with somebody's
    folder to be "put back", and a link to a folder of the user's. says: what its lock says."""
    own = tmp_path / "own"
    (own / "deep").mkdir(parents=True, mode=0o755)
    planted = tmp_path / "clone" / ".out.0123456789ab.part"
    (planted / "new").mkdir(parents=True)
    put(planted / "old", "theirs")
    (planted / "link").symlink_to(own)
    (planted / "lock").write_text(f"{own.stat().st_ino}\n" if says is None else says)
    before = tree(planted), own.stat().st_mode, (own / "deep").stat().st_mode
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "clone" / "out"):
        raise RuntimeError
    assert os.listdir(tmp_path / "clone") == [planted.name]
    put(tmp_path / "clone" / "out")
    assert tree(tmp_path / "clone" / "out") == {"note.txt": b"new"}
    assert (tree(planted), own.stat().st_mode, (own / "deep").stat().st_mode) == before


def test_a_link_in_a_leftover_is_removed_and_not_followed(tmp_path: Path) -> None:
    """Also in one of our own."""
    own = tmp_path / "own"
    (own / "deep").mkdir(parents=True, mode=0o755)
    dead = tmp_path / ".out.0123456789ab.part"
    dead.mkdir()
    (dead / "new").symlink_to(own)
    (dead / "lock").write_text(f"{dead.stat().st_ino}\n")
    modes = own.stat().st_mode, (own / "deep").stat().st_mode
    put(tmp_path / "out")
    assert set(os.listdir(tmp_path)) == {"own", "out"}
    assert (own.stat().st_mode, (own / "deep").stat().st_mode) == modes


def test_an_interrupt_between_two_renames_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "out", "old")
    real = os.rename

    def interrupted(source: Any, target: Any, **how: Any) -> None:
        if os.path.basename(source) == "new":
            raise KeyboardInterrupt
        real(source, target, **how)

    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    # the first try, of an empty place, fails with the system's own error
    monkeypatch.setattr(os, "rename", lambda a, b: real(a, b) if os.path.exists(b) else interrupted(a, b))
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "out", force=True, kind=NOTES)
    assert tree(tmp_path) == {"out/note.txt": b"old"}


def test_links_and_folders_planted_at_the_temporary_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a name that is known before: nothing is followed, nothing overwritten, another name is taken."""
    dear = tmp_path / "dear"
    dear.write_text("mine")
    tokens = iter(["0123456789ab"] * 3 + [f"{k:012x}" for k in range(100)])
    monkeypatch.setattr(beside.secrets, "token_hex", lambda _: next(tokens))
    for name in ("file", "out"):
        (tmp_path / f".{name}.0123456789ab.part").symlink_to(dear)
    files.write(tmp_path / "file", "new")
    put(tmp_path / "out")
    assert dear.read_text() == "mine"
    assert tree(tmp_path) == {
        "dear": b"mine", "file": b"new", "out/note.txt": b"new",
        ".file.0123456789ab.part": str(dear).encode(), ".out.0123456789ab.part": str(dear).encode(),
    }  # fmt: skip
    monkeypatch.setattr(beside.secrets, "token_hex", lambda _: "0123456789ab")
    with pytest.raises(OSError, match="taken"):
        files.write(tmp_path / "file", "newer")
    with pytest.raises(ConfigError, match="taken"):
        put(tmp_path / "out", force=True, kind=NOTES)
    assert (tmp_path / "file").read_text() == "new" and dear.read_text() == "mine"


def test_a_link_is_replaced_by_the_file_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("mine")
    (tmp_path / "dear").chmod(0o600)
    (tmp_path / "link").symlink_to("dear")
    files.write(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert tree(tmp_path) == {"dear": b"mine", "link": b"new"}


# ---- names, disks, writers at once -----------------------------------------------------------------------------------


NAMES = {"longest": "n" * 255, "two bytes a letter": "ü" * 127, "long": "n" * 240, "marks": "a b\n*[x]", "dash": "-x",
         "no UTF-8": "\udcff\udcfe"}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_names_up_to_the_file_systems_limit(kind: str, tmp_path: Path) -> None:
    """Also while it is written, and what a crash leaves of it is found again."""
    name = NAMES[kind]
    for _ in range(2):
        files.write(tmp_path / "f" / name, "file")
        put(tmp_path / "d" / name, force=True, kind=NOTES)
    assert tree(tmp_path / "f") == {name: b"file"} and tree(tmp_path / "d") == {f"{name}/note.txt": b"new"}
    left = [beside.fresh(tmp_path / "f", name), beside.fresh(tmp_path / "d", name)]
    left[0].write_text("")
    left[1].mkdir()
    assert all(len(os.fsencode(path.name)) <= 255 for path in left)
    files.write(tmp_path / "f" / name, "file")
    put(tmp_path / "d" / name, force=True, kind=NOTES)
    assert os.listdir(tmp_path / "f") == [name] == os.listdir(tmp_path / "d")


def test_long_names_that_begin_alike_are_not_taken_for_each_other(tmp_path: Path) -> None:
    one, other = "n" * 254 + "a", "n" * 254 + "b"
    left = beside.fresh(tmp_path, one)
    left.write_text("")
    assert beside.leftovers(tmp_path, one) == [left] and beside.leftovers(tmp_path, other) == []


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x" / "deep").mkdir(parents=True)
    with pytest.raises(OSError) as refused:
        files.write(tmp_path / "x", "new")
    assert refused.value.filename == str(tmp_path / "x") and os.listdir(tmp_path) == ["x"]
    with pytest.raises(OSError):
        files.write(tmp_path / "y" / "z" / ("n" * 300), "new")
    assert os.listdir(tmp_path) == ["x"], "parents that were made for nothing go again"


def test_the_mode_of_what_is_replaced_stays(tmp_path: Path) -> None:
    put(tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "out").chmod(0o750)
    put(tmp_path / "out", force=True, kind=NOTES)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_many_writers_at_once_one_of_them_wins_whole(tmp_path: Path) -> None:
    """Every reader sees one whole folder at any moment, from the first on, and nothing is left."""
    put(tmp_path / "out", "start")
    ends, seen, failures = threading.Event(), set(), []

    def read() -> None:
        while not ends.is_set():
            try:
                handle = os.open(tmp_path / "out", os.O_RDONLY)
            except FileNotFoundError:
                failures.append("missing")
                continue
            try:
                names = os.listdir(handle)
                if names:  # empty: this one was replaced, and is being removed, since it was opened
                    seen.add(tuple(sorted(names)))
            finally:
                os.close(handle)

    def write(k: int) -> None:
        for _ in range(10):
            with replacing_folder(tmp_path / "out", force=True, kind=NOTES) as building:
                (building / "note.txt").write_text(str(k))
                (building / "deep").mkdir()
                (building / "deep" / "x").write_text(str(k))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    ends.set()
    reader.join()
    assert not failures
    found = tree(tmp_path / "out")
    assert set(found) == {"note.txt", "deep/x"} and len(set(found.values())) == 1
    assert os.listdir(tmp_path) == ["out"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB. Skips where this user may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True)
    except OSError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path, main: Callable[..., Said]) -> None:
    """One line, the old one untouched, nothing left: folders, files, and a merge."""
    put(small_disk / "out", "old")
    files.write(small_disk / "file", "old")
    a, b = (saved(small_disk.parent, name, 2) for name in "ab")
    assert main("merge", a, b, "-o", small_disk / "merged").code == 0
    (small_disk / "ballast").write_bytes(b"x" * (900 << 10))
    before = tree(small_disk)
    with pytest.raises(ConfigError, match=r"out .*: No space left on device"):
        put(small_disk / "out", "x" * (1 << 20), force=True, kind=NOTES)
    with pytest.raises(OSError, match="No space left") as refused:
        files.write(small_disk / "file", "x" * (1 << 20))
    assert refused.value.filename == str(small_disk / "file")
    (small_disk / "ballast2").write_bytes(b"x" * _room(small_disk))
    done = main("merge", a, b, "-o", small_disk / "merged", "--force")
    assert re.search("merged .*: No space left on device", done.complaint())
    assert tree(small_disk).keys() == before.keys() | {"ballast2"}
    assert {k: v for k, v in tree(small_disk).items() if k != "ballast2"} == before
    assert sorted(os.listdir(small_disk)) == ["ballast", "ballast2", "file", "merged", "out"]


def _room(disk: Path) -> int:
    facts = os.statvfs(disk)
    return max(facts.f_bavail * facts.f_bsize - 8192, 0)


def test_a_limit_on_the_size_of_files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, program: Callable[..., Program]
) -> None:
    """What any user can have of a full disk: a merge of 400 KB where 100 KB may be written, in a process of its own."""
    for name in "ab":
        saved(tmp_path, name, 64)
    put(tmp_path / "note", "old")
    script = tmp_path_factory.mktemp("script") / "limited.py"
    script.write_text("""
import os, resource, signal, sys
import fedlora.cli
from fedlora.adapters.io import read_adapter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
os.chdir(sys.argv[1])
sys.argv = ["fedlora", *sys.argv[2:]]
fedlora.cli.main()
""")
    before = tree(tmp_path)
    done = program(script, tmp_path, "merge", "a", "b", "-o", "new/out", "--rank", 16).ended()
    assert done.returncode == 2, done
    assert re.fullmatch(r"error: new/out .*: File too large\.\n", done.stderr)
    assert tree(tmp_path) == before and sorted(os.listdir(tmp_path)) == ["a", "b", "note"]


def test_a_disk_that_refuses_to_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "out", "old")

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ConfigError, match="Input/output error"):
        put(tmp_path / "out", force=True, kind=NOTES)
    assert tree(tmp_path) == {"out/note.txt": b"old"} and os.listdir(tmp_path) == ["out"]


def test_names_as_long_as_they_may_be_where_nobody_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """255 bytes, as Linux takes them; the place for what is not finished has as many at most."""

    def refuse(*_: object) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "pathconf", refuse)
    for length in range(225, 256):
        files.write(tmp_path / ("x" * length), "new")
    assert {len(name) for name in os.listdir(tmp_path)} == {*range(225, 256)}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_flush_a_folder_is_not_a_disk_that_fails(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext():
        files.sync_folder(tmp_path)


def test_a_file_system_without_an_exchange_of_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux answers EINVAL: the old folder is moved away and the new one put in its place. Any other error is one."""
    put(tmp_path / "out", "old")
    numbers = iter([errno.EINVAL, errno.EIO])

    class Library:
        @staticmethod
        def renameat2(*_: object) -> int:
            folders.ctypes.set_errno(next(numbers))
            return -1

    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_, **__: Library)
    put(tmp_path / "out", "new", force=True, kind=NOTES)
    assert tree(tmp_path) == {"out/note.txt": b"new"}
    with pytest.raises(ConfigError, match="Input/output error"):
        put(tmp_path / "out", "newer", force=True, kind=NOTES)
    assert tree(tmp_path) == {"out/note.txt": b"new"}


def test_a_lock_that_leads_elsewhere_makes_no_folder_ours(tmp_path: Path) -> None:
    """Somebody sends a folder of such a name, whose lock is a link to a file that bears the folder's own mark."""
    left = tmp_path / ".out.0123456789ab.part"
    (left / "made").mkdir(parents=True)
    (tmp_path / "mark").write_bytes(folders._mark(left))
    (left / "lock").symlink_to(tmp_path / "mark")
    recover(tmp_path / "out")
    assert (left / "made").is_dir()
    (left / "lock").unlink()
    (left / "lock").write_bytes(folders._mark(left))
    recover(tmp_path / "out")
    assert not left.exists(), "with a lock of its own it is what a writer left"


def test_a_folder_that_is_replaced_while_it_is_looked_at_is_looked_at_again(tmp_path: Path) -> None:
    """What was said of the old one does not hold for the new one."""
    place = tmp_path / "out"
    place.mkdir()

    def stranger(folder: Path) -> str | None:
        if (tmp_path / "old").exists():
            return None
        folder.rename(tmp_path / "old")
        folder.mkdir()
        return "holds 'x'"

    assert folders._looked_at(place, SimpleNamespace(stranger=stranger)) is None  # type: ignore[arg-type]


def test_an_error_of_another_file_keeps_that_file_s_name(tmp_path: Path) -> None:
    """Only the name of the place for what is not finished yet tells nobody anything."""
    with pytest.raises(OSError, match="theirs") as caught, files.replacing(tmp_path / "mine"):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "theirs")
    assert caught.value.filename == "theirs" and os.listdir(tmp_path) == []


def test_a_scratch_folder_that_another_process_has_locked_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another place is taken, and no descriptor stays open."""
    hold, answers, before = beside.hold, iter([False, False]), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(beside, "hold", lambda descriptor: next(answers, None) is None and hold(descriptor))
    put(tmp_path / "out")
    assert (tmp_path / "out" / "note.txt").read_text() == "new" and len(os.listdir("/proc/self/fd")) == before


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_a_blocked_readme_leaves_the_old_adapter(tmp_path: Path) -> None:
    """A directory in its place, which once left new weights beside the old config: twice too strong, and sound."""
    old = saved(tmp_path, "a", 2)
    adapter, spec = read_adapter(old)
    (old / "README.md").unlink()
    (old / "README.md").mkdir()
    before = tree(old)
    with pytest.raises(ConfigError, match=r"holds 'README.md/'"):
        write_adapter(old, adapter, AdapterSpec(spec.config, 5.0))
    assert tree(old) == before and os.listdir(tmp_path) == ["a"]


def test_an_adapter_is_replaced_whole_and_nothing_else_is(tmp_path: Path) -> None:
    old = saved(tmp_path, "a", 2)
    adapter, spec = read_adapter(old)
    write_adapter(old, adapter, AdapterSpec(spec.config, 1.0), card="new")
    assert sorted(os.listdir(old)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert (old / "README.md").read_text() == "new"
    (old / "upload.json").write_text("{}")  # of the old adapter: beside the new one it would be wrong
    with pytest.raises(ConfigError, match=r"holds 'upload\.json'"):
        write_adapter(old, adapter, spec)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"mine has no adapter_config\.json"):
        write_adapter(tmp_path / "mine", adapter, spec)
    assert tree(tmp_path / "mine") == {"notes.txt": b"dear"}


def test_merge_force_replaces_a_merge_and_no_home(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 2)
    out = tmp_path / "out"
    assert main("merge", a, b, "-o", out).code == 0
    first = tree(out)
    assert "is not empty" in main("merge", a, b, "--rank", 1, "-o", out).complaint() and tree(out) == first
    done = main("merge", a, b, "--rank", 1, "-o", out, "--force")
    assert done.code == 0 and sorted(os.listdir(out)) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "chapter.tex").write_text("years")
    before = tree(tmp_path)
    for target, said in ((home, "has no adapter_config.json"), (a, "the input"), (tmp_path, "holds the input")):
        for more in ([], ["--force"]):
            assert more == [] or said in main("merge", a, b, "-o", target, *more).complaint()
            assert tree(tmp_path) == before
    assert "the input" in main("merge", a, b, "-o", a / "x").complaint()
    assert tree(tmp_path) == before


def test_check_target_says_it_before_the_work(tmp_path: Path) -> None:
    put(tmp_path / "out")
    check_target(tmp_path / "new" / "deep")
    with pytest.raises(ConfigError, match="is not empty"):
        check_target(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_under_safetensors_own_writer_is_one_line(tmp_path: Path) -> None:
    """transformers writes models with it; it raises its own error. A limit on a file's size stands for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        told = pytest.raises(ConfigError, match=r"out cannot be written: .*os error 27")
        with told, replacing_folder(tmp_path / "out") as building:
            safetensors.torch.save_file({"w": torch.zeros(2**16)}, building / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
