"""Whether an adapter's base model is the one at hand, judged by names and, if these differ, by digests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fedlora.adapters.agreement import base_weights
from fedlora.adapters.base_names import KNOWN_WEIGHTS, is_path, is_quantised
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.base_folder import BaseFiles
from fedlora.core.text import quoted
from fedlora.data.hub_folders import repository_of


def relation(file: AdapterFile, base: BaseFiles) -> Iterator[str]:
    """One line if the two names differ and nothing shows that they mean one model, or the adapter's is quantised."""
    trained_on, own = file.base_model, name_of(base)
    if trained_on and is_quantised(trained_on):
        yield (
            f"the adapter names a quantised base, {quoted(trained_on, 120)}: the result has the weights of this one, "
            f"which differ from those by rounding."
        )
    elif trained_on and named(file, base) != trained_on:
        yield (
            f"warning: the adapter was trained on {quoted(trained_on, 120)}, but this base model calls itself "
            f"{quoted(own, 120)}: the shapes fit, but it may be another model."
        )
    elif trained_on and _nothing_to_compare(file, base):
        yield (
            f"the adapter was trained on {quoted(trained_on, 120)}, and the config.json of this base model names none: "
            f"the shapes fit, and nothing else could be compared."
        )


def named(file: AdapterFile, base: BaseFiles) -> str | None:
    """What to call the base at hand: as the adapter does, unless it may be another model. A base without a name may be
    any repository of the hub; but its folder's name counts against a path, and digests against everything."""
    trained_on, own = file.base_model, name_of(base)
    if not trained_on or is_quantised(trained_on) or _last(trained_on) == _last(own):
        return trained_on
    return trained_on if _nothing_to_compare(file, base) or _surely_one(file, base, trained_on) else own


def _nothing_to_compare(file: AdapterFile, base: BaseFiles) -> bool:
    """Whether the adapter names a repository of the hub and no digests, and the base at hand has no name."""
    trained_on, own = file.base_model or "", name_of(base)
    unlike = own == base.home.name and _last(trained_on) != _last(own)
    return unlike and "/" in trained_on and not is_path(trained_on) and not base_weights(file)


def name_of(base: BaseFiles) -> str:
    """What a base model calls itself; else the name of its folder."""
    own = base.config.get("_name_or_path")
    return own if isinstance(own, str) and own else repository_of(base.home) or base.home.name


def _surely_one(file: AdapterFile, base: BaseFiles, trained_on: str) -> bool:
    """Whether it is this directory under another name, or the same weights."""
    if is_path(trained_on) and Path(os.path.realpath(trained_on)) == base.home:
        return True
    known_digests, here = base_weights(file), base.digests()
    known = KNOWN_WEIGHTS.get(next(iter(here.values()))) if len(here) == 1 else None
    return known_digests == here if known_digests else known is not None and _last(known) == _last(trained_on)


def _last(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()
