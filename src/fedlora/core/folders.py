"""A folder that appears whole: built beside its place, flushed, and put there by one rename.

    .NAME.TOKEN.part/          for this user only; gone at the end (`beside`)
        lock                   held while its writer lives; says which folder it lies in (`_mark`)
        new/                   what is being built
        old/                   what was replaced, on file systems that cannot exchange two folders in one step

A crash at any moment leaves the old folder or the new one in its place. Between the two renames of a file system that
cannot exchange them it may leave none there: then the next writing puts the old one back.
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

from fedlora.core import beside
from fedlora.core.echo import quoted, shown
from fedlora.errors import ConfigError

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_HERE, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@dataclass(frozen=True)
class FolderKind:
    """What a folder of one kind holds, so that nothing else is ever deleted in the belief that it is one.

    name: in words, with an article. sign: the file that each of them has; None where none is sure. files: a regular
    expression of the paths of its files, with "/" between the parts. mark: what else must hold of a folder: why it does
    not, in words, or None. instead: what to do but moving it away.

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
        """Why `folder` is not wholly of this kind, in words; None where it is."""
        if self.sign is not None and not (folder / self.sign).is_file():
            return f"has no {self.sign}, so it is not {self.name}"
        for found in _leaves(folder):
            if found.endswith("/") or not re.fullmatch(self.files, found):
                return f"holds {quoted(found)}, which is not part of {self.name}"
        return None if self.mark is None else self.mark(folder)


ANY_FOLDER = FolderKind("a folder", None, r"(?s:.*)")  # for places that nobody else writes to, as those of a run


@contextmanager
def replacing_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    kind: FolderKind | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
) -> Iterator[Path]:
    """An empty folder to fill that becomes `target` when the block ends well; else `target` stays as it was and nothing
    is left. Missing parents appear with it, in the same step.

    Args:
        force: a target that is not empty is replaced, where it is wholly of `kind`. inputs: what the result is made
            from; a target that is one of them, holds one or lies in one is refused, force or not.

    Raises:
        ConfigError: the target cannot be written or may not be replaced.

    Example:
        >>> with replacing_folder("made/here") as building:
        ...     _ = (building / "greeting.txt").write_text("hello")
        >>> Path("made/here/greeting.txt").read_text()
        'hello'
    """
    place, given = _real(target), [Path(path).absolute() for path in inputs]

    def check() -> None:  # also at the end, when the current directory may be another one
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
    """Raises `ConfigError` where `replacing_folder` would refuse this target: to ask before long work."""
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
            raise ConfigError(f"{shown(target)} is a link; name the directory that it leads to, or another one.")
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
        raise ConfigError(f"{shown(target)} {why}: it is not replaced. Move it away, or {kind.instead}.")


def _looked_at(place: Path, kind: FolderKind) -> str | None:
    """`kind.stranger` of one folder: where another writer replaced it meanwhile, of the one that is there now."""
    for _ in range(beside.TRIES):
        itself = _identity(place)
        with suppress(FileNotFoundError):
            why = kind.stranger(place)
            if why is None or _identity(place) == itself:
                return why
    return "is replaced by others all the time"


def recover(target: str | os.PathLike[str]) -> None:
    """Clean up after writers of `target` that died, and put back what one of them had taken away and not replaced."""
    place = _real(target)
    for path in (place, *place.parents):  # parents too: one that is there now may have been missing, and made with it
        if os.path.lexists(path.parent) and not os.access(path.parent, os.W_OK):
            break
        for left in beside.leftovers(path.parent, path.name):
            if beside.own(left, stat.S_IFDIR):
                with suppress(OSError):
                    _recover(left, path)


def _recover(left: Path, place: Path) -> None:
    try:
        lock = os.open(left / "lock", os.O_RDWR | os.O_NONBLOCK | _FLAGS)
    except FileNotFoundError:  # its writer died before it had one: then there is nothing else in it
        left.rmdir()
        return
    try:
        marked = os.read(lock, 100) == _mark(left)
        if beside.hold(lock) and (marked or os.listdir(left) == ["lock"]):  # it may have died before it wrote the mark
            _clear(left, place)
    finally:
        os.close(lock)


def _mark(scratch: Path) -> bytes:
    """Tells a scratch folder that a writer made here from one that somebody sends, in an archive or a repository: no
    copy of a folder has its number."""
    return f"{scratch.lstat().st_ino}\n".encode()


def _clear(scratch: Path, place: Path) -> None:
    """Remove a scratch folder, the lock last. What was taken away and not replaced goes back first; where its place is
    taken by now, it stays where it is: it is somebody's only copy."""
    with suppress(OSError):
        old, new = scratch / "old", scratch / "new"
        if os.path.lexists(old) and os.path.lexists(new):
            os.rename(old, place)
        for part in scratch.iterdir():  # `new` and `old`, and the scratch folders of what was built for `new`
            if part.name != "lock":
                _remove(part)
        (scratch / "lock").unlink(missing_ok=True)
        scratch.rmdir()


def _remove(folder: Path) -> None:
    if not stat.S_ISDIR(folder.lstat().st_mode):  # also a link, to whatever it leads
        folder.unlink()
        return
    try:
        shutil.rmtree(folder)
    except OSError:  # a folder in it that may not be changed is still ours to remove
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
            with suppress(FileNotFoundError):  # another process swept it while it was empty
                lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
                if beside.hold(lock) is not False:
                    try:
                        os.write(lock, _mark(place))
                    except OSError:
                        _clear(place, top)  # nothing is in it yet
                        os.close(lock)
                        raise
                    return place, lock
                os.close(lock)
    raise FileExistsError(errno.EEXIST, "the places for an unfinished folder are taken")


def _put(made: Path, top: Path, place: Path, check: Callable[[], None]) -> Path:
    """Rename what was made to its place, or to that of its topmost missing parent; return the folder around it.

    check: raises where a place that is not empty may not be replaced.
    """
    for _ in range(beside.TRIES):
        first = _first_missing(place)  # another process may have made parents meanwhile
        if not first.is_relative_to(top):
            raise FileNotFoundError(errno.ENOENT, f"{top.parent} is gone")
        source = made / first.relative_to(top)
        if first == place:
            with suppress(FileNotFoundError):
                os.chmod(source, stat.S_IMODE(place.lstat().st_mode) | 0o700)  # as private, or open, as the old one
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
    """Let two folders change places in one step, which Python's own renames cannot; False where the file system cannot
    either."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            return False
        raise OSError(number, os.strerror(number))
    return True


def _flush(folder: Path) -> None:
    """Everything below `folder` to the disk."""

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
    """Raises `ConfigError` where the target is an input, holds one or lies in one, by whatever names."""
    itself, above = _identity(place), {_identity(parent) for parent in place.parents} - {None}
    for given in inputs:
        real = Path(os.path.realpath(given))
        known = {_identity(path) for path in (real, *real.parents)} - {None}
        if itself in known:
            raise ConfigError(f"{shown(target)} is or holds the input {shown(given)}, which is never replaced.")
        if _identity(real) in above:
            raise ConfigError(
                f"{shown(target)} lies in the input {shown(given)}, and no output may; name another directory."
            )


def _check_place(target: object, place: Path) -> None:
    """Raises `ConfigError` for folders that cannot be replaced whole."""
    with suppress(OSError):  # a current directory that is gone
        here = Path.cwd()
        if _identity(place) in map(_identity, (here, *here.parents)):
            raise ConfigError(f"{shown(target)} is the current directory, or holds it; name a directory in it.")
    if os.path.ismount(place):
        raise ConfigError(
            f"{shown(target)} is where a disk is mounted, and cannot be replaced; name a directory in it."
        )


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from all others, whatever it is called."""
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return None
    return facts.st_dev, facts.st_ino


def _first_missing(place: Path) -> Path:
    """The topmost part of a path that is not there; the path itself where only that can be missing."""
    first = place
    for parent in place.parents:
        if os.path.lexists(parent):
            break
        first = parent
    return first


def _real(target: str | os.PathLike[str]) -> Path:
    """The absolute path without links and dots above its last part, which may be a link itself."""
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
    """The paths of all files and links below `folder`, and of its empty folders with "/" at the end."""
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
