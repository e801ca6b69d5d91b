"""Records what a run was made of: versions, commit, device, and digests of everything it reads."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedlora.core.messages import Client
from fedlora.core.method import Method
from fedlora.data import TextData
from fedlora.data.splits import inputs
from fedlora.methods.registry import package_of, plugins
from fedlora.runs.client_data import Dealt
from fedlora.runs.config import RunConfig
from fedlora.runs.identity import digest, digest_of
from fedlora.runs.private_releases import shown_config
from fedlora.runs.rank_profiles import is_attention
from fedlora.training.digests import model_commit, model_content
from fedlora.training.models import AdaptedModel
from fedlora.training.templates import find_template
from fedlora.versions import installed


def manifest(
    config: RunConfig,
    data: Dealt,
    clients: tuple[Client, ...],
    model: AdaptedModel,
    method: Method[Any],
) -> dict[str, Any]:
    """A run's record. "model" and "data", with "threads", are what its identity includes of what it read."""
    classes, place = range(len(data.classes)), config.model.location()
    counts = {client: [list(part.labels or ()).count(k) for k in classes] for client, part in data.parts.items()}
    commit, adapter, asked = model_commit(place), config.model.adapter, config.model.task == "causal-lm"
    return {
        "config_digest": digest_of(config) if config.privacy is None else digest(shown_config(config)),
        **code_facts([package_of(point) for point in plugins() if point.name == config.method.name]),
        "device": config.model.chosen_device(),
        "threads": torch.get_num_threads(),
        "seed": config.run.seed,
        "model": {
            "name": config.model.name,
            "sha256": model_content(place),
            **({"commit": commit} if commit is not None else {}),
            **({"adapter": model_content(adapter)} if adapter is not None else {}),
        },
        "data": {
            "train": _sizes(data.parts),
            "validation": _size(data.validation),
            "test": _size(data.test),
            "probes": {name: _size(sets) for name, sets in data.probes.items()},
            "own_test": _sizes(data.own_test) if config.clients.test_fraction else {},
            "label_names": list(data.classes),
            "categories": dict(data.categories),
            "label_counts": counts if classes else None,
            "repeated": sum(len(part) - len(set(inputs(part))) for part in data.parts.values()),
            **({"chat_template": find_template(config.data.prompting(), model.tokenizer).name} if asked else {}),
        },
        "clients": {c.id: shown_rank(c) for c in clients},
        "method": repr(method),
    }


def _sizes(parts: Mapping[str, TextData]) -> dict[str, Any]:
    return {name: {"examples": len(part), "sha256": part.digest()} for name, part in parts.items()}


def _size(sets: Mapping[str, TextData]) -> dict[str, Any]:
    return dict(_sizes({"": TextData.concat(list(sets.values()))})[""])


def code_facts(packages: Iterable[str] = ()) -> dict[str, Any]:
    """This machine's library versions, also of these packages, and the checkout's commit. What pip has not installed,
    such as fedlora itself on PYTHONPATH, has no version here."""
    names = ("fedlora", "torch", "transformers", "peft", "numpy", *packages)
    return {
        "versions": {name: found for name in names if (found := installed(name)) is not None},
        "python": platform.python_version(),
        "commit": commit_of_code(),
    }


def shown_rank(client: Client) -> int | str:
    """Its rank, or its ranks in the form "30/200"."""
    if isinstance(client.rank, int):
        return client.rank
    in_order = sorted(client.rank, key=lambda name: not is_attention(name))
    shown = list(dict.fromkeys(client.rank[name] for name in in_order))
    return shown[0] if len(shown) == 1 else "/".join(map(str, shown))


def commit_of_code(code: Path = Path(__file__).parents[1]) -> dict[str, Any] | None:
    """The commit of the checkout with this code, and whether the code is as committed; None outside a checkout. Files
    beside the code may change: an experiment in the checkout stores its own results there."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(code), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"id": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain", "--untracked-files=no", ".")}
    except (OSError, subprocess.CalledProcessError):
        return None


def straddling(dealt: Dealt) -> dict[str, dict[str, int]]:
    """Held-out set -> its number of examples, and how many are copies of a training text. Sets without copies are left
    out.

    Shares drawn from one file have none; several files, and a benchmark's official splits, may have some.
    """
    trained = {one for part in dealt.parts.values() for one in inputs(part)}
    found = {}
    for name, sets in {"validation": dealt.validation, "test": dealt.test, **dealt.probes}.items():
        texts = [one for part in sets.values() for one in inputs(part)]
        if copies := sum(one in trained for one in texts):
            found[name] = {"examples": len(texts), "copies": copies}
    return found
