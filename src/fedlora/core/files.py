"""Writing that is all or nothing: beside the place, flushed, renamed, and the folder flushed too."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends well; else `path` stays as it was and nothing is left.

    The folder is made where it is missing. After a crash at any moment there is the old file or the new one, whole.

    Raises:
        OSError: the disk refuses. The old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")  # two writers, two files
    try:
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:
            if path.is_file():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write(path: Path, content: str | bytes) -> None:
    """`content` as the whole of `path`, as `replacing` does; text in UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Makes a folder's entries last: a rename is only safe from a power cut once the folder itself is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
