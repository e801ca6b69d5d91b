"""Folders on the Hugging Face hub, written owner/name@revision; digests of files, and what libraries say of bad ones.

They are downloaded into the hub's own cache, nothing else. A revision is a commit, a tag or a branch (`main` is the
newest state). Without one a folder's name is a path on this machine, so that a mistyped path asks no server.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedlora.errors import ConfigError, FedLoRAError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "labels.json", "upload.json")
MODEL_TEXTS = (  # what a loader may read of a model besides its weights; .py of models whose code comes with them
    "*.json", "*.model", "vocab*.txt", "merges*.txt", "dict*.txt", "*.jinja", "*.spm", "*.codes", "*.tiktoken", "*.py",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_SECONDS = 5.0  # for the hub's answer
_OTHER_COPIES = ("consolidated*", "original/*", "onnx/*", "openvino/*")  # the same weights for other programs
_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)@(\w[\w.-]*(?:/\w[\w.-]*)*)", re.ASCII)
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?")


def repository_and_revision(text: str) -> tuple[str, str] | None:
    """The two parts of owner/name@revision; None for any other text.

    Example:
        >>> repository_and_revision("someone/some-adapter@main")
        ('someone/some-adapter', 'main')
    """
    found = _NAMED.fullmatch(text)
    return (found[1], found[2]) if found else None


def repository_of(folder: str | os.PathLike[str]) -> str | None:
    """owner/name for a folder in the hub's cache, models--OWNER--NAME/snapshots/REVISION; None for any other."""
    found = _SNAPSHOT.fullmatch(os.fspath(folder))
    return found[1].replace("--", "/", 1) if found else None


def snapshot(repository: str, revision: str | None, files: Sequence[str]) -> Path:
    """The hub's snapshot on this machine, downloaded if missing; without a network, the cached one.

    files: patterns of the files to download.

    Raises:
        ConfigError: the hub has no such repository or revision, or cannot be reached and it is not cached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(files), ignore_patterns=list(_OTHER_COPIES),
                etag_timeout=_SECONDS,
            )
        )  # fmt: skip
    except Exception as error:  # the transport's exceptions change from version to version
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        at, flag = ("", "") if revision is None else (f" at revision {revision}", f" --revision {revision}")
        raise ConfigError(
            f"{repository!r}{at} is neither a folder here (relative paths start at the config's) nor cached, and the "
            f"hub does not give it: {type(cause).__name__}: {first_line(cause)}. A private one needs `hf auth login`; "
            f"without a network, give a folder made elsewhere by `hf download {repository}{flag} --local-dir`."
        ) from error


def model_snapshot(repository: str, revision: str | None, *, weights: bool = True) -> Path:
    """`snapshot` of a model. weights: False: only the small files, such as configuration and tokenizer."""
    texts = [*MODEL_TEXTS, "README.md"]  # which has the licence
    found = snapshot(repository, revision, [*texts, *(["model*.safetensors"] if weights else [])])
    if weights and not any(found.glob("model*.safetensors")):
        return snapshot(repository, revision, ["pytorch_model*.bin"])
    return found


def local_folder(given: str | os.PathLike[str], files: Sequence[str]) -> Path:
    """The folder itself, if it is a path; for owner/name@revision, unless there is such a path, the hub's `snapshot`.

    Raises:
        ConfigError: as `snapshot`; or the repository has none of the files.
    """
    named = repository_and_revision(os.fspath(given))
    if named is None or os.path.lexists(given):
        return Path(given)
    found = snapshot(*named, files)
    if not any(found.glob("*")):
        raise ConfigError(f"{named[0]} on the hub has none of {', '.join(files)} at revision {named[1]}.")
    return found


def file_digest(file: Path) -> str:
    """SHA-256 (hex) of a file, read again only if its size or times change. Raises `OSError`."""
    real = file.resolve()
    found = real.stat()
    return _of_file(str(real), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


@functools.cache
def _of_file(path: str, *_: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def readable(otherwise: str, hint: str = "") -> Iterator[None]:
    """Raise `ConfigError`, which begins with `otherwise`, for any error in the block: files of a model that are damaged
    or odd fail in many ways, in several libraries."""
    try:
        yield
    except FedLoRAError:
        raise
    except Exception as error:
        raise ConfigError(f"{otherwise}: {first_line(error)}.{hint}") from error


def first_line(error: Exception) -> str:
    """What a library says, in one line without its full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
