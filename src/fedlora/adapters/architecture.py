"""What the type of a model tells of its weights: which way round they are kept, and which of them are tied.

The facts are of transformers and stand in known_models.json, which tests/support/transformers_tables.py makes from its
source (tests/adapters/test_orientation.py compares). A base without a config.json, or of a type that is not there, is
one of which nothing is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings", "position_embeddings")  # in any model
_MOST_TYPES = 16  # of the parts of one model; real ones have up to 5
_HEADLESS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")  # tasks of peft without a language head


@cache
def known() -> dict[str, Any]:
    """The facts of all types that transformers has."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("known_models.json").read_text("utf-8"))
    return found


@dataclass(frozen=True)
class Tie:
    """Names of one tensor that several modules use. plain: told apart by tie_word_embeddings alone, so that they can be
    untied, with all other ties of the model (`Architecture.pairs`)."""

    names: tuple[str, ...]
    plain: bool

    def others(self, name: str) -> list[str]:
        return [other for other in self.names if other != name]


class Architecture:
    """A base model by its config.json (an empty mapping: there is none).

    Args:
        adapter: the adapter's config, which tells for which kind of model it was trained.
    """

    def __init__(self, config: Mapping[str, Any], adapter: Mapping[str, Any]) -> None:
        found = tuple(dict.fromkeys(_types(config)))
        self.types = found[:_MOST_TYPES]
        self.is_known = bool(found) and len(found) <= _MOST_TYPES and all(t in _known_types() for t in found)
        self._config, self._adapter = config, adapter

    def __str__(self) -> str:
        if not self.types:
            return "a base model without a model_type in a config.json"
        return f"a base model of type {' with '.join(t[:60] for t in self.types[:4])}"

    @property
    def prefixes(self) -> frozenset[str] | None:
        """Names of the module that holds the encoder, which is stored without it; None where any may be."""
        return frozenset(p for t in self.types for p in known()["prefixes"].get(t, ())) if self.is_known else None

    def conv1d(self, leaf: str) -> bool | None:
        """Whether layers of that name are Conv1D, kept as (d_in, d_out); None where it is not known."""
        named = [leaf in known()["conv1d"].get(t, ()) for t in self.types]
        if any(named):
            return True if len(self.types) == 1 else None
        return False if self.is_known else None

    @property
    def experts_in_first(self) -> bool | None:
        """Whether tensors of experts are (E, d_in, d_out) to peft; None where it is not known."""
        if not self.is_known:
            return None
        return any(t in known()["transposed_experts"] for t in self.types)

    def is_embedding(self, leaf: str) -> bool | None:
        """Whether modules of that name are embeddings; None where it is not known."""
        if not self.is_known:
            return True if leaf in _EMBEDDINGS else None
        return any(leaf in known()["embeddings"].get(t, ()) for t in self.types)

    def reads_weight(self, leaf: str) -> bool:
        """Whether the model's own code takes the weight of such a layer past its forward, so that an adapter beside the
        model has no part in what it computes."""
        types = [t for t in self.types if t != "bloom" or self._config.get("slow_but_exact")]
        return any(leaf in known()["read_weights"].get(t, ()) for t in types)

    @property
    def converted(self) -> bool:
        """Whether loading may transpose a tensor that keeps its name."""
        names = {*self.types, *_listed(self._config.get("architectures"))}
        return any(t in known()["converted"] for t in names)

    @cached_property
    def may_tie(self) -> bool:
        """Whether embeddings and heads may be one tensor: config.json says so anywhere, or is silent where that is the
        type's default."""
        return any(_tie_flags(self._config))

    @cached_property
    def is_composite(self) -> bool:
        return len(self.types) > 1 or sum(1 for _ in _configs(self._config)) > 1

    def tie_of(self, name: str) -> Tie | None:
        """The tensors with which one is tied; None where it is on its own.

        Raises:
            LookupError: it may be tied, and with what is not known.
        """
        if not self.types:
            if _may_be_embedding(name):
                raise LookupError("without a config.json, with what it may be tied is not known")
            return None
        if not self.may_tie:
            return None
        if not self.is_known:
            if _may_be_embedding(name):
                raise LookupError(f"with what {self} ties it is not known")
            return None
        pairs = self._pairs
        names, grown = {name}, True
        odd = False
        while grown:
            grown = False
            for target, source, exact in pairs:
                for before in self._befores(target, source, names, exact):
                    odd |= not exact
                    both = {f"{before}{target}", f"{before}{source}"}
                    if not both <= names:
                        names |= both
                        grown = True
        if len(names) == 1:
            return None
        asks = self.ties_always or any(t in known()["asks_for_ties"] for t in self.types)
        exact_only = not odd and all(exact for _, _, exact in pairs)
        return Tie(tuple(sorted(names)), exact_only and not asks and not self.is_composite)

    def _befores(self, target: str, source: str, names: set[str], exact: bool) -> list[str]:
        """What stands before the two names of a pair in those names that it means: nothing, or in a model of several
        parts the path of a part."""
        if not exact:
            return [""] if any(_means(side, name) for side in (target, source) for name in names) else []
        if not self.is_composite:
            return [""] if target in names or source in names else []
        sides = [(name, side) for name in names for side in (target, source) if f".{name}".endswith(f".{side}")]
        return sorted({name[: len(name) - len(side)] for name, side in sides})

    @cached_property
    def targets(self) -> frozenset[str]:
        """Names that are tied to another one, rather than another one to them."""
        return frozenset(target for target, _, exact in self._pairs if exact)

    @cached_property
    def ties_by_itself(self) -> bool:
        """Whether the class of the model ties, rather than only a model within it: peft asks the class for tokens."""
        return any(self._classes_of(known()["tied"].get(t, {})) for t in self.types)

    @property
    def ties_always(self) -> bool:
        """Whether tie_word_embeddings = false has no effect."""
        return any(t in known()["ties_always"] for t in self.types)

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        """(tied name, the name it is tied to): all that tie_word_embeddings ties, as far as they are names."""
        return [(target, source) for target, source, exact in self._pairs if exact]

    @cached_property
    def _pairs(self) -> list[tuple[str, str, bool]]:
        """(tied name, the name it is tied to, whether they are names and no patterns), of the classes in question and
        of the models within them; also as the inner model alone has them, and as the outer one has the inner's."""
        found: dict[tuple[str, str, bool], None] = {}
        for t in self.types:
            own, within = (known()[table].get(t, {}) for table in ("tied", "tied_within"))
            by_class = {name: [*own.get(name, {}).items(), *within.get(name, {}).items()] for name in {**own, **within}}
            for name in self._classes_of(by_class):
                for target, source in by_class[name]:
                    exact = bool(re.fullmatch(r"[\w.]+\.(weight|bias)", target) and re.fullmatch(r"[\w.]+", source))
                    found[target, source, exact] = None
            for target, source, exact in list(found) if not self.is_composite else ():
                for prefix in known()["prefixes"].get(t, ()) if exact else ():
                    start = f"{prefix}."
                    if target.startswith(start) and source.startswith(start):
                        found[target.removeprefix(start), source.removeprefix(start), True] = None
                    else:
                        found[f"{start}{target}", f"{start}{source}", True] = None
        return list(found)

    def _classes_of(self, by_class: Mapping[str, Any]) -> list[str]:
        """The classes that the base was saved from, and that the adapter was trained on; all where that is not told."""
        auto = self._adapter.get("auto_mapping")
        named = [*_listed(self._config.get("architectures"))]
        if isinstance(auto, Mapping) and isinstance(auto.get("base_model_class"), str):
            named.append(auto["base_model_class"])
        task = self._adapter.get("task_type")
        told = task in _HEADLESS or (isinstance(auto, Mapping) and isinstance(auto.get("base_model_class"), str))
        chosen = [name for name in by_class if name in named]
        return chosen if named and (chosen or told) and not self.is_composite else list(by_class)


def _known_types() -> frozenset[str]:
    return _frozen_types()


@cache
def _frozen_types() -> frozenset[str]:
    return frozenset(known()["types"])


def _configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config and those of its parts, down to a depth that no real one has."""
    level: Sequence[Mapping[str, Any]] = [config]
    for _ in range(4):
        yield from (c for c in level if c.get("model_type"))  # MPT's attention calls itself ""
        level = [part for c in level for part in c.values() if isinstance(part, Mapping)]


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    for part in _configs(config):
        yield str(part["model_type"])


def _tie_flags(config: Mapping[str, Any]) -> Iterator[bool]:
    for part in _configs(config):
        kind = str(part["model_type"])
        default = kind in known()["ties_by_default"] or kind not in _known_types()
        said = part.get("tie_word_embeddings")
        yield kind in known()["ties_always"] or bool(default if said is None else said)


def _means(pattern: str, name: str) -> bool:
    """Whether a pattern of modules means that tensor: what lies in them."""
    return re.match(rf"(.*\.)?{pattern}(\.|$)", name) is not None


_EMBEDDING = re.compile(
    r"(.*\.)?(\w*emb\w*|wte|wpe|shared|\w*lm_head\w*|\w*vocab\w*|word\w*|tok\w*|decoder|output|head|proj_out"
    r"|\w*predict\w*)\.(weight|bias)",
    re.IGNORECASE,
)


def _may_be_embedding(name: str) -> bool:
    return _EMBEDDING.fullmatch(name) is not None


def _listed(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def may_be_embedding(module: str) -> bool:
    """Whether a module has a name that an embedding or a head has in some model."""
    return _may_be_embedding(f"{module}.weight")
