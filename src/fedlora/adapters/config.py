"""What an adapter_config.json of PEFT means: which modules, at which rank and scaling, saved how - or why not.

Rules of peft 0.21, read in its source and tested against it. No tensors and no files here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

from fedlora.adapters.config_types import check_adalora, check_types
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.loadable import check_fields
from fedlora.adapters.patterns import Question, is_name, matches
from fedlora.adapters.resolved import Parameters, Resolved, asked_as, saved_modules, ties_saved
from fedlora.core.echo import quoted, shown
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
_LARGEST_RANK, LARGEST_SCALE, _SMALLEST_SCALE = 1_000_000, 10_000.0, 1e-6
# Fields that leave out some of the targets.
_CHOOSING = ("exclude_modules", "layers_to_transform", "layers_pattern")
# Initialisations that only choose where A and B start. Others (PiSSA, OLoRA, ...) change the base weights too.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def check_config(config: Mapping[str, Any], *, where: str, in_model: bool = False, allow: Collection[str] = ()) -> None:
    """Raises `AdapterFormatError` unless the config means W0 + s B A relative to the pre-trained weights.

    An unknown field that is null, false or empty is warned about; any other is refused, since it may change the update,
    unless it is one of `allow`. in_model: the adapter is to be trained, which fewer kinds can be than can be read.
    """

    def refuse(field: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{where}: {shown(field)} = {quoted(config.get(field))} is not supported: {why}.")

    ada = is_adalora(config)
    if config.get("peft_type") != "LORA" and (in_model or not ada):
        raise refuse("peft_type", "only LORA adapters can be combined (and ADALORA's read as LORA)")
    for field, why in ({**_REFUSED, **_FILES_ONLY} if in_model else _REFUSED).items():
        if config.get(field):
            raise refuse(field, why)
    if config.get("bias", "none") not in (("none",) if in_model else ("none", "all", "lora_only")):
        raise refuse("bias", "trained biases are no part of B @ A; train with bias='none'")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or init not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            "such an initialisation may change the base weights, and the adapter is then relative to another base; "
            "save it with peft's path_initial_model_for_weight_conversion",
        )
    check_types(config, refuse, in_model=in_model)
    if ada:
        check_adalora(config, refuse)
    if config.get("target_parameters") and config.get("lora_dropout"):
        raise refuse("lora_dropout", "peft takes none beside target_parameters")
    _check_ranks(config, refuse, ada)
    if not in_model:
        check_fields(config, refuse)
    ignored = []
    known = _HARMLESS | _APPLIED | set(_REFUSED) | set(_FILES_ONLY) | (ADALORA_FIELDS if ada else frozenset())
    for field in sorted(set(config) - known - set(allow)):
        if config[field]:
            raise refuse(
                field,
                "the field is unknown (a newer peft?) and may change the update; --allow-unknown takes it as harmless",
            )
        ignored.append(field)
    if ignored:
        first = ", ".join(f"{quoted(field, 80)} = {quoted(config[field], 80)}" for field in ignored[:3])
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        warnings.warn(f"{where}: unknown field {first}{more} is ignored.", stacklevel=3)


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
        by_module = config.get(field, {})
        by_module = {} if by_module is None and ada else by_module
        if not isinstance(by_module, Mapping) or not all(test(value) for value in by_module.values()):
            raise refuse(field, "it must map patterns of module names to positive numbers, whole ones for ranks")
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    ranks = [config["init_r"] if ada else config["r"], *(() if ada else (config.get("rank_pattern") or {}).values())]
    if max(alphas) > LARGEST_SCALE * max(ranks) or min(alphas) < _SMALLEST_SCALE * min(ranks):
        raise refuse(
            "lora_alpha" if max(alphas) == config["lora_alpha"] else "alpha_pattern",
            f"alpha / r is {_SMALLEST_SCALE:g} to {LARGEST_SCALE:,.0f} here; real adapters have 0.1 to 100",
        )


def is_adalora(config: Mapping[str, Any]) -> bool:
    """Whether the adapter is AdaLoRA's, whose update is B diag(E) A."""
    return config.get("peft_type") == "ADALORA"


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_RANK


def _positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < 1e300 and math.isfinite(value)


def check_scaling(scaling: float) -> None:
    if not _positive(scaling):
        raise AdapterFormatError(f"scaling is the adapter's alpha / r, a positive number; got {scaling!r}.")


def relative_scaling(said: Resolved, name: str, scaling: float) -> float:
    """(the module's own alpha / r, or alpha / sqrt(r) with rsLoRA) / scaling; 1.0 exactly where they are the same."""
    if is_adalora(said.config):  # peft divides by the rank that training began with, plus this
        return float(said.config["lora_alpha"] / (said.config["init_r"] + 1e-5) / scaling)
    r, alpha = said.rank(name), said.alpha(name)
    if said.config.get("use_rslora"):
        return float(alpha / math.sqrt(r) / scaling)
    return 1.0 if alpha == scaling * r else float(alpha / r / scaling)  # (s r) / r need not be s in floats


def is_head(path: str, config: Mapping[str, Any]) -> bool:
    """PEFT's rule: a module is saved in full if its path ends with one of modules_to_save (not: equals)."""
    saved = config.get("modules_to_save") or []
    inside = "lora_" in path or "base_layer" in path
    return any(f"{module}." in path for module in saved) and not inside


_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def extra_kind(path: str, config: Mapping[str, Any]) -> str | None:
    """What a tensor beside the LoRA pairs is, by the rules by which peft saves it; None for one that it never saves.

    "head": of modules_to_save. "bias": a trained bias of the base (bias = all, lora_only). "added": lora_bias, part of
    the update and scaled like it. "base": what peft stores of a layer because its vocabulary may have been resized.
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
    if path.endswith((".base_layer.weight", ".base_layer.bias")):
        return "base"
    return ("head" if ties_saved(config) else "base") if path.endswith(_EMBEDDINGS) else None


def parameter_names(module: str, rows: Sequence[int], short: Sequence[str], said: Resolved) -> tuple[str, ...] | None:
    """Which bare parameter of `module` each of its nested LoRA pairs adapts, outermost first; None where none is.

    Args:
        rows: of the stored A, outermost first: rank times experts. short: the parameters' own names, sorted.

    PEFT nests several parameters of one module in the order in which the model registered them, which no file tells.
    Where the patterns give them different ranks, the shapes tell; where only their alphas differ, nothing does.

    Raises:
        AdapterFormatError: the config names another number of parameters, no order fits the shapes, or several do and
            mean different updates.
    """
    if not short:
        return None
    if len(short) != len(rows) or len(short) > 6:
        in_full = f"{module.rpartition('.')[2]}.{short[0]}"
        raise AdapterFormatError(
            f"{quoted(module)}: target_parameters names {len(short)} parameters that may be its own "
            f"({quoted(', '.join(short), 80)}), the file has pairs for {len(rows)}: which are meant it does not "
            f"tell. Name them with their module, as {quoted(in_full, 80)}."
        )
    names = [f"{module}.{name}" for name in short]
    means = {name: (said.rank(name), relative_scaling(said, name, 1.0)) for name in names}
    fits = _alike(rows, means) or _any_order(rows, means)
    if not fits:
        raise AdapterFormatError(
            f"{quoted(module)}: its factors have {list(rows)} rows, which fit no rank that the config gives."
        )
    if len(fits) > 1:
        raise AdapterFormatError(
            f"{quoted(module)}: rank_pattern or alpha_pattern gives its parameters {quoted(', '.join(short))} "
            f"different scalings, and which of the nested factors is whose, the file does not tell. Train them with "
            f"one rank and one alpha."
        )
    return fits[0]


def _alike(rows: Sequence[int], means: Mapping[str, tuple[int, float]]) -> list[tuple[str, ...]]:
    """The order in which all have as many experts; two where several do that mean different updates."""
    experts = sum(rows) // sum(r for r, _ in means.values())
    if sorted(rows) != sorted(r * experts for r, _ in means.values()):
        return []
    of = {n: [name for name, (r, _) in means.items() if r * experts == n] for n in rows}
    order = tuple(of[n].pop(0) for n in rows)
    ranks = {r for r, _ in means.values()}
    return [order] * (1 if len(set(means.values())) == len(ranks) else 2)


def _any_order(rows: Sequence[int], means: Mapping[str, tuple[int, float]]) -> list[tuple[str, ...]]:
    """Orders that fit the rows with some number of experts for each, one for each meaning that they may have."""
    fits: dict[tuple[tuple[int, float], ...], tuple[str, ...]] = {}
    for order in permutations(means) if len(means) <= 4 else ():  # more are not looked for: no model has such
        if all(n % means[name][0] == 0 for n, name in zip(rows, order, strict=True)):
            fits.setdefault(tuple(means[name] for name in order), order)
    return list(fits.values())


def targets_for(config: Mapping[str, Any], modules: Iterable[str], layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """The spec's own targets where they are names that mean all of the adapter's modules; else the modules by their
    full paths. What is written holds no pattern."""
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
    if not chosen and isinstance(named, list | tuple | set):
        asked = Question("target_modules", "names", tuple(named))
        if None not in matches([asked], targets)[0]:
            return {}
    return {"target_modules": targets, **{field: None for field in _CHOOSING if field in config}}


def saved_modules_for(config: Mapping[str, Any], heads: Sequence[str]) -> dict[str, Any]:
    """modules_to_save as the heads need it: peft demands every one that it names, and reads no other.

    Raises:
        AdapterFormatError: a saved module's name would be a pattern to peft.
    """
    heads = [path for path in heads if extra_kind(path, config) in (None, "head")]
    if not heads:
        # peft adds a classifier to modules_to_save for these tasks, and would then miss it in the file.
        classifies = config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS")
        return {"modules_to_save": None} | ({"task_type": None} if classifies else {})
    named = tuple(config.get("modules_to_save") or ())
    outer = {path: saved_modules(path, named)[:1] for path in heads}
    nested = any(len(saved_modules(path, named)) > 1 for path in heads)
    if not nested and all(map(is_name, named)) and all(extra_kind(path, config) == "head" for path in heads):
        return {}
    saved = sorted({found[0] if found else path.rpartition(".")[0] for path, found in outer.items()})
    odd = next((name for name in saved if not is_name(name)), None)
    if odd is not None:
        raise AdapterFormatError(f"the saved module {quoted(odd)} has a name that peft would take for a pattern.")
    return {"modules_to_save": saved}


def extras_for(config: Mapping[str, Any], heads: Sequence[str]) -> dict[str, Any]:
    """The fields that say which tensors lie beside the pairs, as the adapter has them."""
    kinds = {extra_kind(path, config) for path in heads}
    return {
        "bias": config.get("bias", "none") if "bias" in kinds else "none",
        "lora_bias": "added" in kinds,
        "trainable_token_indices": config.get("trainable_token_indices") if "tokens" in kinds else None,
    }


def alpha_for(scaling: float, r: int) -> float | int:
    alpha = scaling * r
    return int(alpha) if alpha == int(alpha) else alpha
