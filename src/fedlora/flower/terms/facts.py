"""Collects facts: from a site's files before it loads anything, from a loaded trainer, and from the server's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.lora import LoRA
from fedlora.errors import ConfigError
from fedlora.flower.terms.agreement import ASKED, Disagreement, Facts, check, unsaid, versions_here
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.sections import ModelSection
from fedlora.training.content import base_digest, model_place, template_digest, tokenizer_digest, tokenizer_of
from fedlora.training.prompting import CHAT

# Keys of a model's configuration that name its location or storage, or that each federation sets itself.
_OWN = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label",
    "label2id", "num_labels", "problem_type", "pad_token_id", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "attn_implementation", "_attn_implementation", "torchscript", "finetuning_task",
    "task_specific_params",
})  # fmt: skip


def model_facts(model: str, settings: FederationSettings, cache: Path | None = None) -> Facts:
    """The facts from a base model's files and from the settings. No model is loaded; its weights are read once.

    A site's request holds them: nothing of its data. cache: a file that remembers the digest of the weights.

    Raises:
        ConfigError: no such model, or files that cannot be read.
    """
    place = ModelSection(path=model).location()
    tokenizer = tokenizer_of(place)
    return Facts(
        base=base_digest(place, cache),
        tokenizer=tokenizer_digest(tokenizer),
        template=_template(settings, tokenizer),
        labels=tuple(settings.data.labels or ()),
        scaling=settings.lora.unit,
        max_length=settings.data.max_length,
        architecture=architecture(place),
        versions=versions_here(),
    )


def loaded_facts(prepared: Any, settings: FederationSettings, cache: Path | None = None) -> Facts:
    """The facts of a loaded trainer (`runs.preparation.Prepared`): what it actually trains with."""
    config, model = prepared.config, prepared.model
    label_names = next(iter(prepared.parts.values())).label_names
    return Facts(
        base=base_digest(config.model.location(), cache),
        tokenizer=tokenizer_digest(model.tokenizer),
        template=_template(settings, model.tokenizer),
        labels=label_names,
        scaling=model.settings.unit,
        max_length=config.data.max_length,
        targets=targets_of(prepared.seed_adapter.modules),
        architecture=architecture(config.model.location()),
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

    place = model_place(model)
    if place.is_file():
        return {}
    try:
        found = AutoConfig.from_pretrained(place).to_dict()
    except Exception as error:  # a damaged config.json raises many kinds of errors, in several libraries
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the configuration of {str(model)!r} cannot be read: {reason}") from error
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


@dataclass(frozen=True)
class Agreement:
    """What the server knows about the base model, and from whom. It is written to a file, never assumed silently.

    sources: field of `facts` -> "the server's own model", or "request of acme".
    """

    facts: Facts = field(default_factory=Facts)
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Agreement:
        """Reads agreement.json; without the file, an agreement that knows nothing. Raises `ConfigError`."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(Facts.from_table(raw["facts"]), dict(raw["sources"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. It records the base model that the federation has agreed on. Restore "
                f"it, or remove it and admit the sites again, which fills it anew."
            ) from error

    def write(self, path: Path) -> None:
        """Write agreement.json, all or nothing."""
        table = {"facts": self.facts.table(), "sources": dict(self.sources)}
        files.write(path, json.dumps(table, indent=2, sort_keys=True) + "\n")

    def with_(self, facts: Facts, source: str) -> tuple[Agreement, tuple[str, ...]]:
        """The agreement with the facts that only `source` knows so far, and the names of these facts."""
        known = Facts(**{name: getattr(facts, name) for name in _OF_MODEL})
        new = tuple(name for name in _OF_MODEL if not getattr(self.facts, name) and getattr(known, name))
        sources = {**self.sources, **dict.fromkeys(new, source)}
        return Agreement(self.facts.filled(known), sources), new


_OF_MODEL = ("base", "tokenizer", "template", "architecture")


def server_facts(
    settings: FederationSettings, agreement: Agreement, modules: Mapping[str, LoRA] | None = None
) -> Facts:
    """The facts that the server requires from sites. modules: of the common start."""
    return replace(
        agreement.facts,
        labels=tuple(settings.data.labels or ()),
        scaling=settings.lora.unit,
        max_length=settings.data.max_length,
        targets=() if modules is None else targets_of(modules),
        versions=versions_here(),
    )


def admitted(
    settings: FederationSettings, agreement: Agreement, name: str, facts: Facts
) -> tuple[Agreement, tuple[str, ...], tuple[str, ...]]:
    """Compares a site's facts with the agreement when the server admits it. Returns the agreement with the new facts,
    the names of these facts, and the differences worth a line.

    Raises:
        Disagreement: the site differs from the agreement, or leaves out facts that must be compared.
    """
    mine = server_facts(settings, agreement)
    told = check(mine, facts, name, whole=False)  # reports differences before missing facts
    needed = [fact for fact in ASKED if fact != "labels" or settings.data.labels]
    needed += [fact for fact in ("template", "architecture") if getattr(mine, fact)]
    if silent := unsaid(facts, needed):
        raise Disagreement(
            f"the request of {name!r} does not say its {', '.join(silent)}, and the server assumes nothing. Let the "
            f"site make a new request (fedlora flower site FOLDER --rotate)."
        )
    unknown = [package for package in mine.versions if not facts.versions.get(package)]
    told += tuple(f"{name} does not say its version of {package}" for package in unknown)
    after, new = agreement.with_(facts, f"request of {name}")
    return after, new, told


__all__ = [
    "Agreement", "Disagreement", "admitted", "architecture", "loaded_facts", "model_facts", "server_facts",
    "targets_of",
]  # fmt: skip
