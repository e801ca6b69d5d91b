"""What a config says of each module and parameter of its file: rank, alpha, targeted or not, by the rules of peft 0.21.

All patterns of a config are asked once, for all names of the file; what follows looks the answers up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlora.adapters.embedding_names import may_be_embedding
from fedlora.adapters.patterns import PatternLimits, Question, matches
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError

_BASE_LAYER = ".base_layer"
_WRAPPERS = ("base_layer", "token_adapter")
ALL_LINEAR = "all-linear"
CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS")  # tasks for which peft saves these, whatever modules_to_save says
CLASSIFIERS = ("classifier", "score")
_TIED = ("embed_tokens", "lm_head")  # by which peft knows that an embedding is targeted
_MOST_PARAMETERS = 6  # of one module


@dataclass(frozen=True)
class Resolved:
    """A config with its patterns answered.

    ranks, alphas: of the names that a pattern says one for; the others have the config's own. targeted: whether peft
    would put LoRA on a module; None for one that the config leaves to the base model (`open_targets`).
    """

    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targeted: Mapping[str, bool | None]

    def rank(self, name: str) -> int:
        """r of a module or parameter. AdaLoRA's follows from its tensors alone: not to be asked here."""
        rank: int = self.ranks.get(name, self.config["r"])
        return rank

    def alpha(self, name: str) -> float:
        alpha: float = self.alphas.get(name, self.config["lora_alpha"])
        return alpha


def resolve(
    config: Mapping[str, Any],
    layers: Collection[str],
    parameters: Collection[str] = (),
    *,
    patterns: bool = True,
    limits: PatternLimits | None = None,
) -> Resolved:
    """All that a config says of its file's modules (layers) and of bare parameters, each by the name peft asks with.

    patterns: whether ranks and alphas are looked up. AdaLoRA's are not; peft compiles their patterns all the same.

    Raises:
        AdapterFormatError: patterns that `re` does not take, that do not end, or that peft itself refuses together.
    """
    names = [*dict.fromkeys(layers), *dict.fromkeys(parameters)]
    count = len(names) - len(set(parameters))
    questions = [Question(field, "end", tuple(config.get(field) or {})) for field in ("rank_pattern", "alpha_pattern")]
    asked = _target_questions(config, count)
    answers = matches([*questions, *asked.values()], names, limits)
    found: list[dict[str, Any]] = [{}, {}]
    for question, answer, values in zip(questions if patterns else (), answers, found, strict=False):
        said = config.get(question.field) or {}
        for name, number in zip(names, answer, strict=True):
            if number is not None:
                values[name] = said[question.patterns[number]]
            elif name in said:  # which peft looks up where no pattern matches
                values[name] = said[name]
    told = dict(zip(asked, answers[len(questions) :], strict=True))
    targeted = _targeted(config, names[:count], told)
    return Resolved(config, ReadOnly(found[0]), ReadOnly(found[1]), ReadOnly(targeted))


# -------------------------------------------------------------------------------------------------------------- targets


def _target_questions(config: Mapping[str, Any], count: int) -> dict[str, Question]:
    """What is asked of each module to know whether it is a target."""
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    lists = config.get("layers_pattern")
    if isinstance(targets, str) and (layers is not None or lists is not None):
        raise AdapterFormatError(
            "target_modules is a pattern, and layers_to_transform or layers_pattern is given too: peft refuses that. "
            "Name the modules."
        )
    if lists and layers is None:
        raise AdapterFormatError(f"layers_pattern = {lists!r} without layers_to_transform: peft refuses that.")
    found = {}
    for field in ("target_modules", "exclude_modules"):
        value = config.get(field) or ()
        if isinstance(value, str):
            found[field] = Question(field, "whole", (value,), first=count)
        else:
            found[field] = Question(field, "end", tuple(value), exact=True, first=count)
    saved = tuple(config.get("modules_to_save") or ())
    if config.get("task_type") in CLASSIFYING:
        saved += CLASSIFIERS
    found["modules_to_save"] = Question("modules_to_save", "inside", saved, first=count)
    if _chosen(layers):
        found["layers_pattern"] = Question("layers_pattern", "layer", tuple(_listed(lists or ())), first=count)
    return found


def _targeted(
    config: Mapping[str, Any], names: Sequence[str], told: Mapping[str, Sequence[int | None]]
) -> dict[str, bool | None]:
    """Whether each module is a target; None where the base model decides, and nothing that it says can exclude it."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    by_itself = () if isinstance(targets, str) else set(targets)
    chosen = set(_listed(layers)) if _chosen(layers) else None
    left, ties = left_to_the_base(config) is not None, _ties_targets(config)
    found: dict[str, bool | None] = {}
    for k, name in enumerate(names):
        named = left or told["target_modules"][k] is not None
        if chosen is not None and name not in by_itself:  # a module named in full is one whatever its layer
            named = named and told["layers_pattern"][k] in chosen
        says = named and told["exclude_modules"][k] is None and told["modules_to_save"][k] is None
        tied = ties and not says and may_be_embedding(name)
        found[name] = None if tied or (says and left) else says
    return found


def left_to_the_base(config: Mapping[str, Any]) -> str | None:
    """What the config says instead of targets, "all-linear" or "null"; None where it names them."""
    targets = config.get("target_modules")
    if targets is None:
        return "null"
    return ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else None


def _ties_targets(config: Mapping[str, Any]) -> bool:
    """Whether what the base model ties to a targeted embedding becomes a target too, named or not."""
    targets = config.get("target_modules")
    if not config.get("ensure_weight_tying") or ties_saved(config):
        return False
    if isinstance(targets, str):  # a pattern: the base model's names decide
        return True
    return any(name.rpartition(".")[2] in _TIED for name in targets or ())


def ties_saved(config: Mapping[str, Any]) -> bool:
    """Whether peft saves what the base model ties to a saved embedding too, named or not."""
    saved = config.get("modules_to_save") or ()
    return bool(config.get("ensure_weight_tying")) and any(name.rpartition(".")[2] in _TIED for name in saved)


def _chosen(layers: Any) -> bool:
    return layers is not None and layers != []


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, str | int) else value


# ---------------------------------------------------------------------------------------------------------------- names


class Parameters:
    """The bare parameters that target_parameters names, by the module that has them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._by_owner: dict[str, set[str]] = {}
        for name in config.get("target_parameters") or ():
            owner, _, short = name.rpartition(".")
            self._by_owner.setdefault(owner, set()).add(short)

    def of(self, module: str, pairs: int | None = None) -> list[str]:
        """Their own names, sorted: ["down", "up"]. A name without a module means that of any module that has one.

        pairs: how many of them the file has at the module. Where so many are named with it, those without a module are
        another one's: peft makes "all-linear" ["gate.weight", "gate_up_proj", "down_proj"] of a mixture of experts.
        """
        found: set[str] = set()
        begin = 0
        while self._by_owner and begin <= len(module):
            found |= self._by_owner.get(module[begin:], set())
            begin = module.find(".", begin) + 1 or len(module) + 1
        return sorted(found if len(found) == pairs else found | self._by_owner.get("", set()))


def asked_as(path: str, paths: Collection[str], parameters: Parameters) -> str:
    """The name by which peft asks for the module whose pair is stored at `path`.

    Without the .base_layer that wrapping puts into paths. A projection inside an attention (X.base_layer.out_proj) is
    asked as the attention X, one of `paths` itself; inside a module whose bare parameters are wrapped, as itself.
    """
    outer = path.rpartition(f"{_BASE_LAYER}.")[0]
    if outer in paths and not parameters.of(plain(outer)):
        return asked_as(outer, paths, parameters)
    return plain(path)


def plain(path: str) -> str:
    """The base model's own name of a module or tensor: without what peft's wrapping put into it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def wrapped(name: str, wraps: Mapping[str, Sequence[str]]) -> str:
    """The inverse: the stored name of a base tensor. wraps: module -> what wrapping it puts behind its name."""
    parts: list[str] = []
    for k, part in enumerate(names := name.split(".")):
        parts += [part, *wraps.get(".".join(names[: k + 1]), ())]
    return ".".join(parts)


def saved_modules(path: str, names: Collection[str]) -> list[str]:
    """The modules around a tensor that modules_to_save means, outermost first, by peft's rule: their paths end so."""
    around = [path[:k] for k, letter in enumerate(path) if letter == "."]
    return [module for module in around if names and module.endswith(tuple(names))]


def candidates(modules: Iterable[str], parameters: Parameters) -> list[str]:
    """The full names of all parameters that pairs stored at modules may mean."""
    return [f"{module}.{short}" for module in modules for short in parameters.of(module)[: _MOST_PARAMETERS + 1]]


def check_names(pairs: Collection[str], parameters: Parameters) -> None:
    """Raises `AdapterFormatError` where two stored names mean one module, or one may be taken for another."""
    found: dict[str, list[str]] = {}
    for path in pairs:
        if path.endswith("]") and path.rpartition("[")[2][:-1].isdecimal():
            raise AdapterFormatError(f"module {path!r} is named as an expert is here: PATH[e] of a parameter at PATH.")
        found.setdefault(plain(path), []).append(path)
    for module, paths in found.items():
        nested = [min(paths) + _BASE_LAYER * k for k in range(len(paths))]
        if len(paths) > 1 and (not parameters.of(module) or sorted(paths) != nested):
            raise AdapterFormatError(
                f"module {module!r} has several pairs of factors, at {paths[0]!r} and {paths[1]!r}, which only the "
                f"parameters of one module have, each in the next one's base_layer."
            )
