"""What a config says about each module in its file (rank, scale, target or not) and about each other tensor.

Follows the rules of peft 0.21, read in its source and tested against it. Configs here have passed `config_fields`. All
of a config's patterns are matched once, against all names in the file; later code looks the answers up. No tensors and
no files here.

Three settings leave it to the base model whether peft targets a module: target_modules = null (peft looks up the
model's type in its table), "all-linear" (every linear layer except the output), and ensure_weight_tying (also targets
what is tied to a targeted embedding). peft never saves the first two, but the names themselves, so a file that has them
was edited by hand. Without the base, null is refused, all-linear is taken to mean linear layers except heads, and the
reader is told about the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from fedlora.adapters.config_fields import is_adalora
from fedlora.adapters.module_names import may_be_embedding, saved_modules
from fedlora.adapters.patterns import Question, matches
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

ALL_LINEAR = "all-linear"
TOKENS = ".token_adapter.trainable_tokens_delta"
MAGNITUDE = ".lora_magnitude_vector"
# peft saves these modules for a task if the model has them, whatever modules_to_save says.
SAVED_FOR: Mapping[str | None, tuple[str, ...]] = {
    "SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",),
}  # fmt: skip
_TIED = ("embed_tokens", "lm_head")  # names by which peft recognises a targeted embedding
_OUTPUTS = ("lm_head", "embed_out", "generator_lm_head")  # heads of language models, excluded by "all-linear"
_IN_WRAPPER = re.compile(r"(.+?)\.(original_module|modules_to_save)\.")  # inside peft's wrapper of a saved module


@dataclass(frozen=True)
class Resolved:
    """A config with its patterns resolved.

    ranks, alphas: for names matched by a pattern; all others use the config's own. targeted: whether peft would put
    LoRA on a module; None if that depends on the base model.
    """

    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targeted: Mapping[str, bool | None]

    def rank(self, name: str) -> int:
        """r of a module or parameter. For AdaLoRA, the masks decide: see `adalora_ranks`."""
        rank: int = self.ranks.get(name, self.config["r"])
        return rank

    def alpha(self, name: str) -> float:
        alpha: float = self.alphas.get(name, self.config["lora_alpha"])
        return alpha

    def scale(self, name: str, scaling: float) -> float:
        """(the module's own alpha / r, or alpha / sqrt(r) with rsLoRA) / scaling; exactly 1.0 if they are equal."""
        if is_adalora(self.config):  # peft divides by the initial rank plus this
            return float(self.config["lora_alpha"] / (self.config["init_r"] + 1e-5) / scaling)
        r, alpha = self.rank(name), self.alpha(name)
        if self.config.get("use_rslora"):
            return float(alpha / math.sqrt(r) / scaling)
        return 1.0 if alpha == scaling * r else float(alpha / r / scaling)  # in floats (s r) / r may differ from s


def resolve(
    config: Mapping[str, Any], layers: Collection[str], parameters: Collection[str] = (), *, seconds: float = 60.0
) -> Resolved:
    """Everything a config says about its file's modules (layers) and bare parameters, each by the name peft matches.

    seconds: processor time allowed for all patterns.

    Raises:
        AdapterFormatError: `matches` refuses a pattern, or peft refuses the combination.
    """
    names = [*dict.fromkeys(layers), *dict.fromkeys(parameters)]
    count = len(names) - len(set(parameters))
    questions = [Question(field, "end", tuple(config.get(field) or {})) for field in ("rank_pattern", "alpha_pattern")]
    asked = _target_questions(config, count)
    answers = matches([*questions, *asked.values()], names, seconds)
    found: list[dict[str, Any]] = [{}, {}]
    # peft compiles AdaLoRA's patterns but never looks them up.
    for question, answer, values in zip(() if is_adalora(config) else questions, answers, found, strict=False):
        said = config.get(question.field) or {}
        for name, number in zip(names, answer, strict=True):
            if number is not None:
                values[name] = said[question.patterns[number]]
            elif name in said:  # peft's fallback if no pattern matches
                values[name] = said[name]
    told = dict(zip(asked, answers[len(questions) :], strict=True))
    targeted = _targeted(config, names[:count], told)
    return Resolved(config, ReadOnly(found[0]), ReadOnly(found[1]), ReadOnly(targeted))


def adalora_ranks(config: Mapping[str, Any], names: Collection[str]) -> dict[str, int]:
    """Name of a module -> its pair's rank from AdaLoRA's masks, or init_r without a mask
    (`AdaLoraModel.resize_modules_by_rank_pattern`).

    Raises:
        AdapterFormatError: a mask has the wrong length, or names a module that the file lacks.
    """
    start: int = config["init_r"]
    found = dict.fromkeys(names, start)
    for key, mask in (config.get("rank_pattern") or {}).items():
        bare = key.replace(".default", "")
        name = ".".join(bare.split(".")[: -2 if "default" in bare else -1])
        if name not in found:
            raise AdapterFormatError(f"rank_pattern has {quoted(key)}, but the file has no factors of {quoted(name)}.")
        if len(mask) != start:
            raise AdapterFormatError(
                f"rank_pattern has {len(mask)} values for {quoted(key)}, but the rank began with init_r = {start}."
            )
        found[name] = sum(mask)
    return found


# -------------------------------------------------------------------------------------------------------------- targets


def _target_questions(config: Mapping[str, Any], count: int) -> dict[str, Question]:
    """The patterns to match against each module to know whether it is a target."""
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
            found[field] = Question(field, "names", tuple(value), first=count)
    saved = (*(config.get("modules_to_save") or ()), *SAVED_FOR.get(config.get("task_type"), ()))
    found["modules_to_save"] = Question("modules_to_save", "inside", saved, first=count)
    if layers is not None and layers != []:
        lists = (lists,) if isinstance(lists, str) and lists else tuple(lists or ())
        found["layers_pattern"] = Question("layers_pattern", "layer", lists, first=count)
    return found


def _targeted(
    config: Mapping[str, Any], names: Sequence[str], told: Mapping[str, Sequence[int | None]]
) -> dict[str, bool | None]:
    """Whether each module is a target; None if the base model decides and the config does not exclude it."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    by_itself = () if isinstance(targets, str) else set(targets)
    chosen = None if "layers_pattern" not in told else {layers} if isinstance(layers, int) else set(layers or ())
    left, ties = left_to_the_base(config) is not None, ties_targets(config)
    found: dict[str, bool | None] = {}
    for k, name in enumerate(names):
        named = left or told["target_modules"][k] is not None
        if chosen is not None and name not in by_itself:  # a module named in full is a target in any layer
            named = named and told["layers_pattern"][k] in chosen
        says = named and told["exclude_modules"][k] is None and told["modules_to_save"][k] is None
        tied = ties and not says and may_be_embedding(name)
        found[name] = None if tied or (says and left) else says
    return found


def left_to_the_base(config: Mapping[str, Any]) -> str | None:
    """ "all-linear" or "null" if the config says that instead of naming targets; None if it names them."""
    targets = config.get("target_modules")
    if targets is None:
        return "null"
    return ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else None


def ties_targets(config: Mapping[str, Any]) -> bool:
    """Whether modules that the base ties to a targeted embedding also become targets."""
    targets = config.get("target_modules")
    if not config.get("ensure_weight_tying") or ties_saved(config):
        return False
    if isinstance(targets, str):  # a pattern: the base model's names decide
        return True
    return any(name.rpartition(".")[2] in _TIED for name in targets or ())


def ties_saved(config: Mapping[str, Any]) -> bool:
    """Whether peft also saves modules that the base ties to a saved embedding."""
    saved = config.get("modules_to_save") or ()
    return bool(config.get("ensure_weight_tying")) and any(name.rpartition(".")[2] in _TIED for name in saved)


def check_left_to_base(config: Mapping[str, Any], kinds: Mapping[str, str], *, with_base: bool) -> tuple[str, ...]:
    """Notes about modules on which only the base model decides; none if there are no such modules.

    Args:
        kinds: name of each such module -> its pair's layer kind. with_base: the base is consulted later.

    Raises:
        AdapterFormatError: no base model makes peft target one of them, or it depends on a base that is missing here.
    """
    if not kinds:
        return ()
    said, first = left_to_the_base(config), next(iter(kinds))
    if said == ALL_LINEAR:
        for name, kind in kinds.items():
            if kind not in ("linear", "adalora") or name.rpartition(".")[2] in _OUTPUTS:
                raise left_out(name, "all-linear means linear layers, except the output")
    if with_base:
        return ()
    if said == "null":
        raise left_out(
            first,
            "target_modules is null, so the base model's type decides, and there is no base model here (apply and "
            "validate --base have one)",
            "may",
        )
    why = "ensure_weight_tying" if said is None else f"target_modules = {said}"
    return (
        f"with {why}, the base model decides whether peft loads {quoted(first, 120)}"
        f"{f' and {len(kinds) - 1:,} other modules' if len(kinds) > 1 else ''}; fedlora keeps all here. fedlora "
        f"validate --base checks with a base model.",
    )


def left_out(name: str, why: str, may: str = "would") -> AdapterFormatError:
    """The error for factors of a module that peft does not target."""
    return AdapterFormatError(
        f"holds factors of {quoted(name)}, which peft {may} leave out: {why}. Name the modules in target_modules."
    )


# ---------------------------------------------------------------------------------------------------- beside the pairs


def extra_kind(path: str, config: Mapping[str, Any]) -> str | None:
    """What a tensor other than a LoRA pair is, by peft's rules for saving it; None if peft never saves it.

    "head": in modules_to_save. "bias": a trained bias of the base (bias = all, lora_only). "added": lora_bias, part of
    the update and scaled like it. "base": a copy of an embedding or output that peft stores because the vocabulary may
    have been resized, whatever the model calls it; also the original of a saved module, which has no effect unless the
    base ties it to a module that has. "tokens": trained rows of an embedding (trainable_token_indices). "copy": a
    second copy of a saved module, under a name that peft does not read. "magnitude": DoRA's norms of a weight's rows.
    """
    if path.endswith(MAGNITUDE):
        return "magnitude" if config.get("use_dora") else None
    if path.endswith(".lora_B.bias"):
        return "added" if config.get("lora_bias") else None
    if path.endswith(TOKENS):
        return "tokens" if config.get("trainable_token_indices") else None
    names = config.get("modules_to_save") or ()
    held = _IN_WRAPPER.match(path)
    if held and (saved_modules(f"{held[1]}.", names) or (config.get("ensure_weight_tying") and names)):
        return "base" if held[2] == "original_module" else "copy"
    # peft's rule for a saved module: the path ends with its name (need not equal it).
    saved = any(f"{module}." in path for module in names)
    if saved and "lora_" not in path and "base_layer" not in path:
        return "head"
    if path.endswith(".base_layer.bias") and config.get("bias", "none") != "none":
        return "bias"
    if path.endswith(".bias") and config.get("bias") == "all" and "lora_" not in path:
        return "bias"
    if path.endswith((".base_layer.weight", ".base_layer.bias")):
        return "base"
    module, _, last = path.rpartition(".")
    return "base" if last in ("weight", "bias") and may_be_embedding(module) and "lora_" not in path else None


def names_rows(said: Collection[str], module: str) -> list[str]:
    """The names in trainable_token_indices that refer to a module."""
    return [name for name in said if module == name or module.endswith(f".{name}")]


# --------------------------------------------------------------------------------------------------- nested parameters


def parameter_names(module: str, rows: Sequence[int], short: Sequence[str], said: Resolved) -> tuple[str, ...] | None:
    """Which bare parameter of `module` each nested LoRA pair adapts, outermost first; None if there are none.

    Args:
        rows: of each stored A, outermost first: rank times experts. short: the parameters' own names, sorted.

    PEFT nests several parameters of one module in the order in which the model registered them, which the file does not
    record. If the patterns give them different ranks, the shapes identify them; if only alphas differ, nothing does.

    Raises:
        AdapterFormatError: the config names another number of parameters, no order fits the shapes, or several fit and
            mean different updates.
    """
    if not short:
        return None
    if len(short) != len(rows) or len(short) > 6:
        in_full = f"{module.rpartition('.')[2]}.{short[0]}"
        raise AdapterFormatError(
            f"{quoted(module)}: target_parameters names {len(short)} parameters that may be its own "
            f"({quoted(', '.join(short), 80)}), but the file has pairs for {len(rows)} and does not say which. "
            f"Name them with their module: {quoted(in_full, 80)}."
        )
    names = [f"{module}.{name}" for name in short]
    means = {name: (said.rank(name), said.scale(name, 1.0)) for name in names}
    fits = _alike(rows, means) or _any_order(rows, means)
    if not fits:
        raise AdapterFormatError(
            f"{quoted(module)}: its factors have {list(rows)} rows, and no rank in the config fits."
        )
    if len(fits) > 1:
        raise AdapterFormatError(
            f"{quoted(module)}: rank_pattern or alpha_pattern gives its parameters {quoted(', '.join(short))} "
            f"different scalings, and the file does not say which nested factors belong to which. Train them with "
            f"one rank and one alpha."
        )
    return fits[0]


def _alike(rows: Sequence[int], means: Mapping[str, tuple[int, float]]) -> list[tuple[str, ...]]:
    """The order with an equal number of experts for all; two entries if several fit and mean different updates."""
    experts = sum(rows) // sum(r for r, _ in means.values())
    if sorted(rows) != sorted(r * experts for r, _ in means.values()):
        return []
    of = {n: [name for name, (r, _) in means.items() if r * experts == n] for n in rows}
    order = tuple(of[n].pop(0) for n in rows)
    ranks = {r for r, _ in means.values()}
    return [order] * (1 if len(set(means.values())) == len(ranks) else 2)


def _any_order(rows: Sequence[int], means: Mapping[str, tuple[int, float]]) -> list[tuple[str, ...]]:
    """Orders that fit the rows with any number of experts for each, one for each distinct meaning."""
    fits: dict[tuple[tuple[int, float], ...], tuple[str, ...]] = {}
    for order in permutations(means) if len(means) <= 4 else ():  # no model has more, so we do not search further
        if all(n % means[name][0] == 0 for n, name in zip(rows, order, strict=True)):
            fits.setdefault(tuple(means[name] for name in order), order)
    return list(fits.values())
