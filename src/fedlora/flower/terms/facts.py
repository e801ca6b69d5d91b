"""The facts that server and sites must share: with another base model, renamed classes or another version, training
would run without an error, but its result would be worthless.

The server's facts travel in join.toml and with every train message; a node compares them with its own before it trains,
and sends its own with every reply. All are flat, name -> digest or value, and compared alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from fedlora import __version__
from fedlora.core import files
from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted, shown
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.terms import PROTOCOL
from fedlora.flower.terms.settings import FederationSettings
from fedlora.versions import installed

Plain = str | int | float | bool
_MOST = 2000  # facts
_WATCHED = ("torch", "transformers", "peft")  # another major version is refused
_VERSIONS = ("protocol", "fedlora", *_WATCHED)
_OF_MODEL = ("base", "tokenizer", "template")  # and all that begin with "config."

# What to do about a difference, by the fact's name up to its first dot.
_HINTS = {
    "base": "adapters of one base model mean nothing on another. Point [model] name in site.toml at a copy of the "
            "server's files (another revision, precision or quantisation is another model)",
    "tokenizer": "the same text becomes other tokens. Copy tokenizer.json and tokenizer_config.json with the model",
    "template": "prompts would stand in another frame. Copy the chat template with the tokenizer, or let "
    "data.chat_template "
                "name one",
    "labels": "class k must be the k-th name everywhere. They come from data.label_names in the server's "
    "federation.toml",
    "config": "copy the server's config.json with its weights",
    "targets": "both sides take lora.target_modules of federation.toml, so their base models have different shapes, or "
    "the "
               "common start belongs to another model",
    "protocol": "install one version of fedlora on both sides",
}  # fmt: skip
_SETTING = "it comes from the server's federation.toml"

# Keys of a model's configuration that name its location or storage, or that each federation sets itself.
_OWN = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label",
    "label2id", "num_labels", "problem_type", "pad_token_id", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "attn_implementation", "_attn_implementation", "torchscript", "finetuning_task",
    "task_specific_params",
})  # fmt: skip


class Disagreement(FedLoRAError, ValueError):
    """A site and its server differ in facts that they must share. The message names both sides."""


@dataclass(frozen=True)
class Facts:
    """One side's facts; what it does not know is missing.

    base, tokenizer, template: SHA-256 of the base model's weights, of its tokenizer's behaviour, and of its chat
    template if the federation uses that. labels: the classes in order, as JSON. scaling: alpha / r, or its replacement.
    max_length: in tokens. targets: all adapted modules with their shapes, as a count and a digest. config.KEY: the base
    model's configuration. protocol, fedlora, torch, transformers, peft: versions.

    Example:
        >>> differences(Facts({"max_length": 128}), Facts({"max_length": 64}))[0].split(":")[0]
        'max_length is 128 at the server, and 64 at this site'
    """

    values: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The base model's digest, or ""."""
        return str(self.values.get("base", ""))

    def text(self) -> str:
        """The facts as canonical JSON, for a message."""
        return json.dumps(dict(self.values), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Facts:
        """Facts from a message; "" knows nothing. Raises `Disagreement`."""
        try:
            return cls.of(json.loads(text)) if text else cls()
        except (ValueError, RecursionError) as error:
            raise Disagreement(f"the other side's facts cannot be read: {shown(error, 200)}.") from error

    @classmethod
    def of(cls, table: Any) -> Facts:
        """Facts from plain values that the other side wrote. Raises `Disagreement`."""
        if not isinstance(table, Mapping) or len(table) > _MOST:
            raise Disagreement(f"the other side's facts are no table of at most {_MOST} values.")
        for name, value in table.items():
            if not isinstance(value, str | int | float):
                raise Disagreement(f"the other side's facts cannot be read: {shown(name, 40)} = {quoted(value, 60)}.")
        return cls(ReadOnly(table))

    def and_these(self, **values: Plain) -> Facts:
        """With further facts; what is empty is not known."""
        return Facts(ReadOnly({**self.values, **{name: value for name, value in values.items() if value != ""}}))


# ---------------------------------------------------------------------------------------------------------- comparing


def check(server: Facts, site: Facts, name: str = "this site", *, whole: bool = True) -> None:
    """Raises `Disagreement` if the two may not work together. whole: the site must know everything that the server
    knows, like a site that trains; otherwise facts that one side does not know are not compared."""
    if wrong := differences(server, site, name, whole=whole):
        raise Disagreement("; ".join(wrong) + ".")


def differences(server: Facts, site: Facts, name: str = "this site", *, whole: bool = False) -> list[str]:
    """A sentence for each difference: both sides' values, and what to do. name: the site's, in sentences."""
    ours, theirs, said = server.values, site.values, []
    needed = [fact for fact in ours if fact not in _WATCHED and fact not in theirs]
    if whole and needed:
        said.append(f"{name} does not say its {', '.join(shown(fact, 40) for fact in needed[:5])}")
    apart = [fact for fact in ours if fact in theirs and not _alike(fact, ours[fact], theirs[fact])]
    for fact in apart[:6]:
        hint = _HINTS.get(fact.split(".")[0], _SETTING)
        if fact in _VERSIONS[1:]:
            hint = f"these do not work together: install the server's at {name}"
        both = f"is {_value(ours[fact])} at the server, and {_value(theirs[fact])} at {name}"
        said.append(f"{shown(fact, 60)} {both}: {hint}")
    return [*said, *([f"and {len(apart) - 6} more"] if len(apart) > 6 else [])]


def _alike(fact: str, ours: Plain, theirs: Plain) -> bool:
    """Whether two values work together: of a library its major version, of fedlora major and minor."""
    if fact == "protocol" or fact not in _VERSIONS:
        return ours == theirs
    parts = 2 if fact == "fedlora" else 1
    return _number_of(str(ours))[:parts] == _number_of(str(theirs))[:parts]


def _number_of(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13, 0); () for what is no version."""
    try:
        return Version(text).release
    except ValueError:  # also for a number with too many digits for Python
        return ()


def _value(value: Plain) -> str:
    """A fact in words: of a digest the beginning."""
    text = shown(value, 200)
    return f"{text[:12]}..." if len(text) == 64 and text.isalnum() else text


# ---------------------------------------------------------------------------------------------------------- gathering


def versions_here() -> dict[str, Plain]:
    """The versions on this machine."""
    found = {name: installed(name) for name in _WATCHED}  # a torch built by hand has no version here
    return {"protocol": PROTOCOL, "fedlora": __version__, **{name: at for name, at in found.items() if at is not None}}


def model_facts(model: str, settings: FederationSettings, revision: str | None = None) -> Facts:
    """The facts from a base model's files and from the settings: nothing of anybody's data. No model is loaded; its
    weights are read once.

    Raises:
        ConfigError: no such model, or files that cannot be read.
    """
    from fedlora.runs.sections import ModelSection
    from fedlora.training.digests import base_digest, template_digest, tokenizer_digest
    from fedlora.training.load import tokenizer_of
    from fedlora.training.templates import CHAT

    place = ModelSection(name=model, revision=revision).location()
    tokenizer = tokenizer_of(place)
    chats = settings.model.task == "causal-lm" and (settings.data.chat_template or CHAT) == CHAT
    known: dict[str, Plain] = {"base": base_digest(place), "tokenizer": tokenizer_digest(tokenizer)}
    if chats:
        known["template"] = template_digest(tokenizer)
    return server_facts(settings, Facts({**known, **_configuration(place)}))


def server_facts(settings: FederationSettings, known: Facts, modules: Mapping[str, LoRA] | None = None) -> Facts:
    """The facts of these settings. known: about the base model. modules: of the adapters."""
    of_model = {name: value for name, value in known.values.items() if name in _OF_MODEL or name.startswith("config.")}
    return Facts(of_model).and_these(
        labels=json.dumps(list(settings.data.label_names)) if settings.data.label_names else "",
        scaling=settings.lora.unit,
        max_length=settings.data.max_length,
        targets="" if modules is None else targets_of(modules),
        **versions_here(),
    )


def targets_of(modules: Mapping[str, LoRA]) -> str:
    """An adapter's modules with the shapes of their layers, whatever the ranks: their number and a digest."""
    found = sorted(f"{name} {len(lora.factors[0])}x{lora.factors[1].shape[1]}" for name, lora in modules.items())
    return f"{len(found)} modules, {hashlib.sha256(chr(10).join(found).encode()).hexdigest()[:16]}"


def _configuration(model: str | Path) -> dict[str, Plain]:
    """The plain values of a model's configuration, as config.KEY. {} for a GGUF file: its digest covers all of it."""
    from transformers import AutoConfig

    from fedlora.training.load import model_place, readable

    if Path(model).is_file():
        return {}
    with readable(f"the configuration of {str(model)!r} cannot be read"):
        found = AutoConfig.from_pretrained(model_place(model)).to_dict()
    return dict(sorted(_plain(found, "config.")))


def _plain(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Plain]]:
    for key, value in table.items():
        if str(key) in _OWN or str(key).startswith("_"):
            continue
        if isinstance(value, Mapping):
            yield from _plain(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value


# ------------------------------------------------------------------------------------------------------ at the server


def agreed(path: Path) -> Facts:
    """What the server knows about the base model, from agreement.json. Raises `ConfigError` if it cannot be read."""
    try:
        return Facts.from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. It records the base model that the federation has agreed on: restore it "
            f"from a backup."
        ) from error


def write_agreed(path: Path, known: Facts) -> None:
    """Write agreement.json, all or nothing."""
    files.write(path, json.dumps(dict(known.values), indent=2, sort_keys=True) + "\n")


__all__ = [
    "Disagreement", "Facts", "agreed", "check", "differences", "model_facts", "server_facts", "targets_of",
    "versions_here", "write_agreed",
]  # fmt: skip
