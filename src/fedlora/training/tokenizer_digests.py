"""What a tokenizer does, as a digest: the same however its files are laid out, another where text becomes other ids."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from fedlora.errors import ConfigError
from fedlora.training.weight_digests import model_place

# Case, accents in both forms, digits, blanks, line ends, quotes, code, scripts without spaces, an emoji, a long word.
_PROBES = (
    "The Quick brown fox-trot isn't over; it's 3.14159 past 12,000!",
    "naïve café: nai\u0308ve cafe\u0301, ﬁnal Straße, İstanbul",
    "  leading and   inner blanks\tand tab\r\nline\n\nend  ",
    "def f(x_1): return {'a': [x_1 ** 2, \"b\"]}  # <s> [CLS] </s> <unk> <|endoftext|>",
    "患者は昨日退院した。 Пациент выписан. المريض خرج. 😀 → ≤ €5",
    "antidisestablishmentarianism electroencephalographically HIV-1 COVID-19 mRNA",
)

_SPECIAL = ("bos", "eos", "unk", "sep", "cls", "mask")  # that for padding stands where no model looks


def tokenizer_of(path: str | os.PathLike[str]) -> Any:
    """A model's tokenizer, without the model. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    place = model_place(path)
    try:
        if place.is_file():
            return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # what damaged files bring about, in several libraries
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the tokenizer of {os.fspath(path)!r} cannot be loaded: {reason}") from error


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of the vocabulary, the merges, the special tokens, and of what becomes of texts that tell
    tokenizers apart."""
    facts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "merges": _merges(tokenizer),
        "special": [str(getattr(tokenizer, f"{name}_token", None)) for name in _SPECIAL],
        "probes": [tokenizer(text)["input_ids"] for text in _PROBES],
        "pair": tokenizer(_PROBES[0], _PROBES[5])["input_ids"],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of its chat template; "" where it has none."""
    found = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else ""


def _merges(tokenizer: Any) -> list[list[str]]:
    """The pairs that a BPE tokenizer joins, in their order; older files have them as "a b"."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in merges]


__all__ = ["template_digest", "tokenizer_digest", "tokenizer_of"]
