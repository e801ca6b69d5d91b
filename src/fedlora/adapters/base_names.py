"""Do two adapters name the same base model? Recognises only safe equivalences; the user must declare any other.

    org/Name/                          org/Name            a trailing slash
    https://huggingface.co/org/Name    org/Name            the hub's address
    .../models--org--Name/snapshots/C  org/Name            the hub's cache
    ORG/name                           org/Name            hub names are unique regardless of case
    bert-base-uncased                  google-bert/...     names from before the hub had organisations
    org/Name-bnb-4bit                  org/Name            the same weights, quantised
    unsloth/Name                       meta-llama/Name     a mirror of a known publisher
    /models/Name-7B                    org/Name-7B         a local copy whose name looks like a model's
    no revision                        main                the default

Two folders of the same name prove nothing, nor does a folder called "model".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from fedlora.core.text import shown
from fedlora.errors import AdapterFormatError

_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/]+)(?:/(?:tree|resolve)/[^/]+)?")
_CACHED = re.compile(r"(?:.*/)?models--(.+?)--(.+?)(?:/snapshots/([0-9a-f]{6,64}))?")
_QUANTISED = re.compile(r"(?:-unsloth)?-bnb-4bit$", re.IGNORECASE)
_MIRROR = "unsloth"
_PUBLISHERS = frozenset((
    "meta-llama", "qwen", "mistralai", "google", "microsoft", "huggingfacetb", "deepseek-ai", "tiiuae", "ibm-granite",
    "openai", "allenai", "tinyllama", "cohereforai", "01-ai", "bigcode", "stabilityai",
))  # fmt: skip
_OLD_NAMES = {
    "gpt2": "openai-community", "gpt2-medium": "openai-community", "gpt2-large": "openai-community",
    "gpt2-xl": "openai-community", "bert-base-uncased": "google-bert", "bert-base-cased": "google-bert",
    "bert-large-uncased": "google-bert", "bert-large-cased": "google-bert",
    "bert-base-multilingual-cased": "google-bert", "roberta-base": "facebookai", "roberta-large": "facebookai",
    "xlm-roberta-base": "facebookai", "xlm-roberta-large": "facebookai", "distilbert-base-uncased": "distilbert",
    "distilroberta-base": "distilbert", "distilgpt2": "distilbert", "t5-small": "google-t5", "t5-base": "google-t5",
    "t5-large": "google-t5", "albert-base-v2": "albert",
}  # fmt: skip
# SHA-256 of model.safetensors -> the hub's name, for models whose config.json gives another name.
KNOWN_WEIGHTS = {
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db": "sentence-transformers/all-MiniLM-L6-v2",
}


@dataclass(frozen=True)
class Base:
    """A base model as an adapter's config names it."""

    name: str | None
    revision: str | None = None

    def __str__(self) -> str:
        at = f" at revision {shown(self.revision)}" if self.revision else ""
        return f"{shown(self.name) if self.name else 'not named'}{at}"


@dataclass(frozen=True)
class _Known:
    """A parsed name. owner: "" if not given. folder: set if the name is a path. snapshot: from the hub's cache."""

    owner: str
    name: str
    folder: str = ""
    snapshot: str | None = None


def check_same_base(bases: Iterable[Base], *, declared: bool = False, digests: bool = False) -> list[str]:
    """Notes on names that were treated as one model.

    Args:
        declared: the user said (`--same-base`) that all names mean one model. digests: the weights' digests are known
            for all, and equal.

    Raises:
        AdapterFormatError: two of them name different models, as far as we can tell, or two revisions of one.
    """
    notes = []
    for a, b in combinations(dict.fromkeys(bases), 2):
        if _revision(a) and _revision(b) and _revision(a) != _revision(b):
            raise AdapterFormatError(
                f"the adapters belong to different base models, so they do not add up: {a} and {b}: two revisions."
            )
        if not (declared or digests or is_same_base(a, b)):
            raise AdapterFormatError(
                f"the adapters belong to different base models, so they do not add up: {a} and {b}. "
                f"If both are the same model with the same weights, add --same-base (same_base=True)."
            )
        if a.name != b.name:
            why = ": the SHA-256 of their weights are equal" if digests else " (--same-base)" if declared else ""
            notes.append(f"{a} and {b} are treated as one base model{why}")
    return notes


def is_same_base(a: Base, b: Base) -> bool:
    """Whether two names certainly mean the same weights."""
    if _revision(a) != _revision(b):
        return False
    if a.name == b.name:
        return True
    if not a.name or not b.name:
        return False
    one, two = _known(a.name), _known(b.name)
    if one.snapshot and two.snapshot and one.snapshot != two.snapshot:
        return False
    if one.folder and two.folder:
        return one.folder == two.folder
    if one.name != two.name:
        return False
    if one.folder or two.folder:
        return _tells(one.name)
    if one.owner == two.owner:
        return True
    return (one.owner == _MIRROR and two.owner in _PUBLISHERS) or (two.owner == _MIRROR and one.owner in _PUBLISHERS)


def public_name(bases: Iterable[Base]) -> str | None:
    """The name to publish: the first that is not a local path, otherwise the first."""
    names = [base.name for base in bases if base.name]
    return next((name for name in names if not is_path(name)), names[0] if names else None)


def is_quantised(name: str) -> bool:
    """Whether a base model's name says that its weights are 4-bit."""
    return _QUANTISED.search(name) is not None


def is_path(name: str) -> bool:
    """Whether a base model's name looks like a path on some machine."""
    return bool(re.match(r"[/~.\\]|[A-Za-z]:[\\/]", name)) or "\\" in name or name.strip("/").count("/") > 1


def _revision(base: Base) -> str | None:
    return None if base.revision in (None, "", "main") else base.revision


def _known(name: str) -> _Known:
    plain = name.rstrip("/") or name
    address = _ADDRESS.fullmatch(plain)
    if address:
        plain = address[1]
    cached = _CACHED.fullmatch(plain)
    if cached:
        return _hub(f"{cached[1]}/{cached[2]}", cached[3])
    if is_path(plain):
        last = re.split(r"[/\\]", plain)[-1]
        return _Known("", _QUANTISED.sub("", last).casefold(), folder=plain)
    return _hub(plain)


def _hub(name: str, snapshot: str | None = None) -> _Known:
    owner, _, last = name.casefold().rpartition("/")
    return _Known(owner or _OLD_NAMES.get(last, ""), _QUANTISED.sub("", last), snapshot=snapshot)


def _tells(name: str) -> bool:
    """Whether a folder's name looks like a model's: several parts of letters and digits, such as llama-3.1-8b."""
    parts = [part for part in re.split(r"[-_]", name) if part]
    generic = re.match(r"(checkpoint|ckpt|step|epoch|run|model|merged|output|final|v)[-_]?\d*$", name)
    return len(parts) >= 2 and any(c.isdigit() for c in name) and generic is None
