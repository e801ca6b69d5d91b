"""Atomic folder writing: build it beside its target, flush it, and publish it by one rename.

    .NAME.TOKEN.part/          for this user only; gone at the end (`beside`)
        lock                   held while its writer lives; names the folder it lies in (`_mark`)
        new/                   the folder being built
        old/                   the folder being replaced, on file systems that cannot exchange two folders in one step

A crash at any moment leaves the old or the new folder in place. On a file system that cannot exchange folders, a crash
between the two renames may leave neither; the next write then puts the old one back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError

from fedlora.core import beside
from fedlora.core.text import quoted, shown
from fedlora.errors import ConfigError

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_HERE, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def place(name: str, what: str | None = None) -> Path:
    """A property of a class with a `path`: the path `name` below it. what: its content."""
    return property(lambda folder: folder.path / name, doc=what)  # type: ignore[return-value]


@dataclass(frozen=True)
class FolderKind:
    """Describes one kind of folder, so that a folder of any other kind is never deleted by mistake.

    name: in words, with an article. sign: a file that every such folder has; None if there is none. files: a regular
    expression for its files' paths, with "/" between the parts. mark: a further check that returns why a folder fails
    it, in words, or None. instead: what the user can do other than moving it away.

    Example:
        >>> FolderKind("an adapter", "adapter_config.json", r"adapter_config[.]json|README[.]md").name
        'an adapter'
    """

    name: str
    sign: str | None
    files: str
    mark: Callable[[Path], str | None] | None = field(default=None, compare=False)
    instead: str = field(default="name another directory", compare=False)

    def stranger(self, folder: Path) -> str | None:
        """Why `folder` is not entirely of this kind, in words; None if it is."""
        if self.sign is not None and not (folder / self.sign).is_file():
            return f"has no {self.sign}, so it is not {self.name}"
        for found in _leaves(folder):
            if found.endswith("/") or not re.fullmatch(self.files, found):
                return f"holds {quoted(found)}, which is not part of {self.name}"
        return None if self.mark is None else self.mark(folder)


ANY_FOLDER = FolderKind("a folder", None, r"(?s:.*)")  # for places only we write to, such as a run's


@contextmanager
def replacing_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    kind: FolderKind | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
) -> Iterator[Path]:
    """An empty folder to fill that becomes `target` if the block succeeds; otherwise `target` stays as it was and
    nothing is left. Missing parents appear with it, in the same step.

    Args:
        force: replace a non-empty target that is entirely of `kind`. inputs: what the result is made from; a target
            that is, contains or lies in one of them is refused, even with force.

    Raises:
        ConfigError: the target cannot be written or may not be replaced.

    Example:
        >>> with replacing_folder("made/here") as building:
        ...     _ = (building / "greeting.txt").write_text("hello")
        >>> Path("made/here/greeting.txt").read_text()
        'hello'
    """
    place, given = _real(target), [Path(path).absolute() for path in inputs]

    def check() -> None:  # runs again at the end, when the current directory may have changed
        _check(target, place, force, kind, given)

    lasting = not beside.is_unseen(place)
    if lasting:
        recover(place)
    check()
    top, scratch = _first_missing(place), None
    try:
        scratch, lock = _scratch(top)
        made = scratch / "new"
        building = made / place.relative_to(top)
        building.mkdir(parents=True)
        with beside.unseen(scratch):
            yield building
        if lasting:
            _flush(made)
        appeared_in = _put(made, top, place, check)
        if lasting:
            beside.sync_folder(appeared_in)
    except OSError as error:
        name = "" if error.filename is None else str(error.filename)
        if lasting and (not name or scratch is None or name == str(place) or name.startswith(str(scratch))):
            raise _cannot(target, error) from error
        raise
    except SafetensorError as error:  # its writer raises this where Python's raises OSError
        if "while serializing" in str(error):
            raise _cannot(target, error) from error
        raise
    finally:
        if scratch is not None:
            _clear(scratch, place)
            os.close(lock)


def check_target(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    kind: FolderKind | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """Raise `ConfigError` if `replacing_folder` would refuse this target; call it before long work."""
    _check(target, _real(target), force, kind, inputs)


def _check(
    target: object, place: Path, force: bool, kind: FolderKind | None, inputs: Sequence[str | os.PathLike[str]]
) -> None:
    _check_inputs(target, place, inputs)
    try:
        try:
            facts = place.lstat()
        except FileNotFoundError:
            home = _first_missing(place).parent
            if not home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{home} is not a folder") from None
            if not os.access(home, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"{home} may not be written to") from None
            return
        if stat.S_ISLNK(facts.st_mode):
            raise ConfigError(f"{shown(target)} is a link; name the directory it points to, or another one.")
        if not stat.S_ISDIR(facts.st_mode):
            raise ConfigError(f"{shown(target)} is a file; name a directory.")
        _check_place(target, place)
        if not os.access(place.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{place.parent} may not be written to")
        with os.scandir(place) as entries:
            empty = next(entries, None) is None
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        if isinstance(error, ConfigError):
            raise
        raise _cannot(target, error) from error
    if empty:
        return
    if not force or kind is None:
        replace = ", or replace what is there with --force" if kind is not None else ""
        raise ConfigError(f"{shown(target)} is not empty; name another directory{replace}.")
    why = _looked_at(place, kind)
    if why is not None:
        raise ConfigError(f"{shown(target)} {why}, so it is not replaced. Move it away, or {kind.instead}.")


def _looked_at(place: Path, kind: FolderKind) -> str | None:
    """`kind.stranger` for one folder; if another writer replaces it meanwhile, for the new one."""
    for _ in range(beside.TRIES):
        itself = _identity(place)
        with suppress(FileNotFoundError):
            why = kind.stranger(place)
            if why is None or _identity(place) == itself:
                return why
    return "is being replaced by other processes over and over"


def recover(target: str | os.PathLike[str]) -> None:
    """Clean up after dead writers of `target`, and put back a folder that one of them moved away and never replaced."""
    place = _real(target)
    for path in (place, *place.parents):  # a parent that exists now may have been missing and created with it
        if os.path.lexists(path.parent) and not os.access(path.parent, os.W_OK):
            break
        for left in beside.leftovers(path.parent, path.name):
            if beside.own(left, stat.S_IFDIR):
                with suppress(OSError):
                    _recover(left, path)


def _recover(left: Path, place: Path) -> None:
    try:
        lock = os.open(left / "lock", os.O_RDWR | os.O_NONBLOCK | _FLAGS)
    except FileNotFoundError:  # its writer died before creating the lock, so the folder is empty
        left.rmdir()
        return
    try:
        marked = os.read(lock, 100) == _mark(left)
        if beside.hold(lock) and (marked or os.listdir(left) == ["lock"]):  # it may have died before writing the mark
            _clear(left, place)
    finally:
        os.close(lock)


def _mark(scratch: Path) -> bytes:
    """Distinguishes a scratch folder made here from one that arrived in an archive or repository: a copy has another
    inode number."""
    return f"{scratch.lstat().st_ino}\n".encode()


def _clear(scratch: Path, place: Path) -> None:
    """Remove a scratch folder, the lock last. First put back a folder that was moved away and never replaced; if its
    place is taken by now, leave it: it may be somebody's only copy."""
    with suppress(OSError):
        old, new = scratch / "old", scratch / "new"
        if os.path.lexists(old) and os.path.lexists(new):
            os.rename(old, place)
        for part in scratch.iterdir():  # `new`, `old`, and scratch folders of writes inside `new`
            if part.name != "lock":
                _remove(part)
        (scratch / "lock").unlink(missing_ok=True)
        scratch.rmdir()


def _remove(folder: Path) -> None:
    if not stat.S_ISDIR(folder.lstat().st_mode):  # links too, wherever they point
        folder.unlink()
        return
    try:
        shutil.rmtree(folder)
    except OSError:  # we may remove read-only folders inside it too
        os.chmod(folder, 0o700)
        for above, inside, _ in os.walk(folder):
            for path in (os.path.join(above, name) for name in inside):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder)


def _scratch(top: Path) -> tuple[Path, int]:
    """A new scratch folder beside `top`, and the descriptor of its lock."""
    for _ in range(beside.TRIES):
        place = beside.fresh(top.parent, top.name)
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # another process swept it while empty
                lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
                if beside.hold(lock) is not False:
                    try:
                        os.write(lock, _mark(place))
                    except OSError:
                        _clear(place, top)  # it is still empty
                        os.close(lock)
                        raise
                    return place, lock
                os.close(lock)
    raise FileExistsError(errno.EEXIST, "the places for an unfinished folder are taken")


def _put(made: Path, top: Path, place: Path, check: Callable[[], None]) -> Path:
    """Rename the new folder to its place, or to its topmost missing parent; return the folder that contains it.

    check: raises if a non-empty target may not be replaced.
    """
    for _ in range(beside.TRIES):
        first = _first_missing(place)  # another process may have created parents meanwhile
        if not first.is_relative_to(top):
            raise FileNotFoundError(errno.ENOENT, f"{top.parent} is gone")
        source = made / first.relative_to(top)
        if first == place:
            with suppress(FileNotFoundError):
                os.chmod(source, stat.S_IMODE(place.lstat().st_mode) | 0o700)  # keep the old folder's permissions
        try:
            os.rename(source, first)
            return first.parent
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if first == place:
            check()
            if top != place:
                raise FileExistsError(errno.EEXIST, "another process has made it meanwhile")
            if not _exchange(made, place):
                os.rename(place, made.with_name("old"))
                os.rename(made, place)
            return place.parent
    raise FileExistsError(errno.EEXIST, "other processes make and remove its parents")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, which Python's renames cannot do; False if the file system cannot either."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            return False
        raise OSError(number, os.strerror(number))
    return True


def _flush(folder: Path) -> None:
    """Flush everything below `folder` to disk."""

    def refuse(error: OSError) -> None:
        raise error

    for above, _, names in os.walk(folder, topdown=False, onerror=refuse):
        for name in names:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                descriptor = os.open(path, os.O_RDONLY | _FLAGS)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        beside.sync_folder(Path(above))


def _check_inputs(target: object, place: Path, inputs: Sequence[str | os.PathLike[str]]) -> None:
    """Raise `ConfigError` if the target is, contains or lies in an input, by whatever name."""
    itself, above = _identity(place), {_identity(parent) for parent in place.parents} - {None}
    for given in inputs:
        real = Path(os.path.realpath(given))
        known = {_identity(path) for path in (real, *real.parents)} - {None}
        if itself in known:
            raise ConfigError(f"{shown(target)} is or holds the input {shown(given)}, which is never replaced.")
        if _identity(real) in above:
            raise ConfigError(
                f"{shown(target)} lies in the input {shown(given)}; no output may. Name another directory."
            )


def _check_place(target: object, place: Path) -> None:
    """Raise `ConfigError` for folders that cannot be replaced as a whole."""
    with suppress(OSError):  # the current directory is gone
        here = Path.cwd()
        if _identity(place) in map(_identity, (here, *here.parents)):
            raise ConfigError(f"{shown(target)} is or contains the current directory; name a directory in it.")
    if os.path.ismount(place):
        raise ConfigError(f"{shown(target)} has a disk mounted on it and cannot be replaced; name a directory in it.")


def _identity(path: Path) -> tuple[int, int] | None:
    """Identifies a folder whatever name it goes by."""
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return None
    return facts.st_dev, facts.st_ino


def _first_missing(place: Path) -> Path:
    """The topmost missing part of a path; the path itself if all its parents exist."""
    first = place
    for parent in place.parents:
        if os.path.lexists(parent):
            break
        first = parent
    return first


def _real(target: str | os.PathLike[str]) -> Path:
    """The absolute path with links and dots resolved above its last part, which may itself be a link."""
    given = Path(target)
    try:
        if given.name in ("", ".."):
            return Path(os.path.realpath(given))
        return Path(os.path.realpath(given.parent)) / given.name
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise _cannot(target, error) from error


def _cannot(target: object, error: Exception) -> ConfigError:
    return ConfigError(f"{shown(target)} cannot be written: {getattr(error, 'strerror', None) or error}.")


def _leaves(folder: Path) -> Iterator[str]:
    """Paths of all files and links below `folder`; empty folders end in "/"."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        with os.scandir(folder / above) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        if above and not found:
            yield above
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{above}{entry.name}/")
            else:
                yield above + entry.name
