"""The facts that server and sites must share beside the settings: with another base model or another version, training
would run without an error, but its result would be worthless.

join.toml has the server's; a site compares them with its own when its node starts and before it loads a model, and so
does the server, whose machine may have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from fedlora import __version__
from fedlora.core.lora import LoRA
from fedlora.core.text import shown
from fedlora.errors import ConfigError
from fedlora.flower.terms import PROTOCOL
from fedlora.flower.terms.settings import FederationSettings
from fedlora.versions import installed

Facts = Mapping[str, str]
"""One side's facts; what it does not know is missing.

base, config, tokenizer, template: SHA-256 of the base model's weights, of its config.json, of its tokenizer's
behaviour, and of its chat template if the federation uses that. targets: all adapted modules with their shapes, as a
count and a digest. protocol; fedlora: major and minor version; torch, transformers, peft: major version.
"""

_LIBRARIES = ("torch", "transformers", "peft")  # another major version is refused
# Keys of config.json that name its place or its writer, or that each federation sets itself.
_OWN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id",
        "num_labels", "problem_type", "use_cache", "_commit_hash")  # fmt: skip

# What to do about a difference.
_HINTS = {
    "base": "adapters of one base model mean nothing on another. Point [model] name in site.toml at a copy of the "
            "server's files (another revision, precision or quantisation is another model)",
    "config": "copy the server's config.json with its weights",
    "tokenizer": "the same text becomes other tokens. Copy tokenizer.json and tokenizer_config.json with the model",
    "template": "copy the chat template with the tokenizer, or let data.chat_template name one",
    "targets": "their base models have different shapes, or the common start belongs to another model",
    **dict.fromkeys(("protocol", "fedlora", *_LIBRARIES), "these do not work together: install the same here (after an "
                    "upgrade of the server: fedlora flower renew, and the new join.toml for all sites)"),
}  # fmt: skip


def check(agreed: Facts, own: Facts, name: str) -> None:
    """Raises `ConfigError` if two sides may not work together, of the facts that both know: both values, and what to
    do. agreed: of join.toml. name: of the other side, in words."""
    wrong = []
    for fact in [fact for fact in agreed if fact in own and agreed[fact] != own[fact]][:6]:
        both = f"is {_value(agreed[fact])} in join.toml, and {_value(own[fact])} at {name}"
        wrong.append(f"{shown(fact, 60)} {both}: {_HINTS.get(fact, 'make them alike')}")
    if wrong:
        raise ConfigError("; ".join(wrong) + ".")


def _value(value: str) -> str:
    """A fact in words: of a digest the beginning."""
    text = shown(value, 200)
    return f"{text[:12]}..." if len(text) == 64 and text.isalnum() else text


def versions_here() -> dict[str, str]:
    """The versions on this machine. A torch built by hand has none."""
    found = {name: at.split(".")[0] for name in _LIBRARIES if (at := installed(name)) is not None}
    return {"protocol": PROTOCOL, "fedlora": ".".join(__version__.split(".")[:2]), **found}


def model_facts(model: str, settings: FederationSettings, revision: str | None = None) -> dict[str, str]:
    """The versions, and what a base model's files are: nothing of anybody's data. No model is loaded; its weights are
    read once.

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
    known = {**versions_here(), "base": base_digest(place), "tokenizer": tokenizer_digest(tokenizer)}
    if not Path(place).is_file():  # a GGUF file's digest covers all of it
        known["config"] = _config_digest(place)
    if chats:
        known["template"] = template_digest(tokenizer)
    return known


def targets_of(modules: Mapping[str, LoRA]) -> str:
    """An adapter's modules with the shapes of their layers, whatever the ranks: their number and a digest."""
    found = sorted(f"{name} {len(lora.factors[0])}x{lora.factors[1].shape[1]}" for name, lora in modules.items())
    return f"{len(found)} modules, {hashlib.sha256(chr(10).join(found).encode()).hexdigest()[:16]}"


def _config_digest(model: str | Path) -> str:
    """SHA-256 of a model's config.json, as it is written, without `_OWN`: the same weights compute something else with
    another one."""
    from transformers import PretrainedConfig

    from fedlora.data.hub import readable
    from fedlora.training.load import model_place

    with readable(f"the configuration of {str(model)!r} cannot be read"):
        found, _ = PretrainedConfig.get_config_dict(model_place(model))
    text = json.dumps({key: value for key, value in found.items() if key not in _OWN}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
