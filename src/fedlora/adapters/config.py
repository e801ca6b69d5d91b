"""What an adapter_config.json of PEFT means: which modules, at which rank and scaling, saved how - or why not.

Rules of peft 0.21, read in its source and tested against it. No tensors and no files here.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import permutations
from typing import Any

import regex

from fedlora.adapters.layouts import Layout, stored_path
from fedlora.errors import AdapterFormatError

# Fields of adapter_config.json (peft 0.21) that leave the update alone, whatever their value. Those of an
# initialisation stay after peft has converted the adapter to the original base; init_lora_weights says whether it has.
# fmt: off
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "lora_ga_config", "loftq_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
    "fan_in_fan_out", "runtime_config",
))
# Fields that we apply ourselves.
_APPLIED = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
))
# Fields of AdaLoRA: how it was trained, and (init_r) the divisor of its scaling.
ADALORA_FIELDS = frozenset((
    "target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
))
# fmt: on
# Fields that change the update or what it is relative to, with the way out.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA's magnitudes are not linear in the update; merge it into the base model first",
    "use_qalora": "QALoRA pools the inputs of A; not an update B @ A",
    "use_bdlora": "block-diagonal LoRA is not supported yet",
    "alora_invocation_tokens": "aLoRA applies the update to part of the tokens only",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA samples its update",
    "velora_config": "VeLoRA changes how the update is computed",
    "megatron_config": "tensor-parallel layers are not supported",
}
# Fields that files may have, and the models that we train may not.
_FILES_ONLY: Mapping[str, str] = {
    "lora_bias": "it adds a bias to the update; train with lora_bias=False",
    "target_parameters": "LoRA on bare parameters is not trained here; target modules instead",
    "trainable_token_indices": "token embeddings would be trained beside the update",
    "layer_replication": "the base model is another one than its name says; merge it first",
}
_LARGEST_RANK, _LARGEST_SCALE = 1_000_000, 10_000.0
_PATTERN_SECONDS = 3.0  # of CPU time, for all that the patterns of one file are asked; peft's are done in microseconds
_left: ContextVar[list[float] | None] = ContextVar("left", default=None)  # of the file that is being read
# Initialisations that only choose where A and B start. Others (PiSSA, OLoRA, ...) change the base weights too.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def check_config(config: Mapping[str, Any], *, where: str, in_model: bool = False, allow: Collection[str] = ()) -> None:
    """Raises `AdapterFormatError` unless the config means W0 + s B A relative to the pre-trained weights.

    An unknown field that is null, false or empty is warned about; any other is refused, since it may change the update,
    unless it is one of `allow`. in_model: the adapter is to be trained, which fewer kinds can be than can be read.
    """

    def refuse(field: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{where}: {field} = {config.get(field)!r} is not supported: {why}.")

    ada = is_adalora(config)
    if str(config.get("peft_type")).upper().removeprefix("PEFTTYPE.") != "LORA" and (in_model or not ada):
        raise refuse("peft_type", "only LORA adapters can be combined (and ADALORA's read as LORA)")
    for field, why in ({**_REFUSED, **_FILES_ONLY} if in_model else _REFUSED).items():
        if config.get(field):
            raise refuse(field, why)
    if config.get("bias", "none") not in (("none",) if in_model else ("none", "all", "lora_only")):
        raise refuse("bias", "trained biases are no part of B @ A; train with bias='none'")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            "such an initialisation may change the base weights, and the adapter is then relative to another base; "
            "save it with peft's path_initial_model_for_weight_conversion",
        )
    _check_types(config, refuse)
    _check_ranks(config, refuse, ada)
    known = _HARMLESS | _APPLIED | set(_REFUSED) | set(_FILES_ONLY) | (ADALORA_FIELDS if ada else frozenset())
    for field in sorted(set(config) - known - set(allow)):
        if config[field]:
            raise refuse(
                field,
                "the field is unknown (a newer peft?) and may change the update; --allow-unknown takes it as harmless",
            )
        warnings.warn(f"{where}: unknown field {field!r} = {config[field]!r} is ignored.", stacklevel=3)


def _check_types(config: Mapping[str, Any], refuse: Callable[[str, str], AdapterFormatError]) -> None:
    """Fields that name modules are names, or lists of names."""
    for field in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters"):
        value = config.get(field)
        named = isinstance(value, list | tuple | set) and all(isinstance(name, str) for name in value)
        text = isinstance(value, str) and field not in ("modules_to_save", "target_parameters")
        if value is not None and not named and not text:
            raise refuse(field, "it must be a list of names")
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise refuse("base_model_name_or_path", "it must be a name or a path")
    layers = config.get("layers_to_transform")
    listed = layers if isinstance(layers, list | tuple) else [] if layers is None else [layers]
    if not all(isinstance(layer, int) for layer in listed):
        raise refuse("layers_to_transform", "it must be a list of whole numbers")


def _check_ranks(config: Mapping[str, Any], refuse: Callable[[str, str], AdapterFormatError], ada: bool) -> None:
    """r and lora_alpha, and the patterns that replace them for some modules."""
    whole = f"it must be a whole number from 1 to {_LARGEST_RANK:,}"
    for field in ("init_r",) if ada else ("r",):
        if not _is_rank(config.get(field)):
            raise refuse(field, whole)
    if not _positive(config.get("lora_alpha")):
        raise refuse("lora_alpha", "it must be a positive number")
    tests = [("alpha_pattern", _positive)] + ([] if ada else [("rank_pattern", _is_rank)])
    for field, test in tests:
        by_module = config.get(field) or {}
        if not isinstance(by_module, Mapping) or not all(test(value) for value in by_module.values()):
            raise refuse(field, "it must map patterns of module names to positive numbers, whole ones for ranks")
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    if max(alphas) > _LARGEST_SCALE * (config["init_r"] if ada else config["r"]):
        raise refuse("lora_alpha", f"alpha / r is at most {_LARGEST_SCALE:,.0f} here; real adapters have 0.1 to 100")


def is_adalora(config: Mapping[str, Any]) -> bool:
    """Whether the adapter is AdaLoRA's, whose update is B diag(E) A."""
    return str(config.get("peft_type")).upper().removeprefix("PEFTTYPE.") == "ADALORA"


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_RANK


def _positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < 1e300 and math.isfinite(value)


def check_scaling(scaling: float) -> None:
    if not _positive(scaling):
        raise AdapterFormatError(f"scaling is the adapter's alpha / r, a positive number; got {scaling!r}.")


def module_rank(config: Mapping[str, Any], module: str) -> int:
    """r of one module, by rank_pattern. AdaLoRA's follows from its tensors alone: not to be asked here."""
    rank: int = _by_pattern(config, "rank_pattern", module, config["r"])
    return rank


def relative_scaling(config: Mapping[str, Any], module: str, scaling: float) -> float:
    """(the module's own alpha / r, or alpha / sqrt(r) with rsLoRA) / scaling; 1.0 exactly where they are the same."""
    if is_adalora(config):  # peft divides by the rank that training began with, plus this
        return float(config["lora_alpha"] / (config["init_r"] + 1e-5) / scaling)
    r = module_rank(config, module)
    alpha = _by_pattern(config, "alpha_pattern", module, config["lora_alpha"])
    if config.get("use_rslora"):
        return float(alpha / math.sqrt(r) / scaling)
    return 1.0 if alpha == scaling * r else float(alpha / r / scaling)  # (s r) / r need not be s in floats


def _by_pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """PEFT's rule: keys are regular expressions for the end of the module path; the first match in file order wins."""
    for key, value in (config.get(field) or {}).items():
        if _match(rf"(.*\.)?({key})$", module, field) is not None:
            return value
    return default


@contextmanager
def pattern_budget() -> Iterator[None]:
    """All patterns that are matched inside share one time limit."""
    token = _left.set([_PATTERN_SECONDS])
    try:
        yield
    finally:
        _left.reset(token)


@lru_cache(maxsize=20_000)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)  # whose own cache holds 500, and compiles again beyond


def _match(pattern: str, text: str, field: str, *, whole: bool = False) -> Any:
    """The match of a stranger's pattern, in bounded time."""
    left, began = _left.get() or [_PATTERN_SECONDS], time.thread_time()
    try:
        compiled = _compiled(pattern)
        if left[0] <= 0:
            raise TimeoutError
        return (compiled.fullmatch if whole else compiled.match)(text, timeout=left[0])
    except TimeoutError as error:
        raise AdapterFormatError(
            f"{field}: its patterns take more than {_PATTERN_SECONDS:g} s; the last was {pattern[:80]!r} on "
            f"{text[:80]!r}. No pattern of module names needs that: somebody may want to keep this machine busy."
        ) from error
    except (regex.error, RecursionError, OverflowError) as error:
        raise AdapterFormatError(
            f"{field}: the pattern {pattern[:80]!r} is not a regular expression: {error}."
        ) from error
    finally:
        left[0] -= time.thread_time() - began


def is_head(path: str, config: Mapping[str, Any]) -> bool:
    """PEFT's rule: a module is saved in full if its path ends with one of modules_to_save (not: equals)."""
    saved = config.get("modules_to_save") or []
    inside = "lora_" in path or "base_layer" in path
    return any(f"{module}." in path for module in saved) and not inside


_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def extra_kind(path: str, config: Mapping[str, Any]) -> str | None:
    """What a tensor beside the LoRA pairs is, by the rules by which peft saves it; None for one that it never saves.

    "head": of modules_to_save. "bias": a trained bias of the base (bias = all, lora_only). "added": lora_bias, part of
    the update and scaled like it. "base": a weight that peft stores because its vocabulary may have been resized.
    "tokens": the rows of an embedding that were trained (trainable_token_indices).
    """
    if path.endswith(".lora_B.bias"):
        return "added" if config.get("lora_bias") else None
    if path.endswith(".token_adapter.trainable_tokens_delta"):
        return "tokens" if config.get("trainable_token_indices") else None
    if is_head(path, config):
        return "head"
    if path.endswith(".base_layer.bias") and config.get("bias", "none") != "none":
        return "bias"
    if path.endswith(".bias") and config.get("bias") == "all" and "lora_" not in path:
        return "bias"
    plain = path.replace(".base_layer.", ".")
    return "base" if plain.endswith(_EMBEDDINGS) or path.endswith(".base_layer.weight") else None


def parameter_names(module: str, rows: Sequence[int], config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Which bare parameter of `module` each of its nested LoRA pairs adapts, outermost first; None where none is.

    Args:
        rows: of the stored A, outermost first: rank times experts.

    PEFT nests several parameters of one module in the order in which the model registered them, which no file tells.
    Where the patterns give them different ranks, the shapes tell; where only their alphas differ, nothing does.

    Raises:
        AdapterFormatError: the config names another number of parameters, no order fits the shapes, or several do and
            mean different updates.
    """
    short = sorted({name.rpartition(".")[2] for name in config.get("target_parameters") or [] if _is_of(name, module)})
    if not short:
        return None
    if len(short) != len(rows) or len(short) > 6:
        raise AdapterFormatError(
            f"{module!r}: target_parameters names {len(short)} of its parameters, the file has pairs for {len(rows)}."
        )
    fits: dict[tuple[tuple[int, float], ...], tuple[str, ...]] = {}
    alike: dict[tuple[tuple[int, float], ...], tuple[str, ...]] = {}
    for order in permutations(f"{module}.{name}" for name in short):
        ranks = [module_rank(config, name) for name in order]
        if all(n % r == 0 for n, r in zip(rows, ranks, strict=True)):
            means = tuple((r, relative_scaling(config, name, 1.0)) for name, r in zip(order, ranks, strict=True))
            fits.setdefault(means, order)
            if len({n // r for n, r in zip(rows, ranks, strict=True)}) == 1:  # as many experts in each
                alike.setdefault(means, order)
    fits = alike or fits
    if not fits:
        raise AdapterFormatError(
            f"{module!r}: its factors have {list(rows)} rows, which fit no rank that the config gives."
        )
    if len(fits) > 1:
        raise AdapterFormatError(
            f"{module!r}: rank_pattern or alpha_pattern gives its parameters {', '.join(short)} different scalings, "
            f"and which of the nested factors is whose, the file does not tell. Train them with one rank and one alpha."
        )
    return next(iter(fits.values()))


def _is_of(parameter: str, module: str) -> bool:
    owner = parameter.rpartition(".")[0]
    return bool(owner) and f".{module}".endswith(f".{owner}")


def targets_for(config: Mapping[str, Any], modules: Iterable[str], layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """The spec's own targets where they mean all of the adapter's modules; else the modules by their full paths."""
    paths = dict.fromkeys(name if name in layouts else stored_path(name) for name in modules)
    layers = [path for path in paths if path not in layouts or layouts[path].kind != "parameter"]
    if all(_is_targeted(path, config) for path in layers):
        return {}
    nothing = dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    return {"target_modules": layers, **nothing}


def _is_targeted(module: str, config: Mapping[str, Any]) -> bool:
    """PEFT's rule for whether a config puts LoRA on `module`."""

    def named(names: str | Sequence[str]) -> bool:
        if isinstance(names, str):
            return _match(names, module, "target_modules or exclude_modules", whole=True) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    if not named(config.get("target_modules") or ()) or named(config.get("exclude_modules") or ()):
        return False
    layers = config.get("layers_to_transform")
    if layers is None:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    asked = [rf"(?:^|.*?\.){p}\.(?P<layer_index>\d+)\." for p in _listed(patterns)]
    found = [_match(pattern, module, "layers_pattern") for pattern in asked]
    index = next((int(m["layer_index"]) for m in found if m and m["layer_index"]), None)
    return index is not None and index in _listed(layers)


def saved_modules_for(config: Mapping[str, Any], heads: Sequence[str]) -> dict[str, Any]:
    """modules_to_save as the heads need it: peft demands every one that it names, and reads no other."""
    heads = [path for path in heads if extra_kind(path, config) in (None, "head")]
    if not heads:
        # peft adds a classifier to modules_to_save for these tasks, and would then miss it in the file.
        classifies = config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS")
        return {"modules_to_save": None} | ({"task_type": None} if classifies else {})
    if all(is_head(path, config) for path in heads):
        return {}
    return {"modules_to_save": sorted({path.rpartition(".")[0] for path in heads})}


def extras_for(config: Mapping[str, Any], heads: Sequence[str]) -> dict[str, Any]:
    """The fields that say which tensors lie beside the pairs, as the adapter has them."""
    kinds = {extra_kind(path, config) for path in heads}
    return {
        "bias": config.get("bias", "none") if "bias" in kinds else "none",
        "lora_bias": "added" in kinds,
        "trainable_token_indices": config.get("trainable_token_indices") if "tokens" in kinds else None,
    }


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, str | int) else value


def alpha_for(scaling: float, r: int) -> float | int:
    alpha = scaling * r
    return int(alpha) if alpha == int(alpha) else alpha
