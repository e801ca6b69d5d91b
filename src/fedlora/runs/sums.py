"""SHA256SUMS: the digest of each file that a finished run left, in the format of `sha256sum -c SHA256SUMS`.

It is written just before the summary, and includes it. A private run's is in RUN/private, because digests of who took
part could confirm guesses: `cd RUN; sha256sum -c private/SHA256SUMS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedlora.core import files
from fedlora.errors import CheckpointError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_sums(root: Path, place: Path, paths: Iterable[Path], ahead: Mapping[str, str]) -> None:
    """paths: files below `root`. ahead: digests of files yet to be written, by their path from `root`."""
    found = {path.relative_to(root).as_posix(): files.digest(path) for path in paths}
    found |= ahead
    files.write(place, "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items())))


def compared(root: Path, place: Path) -> tuple[list[str], dict[str, str]]:
    """Files in the list that are missing, and those that changed, with why. If the list itself is missing, it is the
    only missing file.

    Raises:
        CheckpointError: the list cannot be read.
    """
    try:
        lines = files.read(place).decode().splitlines()
    except FileNotFoundError as error:
        if place.is_symlink():
            raise CheckpointError(f"{place} is a dangling link. Remove it, and fedlora makes it again.") from error
        return [place.relative_to(root).as_posix()], {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place} cannot be read: {error}. Remove it, and fedlora makes it again.") from error
    missing, changed = [], {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{place} is damaged by line {line!r}. Remove it, and fedlora makes it again.")
        try:
            if files.digest(root / match[2]) != match[1]:
                changed[match[2]] = "its content changed"
        except FileNotFoundError:
            if (root / match[2]).is_symlink():
                changed[match[2]] = "it is a dangling link"
            else:
                missing.append(match[2])
        except OSError as error:
            changed[match[2]] = error.strerror or str(error)
    return missing, changed
