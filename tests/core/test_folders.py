"""Files and folders that appear whole. Kinds of evidence: contract (the old one or the new one after a kill before any
single step), end to end (the command line, a full disk).

A kill is played in this process (support.kills); a full disk is a limit on the size of files.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedlora.core import files
from fedlora.core.folders import ANY_FOLDER, FolderKind, check_target, replacing_folder
from fedlora.errors import ConfigError
from support.kills import at_each_step

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


def fill(target: Path, text: str) -> None:
    with replacing_folder(target, force=True, kind=ANY_FOLDER) as building:
        (building / "deep").mkdir()
        (building / "deep" / "one.txt").write_text(text)
        (building / "two.txt").write_text(text)


def content(target: Path) -> str:
    """Which of the two it is: "new", "old", "none", or all that is in it where it is a mixture."""
    found, texts = tree(target), set(tree(target).values())
    if not target.exists():
        return "none"
    return texts.pop().decode() if len(found) == 2 and len(texts) == 1 else str(found)


def test_a_kill_at_any_step_leaves_nothing_or_the_whole_folder(tmp_path: Path) -> None:
    """Never a part; the next writing gives the new one, whatever is left beside it."""
    place = Path("a", "b", "out")
    found = at_each_step(tmp_path, lambda home: fill(home / place, "new"), lambda home: content(home / place))
    then = [seen for seen, _ in found]
    assert set(then) == {"none", "new"} and then == sorted(then, key=["none", "new"].index), then
    assert {at_last for _, at_last in found} == {"new"} and len(found) > 5


def test_a_kill_at_any_step_of_a_replacement_loses_neither_folder(tmp_path: Path) -> None:
    """Between two renames there is one step with nothing in its place: then both are beside it, whole."""

    def look(home: Path) -> str:
        if (home / "out").exists():
            return content(home / "out")
        return ", ".join(sorted(content(path) for path in home.glob(".*.part")))

    found = at_each_step(tmp_path, lambda home: fill(home / "out", "new"), look, lambda home: fill(home / "out", "old"))
    then = Counter(seen for seen, _ in found)
    assert set(then) == {"old", "new, old", "new"} and then["new, old"] == 1
    assert {at_last for _, at_last in found} == {"new"}


def test_a_kill_at_any_step_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    found = at_each_step(
        tmp_path, lambda home: files.write(home / "f", "new"), lambda home: (home / "f").read_text(),
        lambda home: files.write(home / "f", "old"),
    )  # fmt: skip
    assert {seen for seen, _ in found} == {"old", "new"} and {at_last for _, at_last in found} == {"new"}


def test_what_killed_writers_left_is_found_and_swept_and_nothing_else(tmp_path: Path) -> None:
    """Names up to the file system's limit of 255 bytes."""
    names = ["file", "n" * 255, "ü" * 127, "a b\n*[x]", "\udcff\udcfe"]
    left = [files.unfinished(tmp_path / name) for name in names]
    others = ["file.0123456789ab.part", ".file.part", ".file.x.part", "notes.part"]
    for path in [*left, *(tmp_path / name for name in others)]:
        path.write_text("half")
    (tmp_path / ".folder.0123456789ab.part").mkdir()
    for name in names:
        files.write(tmp_path / name, "whole")
    assert set(files.leftovers(tmp_path)) == {*left, tmp_path / ".folder.0123456789ab.part"}
    files.sweep(tmp_path)
    assert set(os.listdir(tmp_path)) == {*names, *others, ".folder.0123456789ab.part"}


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_was_written_is_flushed_before_its_name_and_the_name_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name leads to the whole content only if both were flushed, in this order (fsync(2))."""
    flushed: list[str] = []

    def fsync(descriptor: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    files.write(tmp_path / "file", "new")
    assert flushed == ["file", "folder"]
    put(tmp_path / "out")
    assert flushed[2:] == ["file", "folder", "folder"]


def test_the_permissions_of_what_is_replaced_stay(tmp_path: Path) -> None:
    files.write(tmp_path / "key", "old")
    (tmp_path / "key").chmod(0o600)
    files.write(tmp_path / "key", "new")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    put(tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "out").chmod(0o750)
    put(tmp_path / "out", force=True, kind=NOTES)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_a_link_is_replaced_by_the_file_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("mine")
    (tmp_path / "link").symlink_to("dear")
    files.write(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink() and tree(tmp_path) == {"dear": b"mine", "link": b"new"}


def refuse(number: int) -> Callable[[int], None]:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_flush_a_folder_is_not_a_disk_that_fails(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(number))
    with pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext():
        files.sync_folder(tmp_path)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_what_is_not_empty_is_refused_and_with_force_only_what_is_ours(tmp_path: Path) -> None:
    target = tmp_path / "out"
    put(target, "old")
    with pytest.raises(ConfigError, match=r"out is not empty.* --force"):
        put(target, kind=NOTES)
    with pytest.raises(ConfigError, match=r"is not empty(?!.*--force)"):
        put(target, force=True)  # no kind: nothing is ever replaced there
    put(target, force=True, kind=NOTES)
    assert tree(target) == {"note.txt": b"new"}
    (target / "deep" / "er").mkdir(parents=True)
    (target / "deep" / "er" / "mine.txt").write_text("dear")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"holds 'deep/er/mine\.txt'(?!.*--force)"):  # nobody is sent in a circle
            put(target, force=force, kind=NOTES)
    (target / "deep" / "er" / "mine.txt").unlink()
    (target / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="holds 'link'"):
        put(target, force=True, kind=NOTES)
    (target / "link").unlink()
    (target / "note.txt").rename(target / "deep" / "one")
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


def test_no_input_is_replaced_or_written_into(tmp_path: Path) -> None:
    """By whatever name. What contains one holds something else."""
    put(tmp_path / "in" / "a", "input")
    (tmp_path / "alias").symlink_to("in")
    for target in ("in/a", "alias/a", "in/../in/a", "alias/a/new"):
        with pytest.raises(ConfigError, match="the input"):
            put(tmp_path / target, force=True, kind=ANY_FOLDER, inputs=[tmp_path / "in" / "a"])
    with pytest.raises(ConfigError, match="has no note"):
        put(tmp_path / "in", force=True, kind=NOTES, inputs=[tmp_path / "in" / "a"])
    assert tree(tmp_path / "in") == {"a/note.txt": b"input"}


def test_an_error_between_the_two_renames_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "out", "old")
    real, calls = os.rename, []

    def interrupted(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "out", force=True, kind=NOTES)
    assert tree(tmp_path) == {"out/note.txt": b"old"} and os.listdir(tmp_path) == ["out"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, said in {
        "file": "is a file; name a directory", "file/x": "file is no folder", "link": "is a link", "link/": "is a link",
        "dangling": "is a link", "n" * 256: "name too long",
        "a\nb\x1b" + "n" * 256: r"a\\nb\\x1bn",
    }.items():  # fmt: skip
        for check in (put, check_target):
            with pytest.raises(ConfigError, match=said) as refused:
                check(f"{tmp_path}/{name}", force=True, kind=ANY_FOLDER)
            assert refused.value.args[0].isprintable()
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "link", "real"]
    put(tmp_path / "link" / "out")  # a link above the last part is the user's own way to write to another disk
    assert tree(tmp_path / "real") == {"out/note.txt": b"new"}


def test_a_disk_that_refuses_to_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "out", "old")
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(ConfigError, match="Input/output error"):
        put(tmp_path / "out", force=True, kind=NOTES)
    assert tree(tmp_path) == {"out/note.txt": b"old"} and os.listdir(tmp_path) == ["out"]


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
