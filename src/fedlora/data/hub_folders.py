"""Folders of the Hugging Face hub, written owner/name@revision: downloaded into the hub's own cache, nothing else.

A revision is a commit, a tag or a branch (`main` is the newest state). Without one a name is a path on this machine, so
that a mistyped path asks no server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedlora.errors import ConfigError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "labels.json", "upload.json")
MODEL_FILES = (
    "*.json", "*.jsonl", "*.safetensors", "*.model", "*.spm", "*.tiktoken", "*.txt", "*.jinja", "*.md", "LICENSE*",
)  # fmt: skip
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


def local_folder(given: str | os.PathLike[str], files: Sequence[str]) -> Path:
    """The folder itself, if it is a path; for owner/name@revision, unless there is such a path, the hub's snapshot.

    files: patterns of the files to download, such as `ADAPTER_FILES`.

    Raises:
        ConfigError: the hub has no such repository, revision or files, or cannot be reached and they are not cached.
    """
    named = repository_and_revision(os.fspath(given))
    if named is None or os.path.lexists(given):
        return Path(given)
    from huggingface_hub import snapshot_download

    repository, revision = named
    try:
        found = Path(snapshot_download(repository, revision=revision, allow_patterns=list(files),
                                       ignore_patterns=list(_OTHER_COPIES)))  # fmt: skip
    except Exception as error:  # the transport's exceptions change from version to version
        raise ConfigError(_why(repository, revision, error)) from error
    if not found.is_dir() or not any(found.iterdir()):
        raise ConfigError(f"{repository} on the hub has none of {', '.join(files)} at revision {revision}.")
    return found


def _why(repository: str, revision: str, error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        return f"{repository} on the hub has no revision {revision!r}: give a commit, a tag or a branch, such as main."
    cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
    if isinstance(cause, RepositoryNotFoundError):
        return f"the hub has no repository {repository}, or denies you access to it (`hf auth login`)."
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"{repository} at revision {revision} is not cached here, and the hub cannot be reached ({reason}). Where it "
        f"can, call hf download {repository} --revision {revision} --local-dir DIRECTORY, and give DIRECTORY."
    )
