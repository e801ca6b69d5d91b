"""Models given as a hub id: whether they are cached, and whether the hub is reachable. Asks once, within seconds."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlora.data.demo import HUB_NAMES
from fedlora.data.hub import repository_and_revision, repository_of
from fedlora.errors import ConfigError

SECONDS = 5.0  # for the one request; transformers alone would try each file for half a minute
_OUT = (
    'Give a directory that holds the model, name a packaged one ("demo", "smollm2"), or fetch it where there is a '
    "network (`hf download {model}{at}`) and set HF_HUB_OFFLINE=1 here."
)


def hub_name(model: str) -> str | None:
    """The hub's name for a packaged model, owner/name@revision or a folder in the hub's cache; None for any other."""
    named = repository_and_revision(model)
    return HUB_NAMES.get(model) or (named[0] if named else repository_of(model))


def source(path: str | os.PathLike[str], revision: str | None = None) -> dict[str, Any]:
    """The arguments with which `from_pretrained` finds a model: none for a directory; for a hub id its revision, and
    cache only if the hub cannot be reached.

    Raises:
        ConfigError: the hub cannot be reached and the id is not cached, or the hub has no such model.
    """
    if Path(path).exists():
        return {}
    local = not _on_hub(os.fspath(path), revision)
    return {"local_files_only": local, **({} if revision is None else {"revision": revision})}


@lru_cache(maxsize=32)
def _on_hub(model: str, revision: str | None) -> bool:
    """Whether the hub has it; False if the hub cannot be reached but the cache has it."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    nowhere = f"there is no directory {model!r} beside the config file, which relative paths refer to"
    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(model, revision=revision, timeout=SECONDS)
            return True
        reason = "HF_HUB_OFFLINE is set, and it is not in the cache"
    except HFValidationError as error:
        raise ConfigError(f"the model {model!r} cannot be loaded: {nowhere}, and it is not a hub id.") from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"the model {model!r} has no revision {revision!r} on the hub: model.revision names a commit, a tag or a "
            f"branch of it."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"the model {model!r} cannot be loaded: {nowhere}, and the hub has no such model, or denies you access "
            f"(`hf auth login`)."
        ) from error
    except Exception as error:  # the transport's exceptions change from version to version
        reason = f"the hub cannot be reached ({(str(error) or type(error).__name__).splitlines()[0]})"
    if cached:
        return False
    raise ConfigError(
        f"the model {model!r} cannot be loaded: {nowhere}, so it is a hub id, and {reason}. "
        + _OUT.format(model=model, at="" if revision is None else f" --revision {revision}")
    )
