"""A result's adapter_config.json: what peft needs in it, without any stranger's patterns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedlora.adapters.config_meaning import SAVED_FOR, extra_kind, resolve
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.module_names import Parameters, asked_as, saved_modules
from fedlora.adapters.patterns import is_name
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

_CHOOSING = ("exclude_modules", "layers_to_transform", "layers_pattern")  # fields that exclude some targets


def targets_for(
    config: Mapping[str, Any], modules: Iterable[str], layouts: Mapping[str, Layout], *, apart: bool = True
) -> dict[str, Any]:
    """The spec's own targets if these names cover all of the adapter's modules; otherwise the modules' full paths, so
    that no pattern is written.

    peft treats a list of paths as endings, so `head` also matches `aux.head`. If a module's path has no dot, we
    therefore keep a selection that covers all modules, including its patterns.

    Args:
        apart: modules that the selection excludes because they are saved whole still are.
    """
    parameters = Parameters(config)
    paths = dict.fromkeys(
        stored_path(name) if name not in layouts and stored_path(name) in layouts else name for name in modules
    )
    layers = [path for path in paths if path not in layouts or layouts[path].kind != "parameter"]
    targets = list(dict.fromkeys(asked_as(path, paths, parameters) for path in layers))
    named = config.get("target_modules")
    chosen = any(config.get(field) not in (None, [], (), "") for field in _CHOOSING)
    if not chosen and (not layers and not named):
        return {}
    simple = not chosen and isinstance(named, list | tuple | set)
    ambiguous = any("." not in name for name in targets)
    if apart and named and (simple or ambiguous) and all(resolve(config, targets).targeted.values()):
        return {}
    return {"target_modules": targets, **{field: None for field in _CHOOSING if field in config}}


def saved_modules_for(config: Mapping[str, Any], heads: Sequence[str]) -> dict[str, Any]:
    """modules_to_save for these heads: peft requires every module it names, and reads no other.

    Raises:
        AdapterFormatError: peft would read a saved module's name as a pattern.
    """
    heads = [path for path in heads if extra_kind(path, config) in (None, "head")]
    if not heads:
        # peft adds some tasks' heads to modules_to_save, and would then miss them in the file.
        return {"modules_to_save": None} | ({"task_type": None} if config.get("task_type") in SAVED_FOR else {})
    named = tuple(config.get("modules_to_save") or ())
    outer = {path: saved_modules(path, named)[:1] for path in heads}
    nested = any(len(saved_modules(path, named)) > 1 for path in heads)
    if not nested and all(map(is_name, named)) and all(extra_kind(path, config) == "head" for path in heads):
        return {}
    saved = sorted({found[0] if found else path.rpartition(".")[0] for path, found in outer.items()})
    odd = next((name for name in saved if not is_name(name)), None)
    if odd is not None:
        raise AdapterFormatError(f"the saved module {quoted(odd)} has a name that peft would read as a pattern.")
    return {"modules_to_save": saved}


def extras_for(config: Mapping[str, Any], heads: Sequence[str]) -> dict[str, Any]:
    """The fields that declare tensors other than pairs, matching what the adapter has."""
    kinds = {extra_kind(path, config) for path in heads}
    return {
        "bias": config.get("bias", "none") if "bias" in kinds else "none",
        "lora_bias": "added" in kinds,
        "trainable_token_indices": config.get("trainable_token_indices") if "tokens" in kinds else None,
    }


def alpha_for(scaling: float, r: int) -> float | int:
    alpha = scaling * r
    return int(alpha) if alpha == int(alpha) else alpha
