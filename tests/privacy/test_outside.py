"""Which ledger goes on, and which is a copy. Kind of evidence: enumeration. Each case does to a ledger of two lines
what disks, people and programs do, and says what becomes of the next charge: it goes on, or is refused, and with which
words. By definition: whatever is done, all lines that were ever written for a population are in the one file that goes
on, but where somebody adopted it elsewhere. Mounts are real, and need root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedlora.errors import CheckpointError, LedgerError
from fedlora.privacy import Ledger, outside
from fedlora.runs.private_releases import OnDisk
from support.command_line import invoke
from support.processes import Program

from .test_ledger import ROUNDS, an_event, of

TIP = "ledger.jsonl.tip"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLORA_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "here" / "ledger.jsonl"
    for round in (1, 2):
        of(found).charge(an_event(round))
    return found


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    made: list[Path] = []

    def mounted(name: str, *options: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no mount here: {done.stderr.strip()}")
        made.append(place)
        return place

    if os.geteuid():
        pytest.skip("mounts need root")
    yield mounted
    for place in reversed(made):
        subprocess.run(["umount", str(place)], check=True)


def copied(path: Path, into: Path) -> Path:
    """Both files, into another folder."""
    into.mkdir(exist_ok=True)
    for name in (path.name, TIP):
        shutil.copy2(path.with_name(name), into / name)
    return into / path.name


def in_place(path: Path, older: Path) -> Path:
    """What is in `older`, written into the same files: the same inodes."""
    for name in (path.name, TIP):
        path.with_name(name).write_bytes(older.with_name(name).read_bytes())
    return path


# ---- it goes on ------------------------------------------------------------------------------------------------------


def as_it_is(path: Path) -> Path:
    return path


def renamed(path: Path) -> Path:
    path.with_name(TIP).rename(path.with_name("other.tip"))
    return path.rename(path.with_name("other"))


def moved_on_its_disk(path: Path) -> Path:
    return path.parent.rename(path.parent.with_name("there")) / path.name


def by_a_link(path: Path) -> Path:
    (path.parent.parent / "link").symlink_to(path)
    return path.parent.parent / "link"


def by_a_hard_link(path: Path) -> Path:
    """With its tip, which is another name of the same file too."""
    there = path.parent.parent / "there"
    there.mkdir()
    for name in (path.name, TIP):
        os.link(path.with_name(name), there / name)
    return there / path.name


@pytest.mark.parametrize("done", [as_it_is, renamed, moved_on_its_disk, by_a_link, by_a_hard_link])
def test_it_goes_on(path: Path, done: Callable[[Path], Path]) -> None:
    assert of(done(path)).charge(an_event(3)).number == 3


def test_it_goes_on_under_a_bind_mount(path: Path, mount: Callable[..., Path]) -> None:
    place = mount("bound", "--bind", str(path.parent))
    assert of(place / path.name).charge(an_event(3)).number == 3
    assert of(path).charge(an_event(4)).number == 4


# ---- it is refused ---------------------------------------------------------------------------------------------------


def a_copy(path: Path) -> Path:
    return copied(path, path.parent.parent / "there")


def a_copy_in_its_place(path: Path) -> Path:
    there = copied(path, path.parent.parent / "there")
    shutil.rmtree(path.parent)
    there.parent.rename(path.parent)
    return path


def a_copy_of_a_begun_one(path: Path) -> Path:
    """One line, and no tip: what a maker leaves that was killed; nothing was spent by then."""
    there = path.parent.parent / "there"
    there.mkdir()
    (there / path.name).write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    return there / path.name


def an_older_one(path: Path) -> Path:
    """Ledger and tip as they were a line ago, in the same files."""
    older = copied(path, path.parent.parent / "backup")
    of(path).charge(an_event(9))
    return in_place(path, older)


def with_nothing_known(path: Path) -> Path:
    shutil.rmtree(outside.state_folder())
    return path


def after_the_copy_was_adopted(path: Path) -> Path:
    of(copied(path, path.parent.parent / "there")).adopt("a new disk")
    return path


def from_where_it_was_adopted(path: Path) -> Path:
    """On another machine, and brought back into the same files."""
    there, mine = copied(path, path.parent.parent / "there"), os.environ["FEDLORA_STATE_DIR"]
    os.environ["FEDLORA_STATE_DIR"] = f"{mine}-of-the-other"
    of(there).adopt("a new server")
    of(there).charge(an_event(7))
    os.environ["FEDLORA_STATE_DIR"] = mine
    return in_place(path, there)


REFUSED = [
    (a_copy, "as another file"), (a_copy_in_its_place, "as another file"), (a_copy_of_a_begun_one, "as another file"),
    (an_older_one, "older than .* line 2, .*line '?3"),
    (with_nothing_known, "has no record"), (after_the_copy_was_adopted, "as another file"),
    (from_where_it_was_adopted, "another copy .*adopted"),
]  # fmt: skip


@pytest.mark.parametrize(("done", "why"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_it_is_refused(path: Path, done: Callable[[Path], Path], why: str) -> None:
    """Before a run trains anybody as well as when it is charged; nothing is written, and reading stays free."""
    there = done(path)
    before = there.read_bytes()
    for ask in (lambda: of(there).charge(an_event(3)), lambda: of(there).check(an_event(3), None)):
        with pytest.raises(LedgerError, match=why):
            ask()
    assert there.read_bytes() == before and of(there).events() is not None


def test_one_that_was_written_elsewhere_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same files and state, as on two machines that share a home folder, or in a container without an id."""
    real = os.statvfs
    for id in ("other\n", "", None):
        (tmp_path / "machine-id").unlink(missing_ok=True)
        if id is not None:
            (tmp_path / "machine-id").write_text(id)
        with monkeypatch.context() as patch:
            patch.setattr(outside, "MACHINE_ID", tmp_path / "machine-id")
            with pytest.raises(LedgerError, match="on another machine"):
                of(path).charge(an_event(3))
            if not id:  # without an id a ledger of its own goes on
                assert of(tmp_path / f"own-{id}.jsonl").charge(an_event(1)).number == 1
                assert of(tmp_path / f"own-{id}.jsonl").charge(an_event(2)).number == 2

    class Other:
        f_fsid = real(path).f_fsid + 1

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: Other)
        with pytest.raises(LedgerError, match="on another file system"):
            of(path).charge(an_event(3))
    assert of(path).charge(an_event(3)).number == 3


def test_a_fresh_file_system_with_the_same_inode_is_another_one(mount: Callable[..., Path], tmp_path: Path) -> None:
    """As it was found: on two fresh tmpfs files get the same inodes, and both copies went on."""
    one, two = (mount(name, "-t", "tmpfs", "none") for name in ("one", "two"))
    for round in (1, 2):
        of(one / "ledger.jsonl").charge(an_event(round))
    there = copied(one / "ledger.jsonl", two)
    assert there.stat().st_ino == (one / "ledger.jsonl").stat().st_ino
    with pytest.raises(LedgerError, match="on another file system"):
        of(there).charge(an_event(3))
    assert of(one / "ledger.jsonl").charge(an_event(3)).number == 3


# ---- a move that is meant --------------------------------------------------------------------------------------------


def test_one_goes_on_after_a_move_that_is_meant_and_the_other_never_again(path: Path, tmp_path: Path) -> None:
    there = copied(path, tmp_path / "there")
    invoke("privacy", there, "--adopt", "--because", "a new disk")
    assert of(there).charge(an_event(3)).number == 4
    for old in (path, in_place(path, there)):  # as it was, and with all lines
        with pytest.raises(LedgerError, match="as another file"):
            of(old).charge(an_event(4))
    with pytest.raises(LedgerError, match="the ledger itself"):
        of(there).adopt("again")


def test_an_older_one_is_not_adopted_until_somebody_says_that_the_newer_is_lost(path: Path, state: Path) -> None:
    an_older_one(path)
    with pytest.raises(LedgerError, match=r"older .*remove that file, adopt .*--charge"):
        of(path).adopt("the backup")
    (known,) = (state / "ledgers").glob("*.json")
    known.unlink()
    of(path).adopt("the disk broke; line 3 is lost")
    assert of(path).charge(an_event(3)).number == 4


def test_killed_while_it_is_adopted_it_is_adopted_again(path: Path, tmp_path: Path) -> None:
    """Before the line is there neither goes on; no budget is spent twice, and nobody is shut out."""
    there = copied(path, tmp_path / "there")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlora.privacy.ledger_file.put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            of(there).adopt("a new disk")
    for one in (path, there):
        with pytest.raises(LedgerError, match="adopt"):
            of(one).charge(an_event(3))
    of(there).adopt("a new disk")
    assert of(there).charge(an_event(3)).number == 4


def test_killed_between_a_line_and_what_is_known_of_it_it_goes_on_with_the_line(path: Path) -> None:
    """Nothing had left for the line. Charged again it is the same one; then it is known, and an older one refused."""
    older = copied(path, path.parent.parent / "backup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outside.Outside, "write", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            of(path).charge(an_event(3))
    assert of(path).charge(an_event(3)).number == 3
    in_place(path, older)
    with pytest.raises(LedgerError, match="older than what"):
        of(path).charge(an_event(4))


def test_killed_before_its_first_line_nothing_is_known_of_it_twice(tmp_path: Path) -> None:
    new = tmp_path / "new.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlora.privacy.ledger_file.put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            of(new).charge(an_event(1))
    assert of(new).charge(an_event(1)).number == 1


def test_copies_that_are_used_at_once_make_one_chain(
    path: Path, tmp_path: Path, program: Callable[..., Program]
) -> None:
    """A process charges the original while a copy is adopted: all its lines are in the copy, or the copy is refused."""
    charging = program(ROUNDS, "charge", path.parent, "busy", 40)
    there = copied(path, tmp_path / "there")
    adopted = False
    while not adopted and charging.process.is_alive():
        copied(path, tmp_path / "there")
        try:
            of(there).adopt("while the other one is used")
            adopted = True
        except LedgerError as error:
            assert "older than what" in str(error) or "cut off" in str(error)
    code = charging.ended().returncode
    if adopted:
        lines, own = there.read_bytes().splitlines(), path.read_bytes().splitlines()
        assert lines[: len(own)] == own and len(lines) == len(own) + 1 and code != 0
    else:
        assert len(of(path).events()) == 42


# ---- the place -------------------------------------------------------------------------------------------------------


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    for name, place in (("FEDLORA_STATE_DIR", tmp_path / "state"), ("XDG_STATE_HOME", tmp_path / "xdg" / "fedlora"),
                        ("HOME", home / ".local" / "state" / "fedlora")):  # fmt: skip
        assert outside.state_folder() == place
        monkeypatch.delenv(name)


def test_a_home_that_cannot_be_written_is_told_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: Callable[..., Path]
) -> None:
    """As in a unit with ProtectHome=read-only. The way out is another place."""
    monkeypatch.delenv("FEDLORA_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(mount("read-only", "-t", "tmpfs", "-o", "ro", "none")))
    new = tmp_path / "new.jsonl"
    for ask in (lambda: of(new).check(an_event(1), None), lambda: of(new).charge(an_event(1))):
        with pytest.raises(LedgerError, match=r"cannot be kept in .*read-only.*Set FEDLORA_STATE_DIR"):
            ask()
    assert not new.exists() or not new.read_bytes()
    monkeypatch.setenv("FEDLORA_STATE_DIR", str(tmp_path / "elsewhere"))
    assert of(new).charge(an_event(1)).number == 1


def test_several_ledgers_are_known_apart_and_a_draw_by_the_same_means(tmp_path: Path, state: Path) -> None:
    """Two ledgers, and a draw whose folder is copied, brought back after its round, and left without what was known."""
    ledgers = [of(tmp_path / name) for name in ("one", "two")]
    for ledger in ledgers:
        ledger.charge(an_event(1))
    assert len(list((state / "ledgers").glob("*.json"))) == 2
    ondisk = OnDisk(tmp_path / "private", "run", Ledger(tmp_path / "l", "p"), None, 2, 1e-3)
    assert ondisk.first_drawn(1, "from", ["a"]) == ["a"] == ondisk.first_drawn(1, "from", ["b"])
    kept = (ondisk.folder / "sample.json").read_bytes()
    assert ondisk.first_drawn(2, "from", ["b"]) == ["b"] and len(list((state / "draws").iterdir())) == 1
    (ondisk.folder / "sample.json").write_bytes(kept)  # an older one, in the same folder
    with pytest.raises(CheckpointError, match="is a copy"):
        ondisk.first_drawn(1, "from", ["b"])


@pytest.mark.parametrize("which", ["the tip", "what is known outside", "the ledger"])
@pytest.mark.parametrize("kind", ["a pipe", "endless"])
def test_what_stands_in_the_place_of_a_ledgers_files_holds_nobody_up(
    path: Path, state: Path, kind: str, which: str, program: Callable[..., Program]
) -> None:
    """All of them may lie where a group writes. A pipe without a writer, and a link to a device that never ends."""
    known = next((state / "ledgers").glob("*.json"))
    file = {"the tip": path.with_name(TIP), "what is known outside": known, "the ledger": path}[which]
    file.unlink()
    os.mkfifo(file) if kind == "a pipe" else file.symlink_to("/dev/zero")
    done = program(ROUNDS, "ask", path.parent).ended(60)
    assert done.stdout.split() == ["refused"] * 2, done.stderr
