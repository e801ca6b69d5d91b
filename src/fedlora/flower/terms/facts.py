"""Collects facts: from a base model's files before anything is loaded, and from the server's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.lora import LoRA
from fedlora.errors import ConfigError
from fedlora.flower.terms.agreement import ASKED, Disagreement, Facts, check, unsaid, versions_here
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.sections import ModelSection
from fedlora.training.digests import base_digest, template_digest, tokenizer_digest
from fedlora.training.load import model_place, readable, tokenizer_of
from fedlora.training.templates import CHAT

# Keys of a model's configuration that name its location or storage, or that each federation sets itself.
_OWN = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label",
    "label2id", "num_labels", "problem_type", "pad_token_id", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "attn_implementation", "_attn_implementation", "torchscript", "finetuning_task",
    "task_specific_params",
})  # fmt: skip


def model_facts(model: str, settings: FederationSettings) -> Facts:
    """The facts from a base model's files and from the settings. No model is loaded; its weights are read once.

    A site's request holds them: nothing of its data.

    Raises:
        ConfigError: no such model, or files that cannot be read.
    """
    place = ModelSection(path=model).location()
    tokenizer = tokenizer_of(place)
    return Facts(
        base=base_digest(place),
        tokenizer=tokenizer_digest(tokenizer),
        template=_template(settings, tokenizer),
        labels=tuple(settings.data.labels or ()),
        scaling=settings.lora.unit,
        max_length=settings.data.max_length,
        architecture=architecture(place),
        versions=versions_here(),
    )


def targets_of(modules: Mapping[str, LoRA]) -> tuple[str, ...]:
    """An adapter's modules with the shapes of their layers; ranks do not matter."""
    found = []
    for name, lora in modules.items():
        B, A = lora.factors
        found.append(f"{name} {B.shape[0]}x{A.shape[1]}")
    return tuple(sorted(found))


def architecture(model: str | Path) -> dict[str, Any]:
    """The plain values of a model's configuration, by key. {} for a GGUF file: its digest covers everything in it."""
    from transformers import AutoConfig

    if Path(model).is_file():
        return {}
    place = model_place(model)
    with readable(f"the configuration of {str(model)!r} cannot be read"):
        found = AutoConfig.from_pretrained(place).to_dict()
    return dict(sorted(_plain(found, "")))


def _plain(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if str(key) in _OWN or str(key).startswith("_"):
            continue
        if isinstance(value, Mapping):
            yield from _plain(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value


def _template(settings: FederationSettings, tokenizer: Any) -> str:
    """The digest of the model's chat template, if the federation uses it for prompts."""
    own = settings.model.task == "causal-lm" and (settings.data.template or CHAT) == CHAT
    return template_digest(tokenizer) if own else ""


# ---------------------------------------------------------------------------------------------------- at the server


_OF_MODEL = ("base", "tokenizer", "template", "architecture")


def agreed(path: Path) -> Facts:
    """What the server knows about the base model, from agreement.json: nothing is assumed silently, or without it.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Facts.from_table(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Facts()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. It records the base model that the federation has agreed on. Restore it, "
            f"or remove it and admit the sites again, which fills it anew."
        ) from error


def write_agreed(path: Path, known: Facts) -> None:
    """Write agreement.json, all or nothing."""
    files.write(path, json.dumps(known.table(), indent=2, sort_keys=True) + "\n")


def of_model(facts: Facts) -> Facts:
    """Only what is known about the base model."""
    return Facts(**{name: getattr(facts, name) for name in _OF_MODEL})


def server_facts(settings: FederationSettings, known: Facts, modules: Mapping[str, LoRA] | None = None) -> Facts:
    """The facts that the server requires from sites. known: about the base model. modules: of the common start."""
    return replace(
        known,
        labels=tuple(settings.data.labels or ()),
        scaling=settings.lora.unit,
        max_length=settings.data.max_length,
        targets=() if modules is None else targets_of(modules),
        versions=versions_here(),
    )


def admitted(settings: FederationSettings, known: Facts, name: str, facts: Facts) -> tuple[Facts, tuple[str, ...]]:
    """Compares a site's facts with those that are known when the server admits it. Returns what is known then, and the
    names of new facts.

    Raises:
        Disagreement: the site differs from the others, or leaves out facts that must be compared.
    """
    mine = server_facts(settings, known)
    check(mine, facts, name, whole=False)  # reports differences before missing facts
    needed = [fact for fact in ASKED if fact != "labels" or settings.data.labels]
    needed += [fact for fact in ("template", "architecture") if getattr(mine, fact)]
    if silent := unsaid(facts, needed):
        raise Disagreement(
            f"the request of {name!r} does not say its {', '.join(silent)}, and the server assumes nothing. Let the "
            f"site make a new request (fedlora flower site FOLDER --rotate)."
        )
    new = tuple(fact for fact in _OF_MODEL if not getattr(known, fact) and getattr(facts, fact))
    return known.filled(of_model(facts)), new


__all__ = [
    "Disagreement", "admitted", "agreed", "architecture", "model_facts", "of_model", "server_facts",
    "targets_of", "write_agreed",
]  # fmt: skip
