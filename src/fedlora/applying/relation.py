"""Whether an adapter's base model is the one at hand, judged by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fedlora.adapters.base_names import Base, is_quantised, is_same_base
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.base_folder import BaseFiles
from fedlora.core.text import quoted
from fedlora.data.hub_folders import repository_of


def relation(file: AdapterFile, base: BaseFiles) -> Iterator[str]:
    """One line if the two names differ or cannot be compared, or the adapter's is of a quantised model."""
    trained_on, other = file.base_model, _other_name(file, base)
    if not trained_on:
        return
    if is_quantised(trained_on):
        yield (
            f"the adapter names a quantised base, {quoted(trained_on, 120)}: the result has the weights of this one, "
            f"which differ from those by rounding."
        )
    elif other is not None:
        yield (
            f"warning: the adapter was trained on {quoted(trained_on, 120)}, but this base model calls itself "
            f"{quoted(other, 120)}: the shapes fit, but it may be another model."
        )
    elif _own_name(base) is None and not _is_folder(trained_on, base):
        yield (
            f"the adapter was trained on {quoted(trained_on, 120)}, and the config.json of this base model names none: "
            f"the shapes fit, and nothing else could be compared."
        )


def named(file: AdapterFile, base: BaseFiles) -> str | None:
    """What to call the base at hand: as the adapter does, unless the base has another name."""
    return _other_name(file, base) or file.base_model


def _other_name(file: AdapterFile, base: BaseFiles) -> str | None:
    """The base's own name, if it is not the one that the adapter was trained on."""
    trained_on, own = file.base_model, _own_name(base)
    if not trained_on or own is None or is_quantised(trained_on) or _is_folder(trained_on, base):
        return None
    return None if is_same_base(Base(trained_on), Base(own)) else own


def _own_name(base: BaseFiles) -> str | None:
    """What a base model calls itself, or the hub's name of a folder in its cache."""
    own = base.config.get("_name_or_path")
    return own if isinstance(own, str) and own else repository_of(base.home)


def _is_folder(name: str, base: BaseFiles) -> bool:
    return os.path.realpath(name) == str(base.home)
