"""Writing a folder so that it appears whole: build it beside its place, flush it, rename it (`files` has the names).

A kill leaves the old folder or the new one in its place. Only between the two renames that replace a folder which is
not empty there is neither: then both are beside it, whole, as .NAME.TOKEN.part.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safetensors import SafetensorError

from fedlora.core import files
from fedlora.core.text import quoted, shown
from fedlora.errors import ConfigError


def place(name: str, what: str | None = None) -> Path:
    """A property of a class with a `path`: the path `name` below it. what: its content."""
    return cast(Path, property(lambda folder: folder.path / name, doc=what))


@dataclass(frozen=True)
class FolderKind:
    """Describes one kind of folder, so that a folder of any other kind is never deleted by mistake.

    name: in words, with an article. sign: a file that every such folder has; None if there is none. files: a regular
    expression for its files' paths, with "/" between the parts.

    Example:
        >>> FolderKind("an adapter", "adapter_config.json", r"adapter_config[.]json|README[.]md").name
        'an adapter'
    """

    name: str
    sign: str | None
    files: str

    def stranger(self, folder: Path) -> str | None:
        """Why `folder` is not entirely of this kind, in words; None if it is."""
        if self.sign is not None and not (folder / self.sign).is_file():
            return f"has no {self.sign}, so it is not {self.name}"
        for path in sorted(folder.rglob("*")):
            found = path.relative_to(folder).as_posix()
            if (path.is_symlink() or not path.is_dir()) and not re.fullmatch(self.files, found):
                return f"holds {quoted(found)}, which is not part of {self.name}"
        return None


ANY_FOLDER = FolderKind("a folder", None, r"(?s:.*)")  # for places only we write to, such as a run's


@contextmanager
def replacing_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    kind: FolderKind | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
) -> Iterator[Path]:
    """An empty folder to fill that becomes `target` if the block succeeds; otherwise `target` stays as it was.

    Args:
        force: replace a non-empty target that is entirely of `kind`. inputs: what the result is made from; no target
            is one of them or lies in one, even with force.

    Raises:
        ConfigError: the target cannot be written or may not be replaced.

    Example:
        >>> with replacing_folder("made/here") as building:
        ...     _ = (building / "greeting.txt").write_text("hello")
        >>> Path("made/here/greeting.txt").read_text()
        'hello'
    """
    place = Path(os.path.abspath(target))  # the current directory may change meanwhile
    check_target(target, force=force, kind=kind, inputs=inputs)
    building, old = files.unfinished(place), files.unfinished(place)
    try:
        building.mkdir(parents=True)
        yield building
        _flush(building)
        _check(target, place, force, kind)  # somebody may have put something there meanwhile
        if place.is_dir():
            shutil.copymode(place, building)
            if any(place.iterdir()):
                os.rename(place, old)
        os.rename(building, place)
        files.sync_folder(place.parent)
    except OSError as error:
        name = str(error.filename or place)  # without one the disk is full
        if name == str(place) or name.startswith(str(building)):
            raise _cannot(target, error) from error
        raise
    except ConfigError as error:  # of a write inside, which calls itself by its own place
        raise ConfigError(str(error).replace(shown(building), shown(target))) from error
    except SafetensorError as error:  # its writer raises this where Python's raises OSError
        if "while serializing" in str(error):
            raise _cannot(target, error) from error
        raise
    finally:
        if old.exists() and not place.exists():
            os.rename(old, place)
        for left in (building, old):
            shutil.rmtree(left, ignore_errors=True)


def check_target(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    kind: FolderKind | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """Raise `ConfigError` if `replacing_folder` would refuse this target; call it before long work."""
    real = Path(os.path.realpath(target))
    for given in inputs:
        if Path(os.path.realpath(given)) in (real, *real.parents):
            raise ConfigError(f"{shown(target)} is or lies in the input {shown(given)}; name another directory.")
    _check(target, Path(os.path.abspath(target)), force, kind)


def _check(target: object, place: Path, force: bool, kind: FolderKind | None) -> None:
    try:
        if place.is_symlink():
            raise ConfigError(f"{shown(target)} is a link; name the directory it points to, or another one.")
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{shown(target)} is a file; name a directory.")
        home = next((above for above in place.parents if above.exists()), place)
        if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
            raise ConfigError(f"{shown(target)} cannot be written: {shown(home)} is no folder that you may write to.")
        if not place.exists() or not any(place.iterdir()):
            return
        why = kind.stranger(place) if kind is not None else None
    except OSError as error:
        raise _cannot(target, error) from error
    if kind is not None and why is not None:
        raise ConfigError(
            f"{shown(target)} is not empty and {why}, so it is not replaced. Move it away, or name another directory."
        )
    if not force or kind is None:
        replace = ", or replace what is there with --force" if kind is not None else ""
        raise ConfigError(f"{shown(target)} is not empty; name another directory{replace}.")


def _cannot(target: object, error: Exception) -> ConfigError:
    return ConfigError(f"{shown(target)} cannot be written: {getattr(error, 'strerror', None) or error}.")


def _flush(folder: Path) -> None:
    """Flush everything below `folder` to disk. Weights get the folder's mode: safetensors makes its files for the owner
    alone, and other accounts serve the model."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for above, _, names in os.walk(folder, topdown=False):
        for path in (Path(above, name) for name in names):
            if not path.is_symlink():
                with path.open("rb") as file:
                    if path.suffix == ".safetensors":
                        os.fchmod(file.fileno(), mode)
                    os.fsync(file.fileno())
        files.sync_folder(Path(above))
