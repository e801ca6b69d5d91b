"""What fedlora has to know of the models of transformers, read in the source of the installed one.

`python tests/support/transformers_tables.py` prints src/fedlora/adapters/known_models.json anew. Nothing is loaded but
configuration classes and the table of weight conversions; the modelling code is read as text, parsed, not run.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

_MODELS = Path(transformers.__file__).parent / "models"


@functools.cache
def _sources(package: str) -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text()) for path in sorted((_MODELS / package).glob("modeling_*.py")))


def package_of(model_type: str) -> str:
    return str(model_type_to_module_name(model_type))


def _classes(package: str) -> Iterator[ast.ClassDef]:
    for tree in _sources(package):
        yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


@functools.cache
def conv1d_layers(package: str) -> list[str]:
    """Attributes that are transformers' Conv1D: `self.NAME = Conv1D(...)`."""
    found = set()
    for tree in _sources(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called = node.value.func
                if isinstance(called, ast.Name) and called.id == "Conv1D":
                    found |= {t.attr for t in node.targets if isinstance(t, ast.Attribute)}
    return sorted(found)


@functools.cache
def linear_layers(package: str) -> set[str]:
    """Attributes that are nn.Linear in the same package."""
    found = set()
    for tree in _sources(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called = node.value.func
                if isinstance(called, ast.Attribute) and called.attr == "Linear":
                    found |= {t.attr for t in node.targets if isinstance(t, ast.Attribute)}
    return found


@functools.cache
def embeddings(package: str) -> list[str]:
    """Attributes that are nn.Embedding or a subclass of it in the same package, and never a linear layer there."""
    kinds = {"Embedding"} | {
        node.name
        for node in _classes(package)
        if any(isinstance(base, ast.Attribute) and base.attr == "Embedding" for base in node.bases)
    }
    found = set()
    for tree in _sources(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called = node.value.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in kinds:
                    found |= {t.attr for t in node.targets if isinstance(t, ast.Attribute)}
    return sorted(found - linear_layers(package))


_FACTS = ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_quantized", "requires_grad", "is_cuda")


@functools.cache
def read_weights(package: str) -> list[str]:
    """Layers whose .weight the code uses itself, past the layer's forward: there an adapter beside it has no part."""
    found = set()
    for tree in _sources(package):
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            if "init" in function.name or "tie" in function.name or "embeddings" in function.name:
                continue
            facts = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr in _FACTS}
            for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
                if getattr(call.func, "id", "") == "isinstance":
                    facts |= {id(argument) for argument in call.args}
            for node in ast.walk(function):
                taken = isinstance(node, ast.Attribute) and node.attr == "weight" and id(node) not in facts
                if taken and isinstance(node.value, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.value.attr)
    layers = linear_layers(package) | set(embeddings(package)) | set(conv1d_layers(package))
    return sorted(found & layers)


@functools.cache
def transposed_experts(package: str) -> bool:
    """Whether a class of experts is declared `@use_experts_implementation(is_transposed=True)`, which peft reads."""
    for node in _classes(package):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call):
                for keyword in decorator.keywords:
                    if keyword.arg == "is_transposed" and ast.literal_eval(keyword.value):
                        return True
    return False


@functools.cache
def tied(package: str) -> dict[str, dict[str, str]]:
    """Class -> {tied name: the name that it is tied to}, as `_tied_weights_keys` has it, of the class or of its own
    instances."""
    found: dict[str, dict[str, str]] = {}
    for node in _classes(package):
        for line in ast.walk(node):
            if not isinstance(line, ast.Assign | ast.AnnAssign) or line.value is None:
                continue
            for name in line.targets if isinstance(line, ast.Assign) else [line.target]:
                if isinstance(name, ast.Subscript) and _is_tied_keys(name.value):
                    pair = {_pattern(name.slice): _pattern(line.value)}
                elif _is_tied_keys(name):
                    pair = _literal(line.value)
                else:
                    continue
                found[node.name] = found.get(node.name, {}) | pair
    parents = _parents(package)
    for name in parents:  # those that inherit it
        for parent in parents[name]:
            if name not in found and parent in found:
                found[name] = found[parent]
    return {name: pairs for name, pairs in found.items() if pairs}


def _is_tied_keys(node: ast.expr) -> bool:
    return "_tied_weights_keys" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def _literal(node: ast.expr) -> dict[str, str]:
    try:
        return dict(ast.literal_eval(node) or {})
    except ValueError:  # a copy of another one's
        return {}


def _pattern(node: ast.expr) -> str:
    """A name, or the pattern of those that an f-string makes with a number."""
    if isinstance(node, ast.JoinedStr):
        return "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\d+" for p in node.values)
    return str(ast.literal_eval(node))


@functools.cache
def _parents(package: str) -> dict[str, list[str]]:
    return {node.name: [b.id for b in node.bases if isinstance(b, ast.Name)] for node in _classes(package)}


@functools.cache
def inner_ties(package: str) -> dict[str, dict[str, str]]:
    """Class -> the ties of the models within it (`self.NAME = AnotherModel(...)`), under their names in it."""
    parts: dict[str, dict[str, set[str]]] = {}
    classes, parents = {node.name: node for node in _classes(package)}, _parents(package)
    for name, node in classes.items():
        parts[name] = {}
        for line in ast.walk(node):
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call):
                made = line.value.func
                called = made.id if isinstance(made, ast.Name) else getattr(getattr(made, "value", None), "id", "")
                for target in line.targets:
                    if called in classes and isinstance(target, ast.Attribute) and called != name:
                        parts[name].setdefault(target.attr, set()).add(called)

    def held(name: str) -> dict[str, set[str]]:
        found = {k: v for parent in parents.get(name, ()) for k, v in held(parent).items()}
        return found | parts.get(name, {})

    def ties(name: str, depth: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for attribute, models in held(name).items() if depth else ():
            for model in sorted(models):
                of_it = tied(package).get(model, {}) | ties(model, depth - 1)
                found |= {_within(attribute, k): _within(attribute, v) for k, v in of_it.items()}
        return found

    return {name: found for name in classes if (found := ties(name, 4))}


def _within(attribute: str, name: str) -> str:
    plain = re.fullmatch(r"[\w.]+", name)
    return f"{attribute}.{name}" if plain else rf"{attribute}\.{name.removeprefix('^')}"


@functools.cache
def asks_for_ties(package: str) -> bool:
    """Whether the code looks at tie_word_embeddings itself, or changes what is tied: untied, it may compute another
    thing, or tie still."""
    code = "".join(path.read_text() for path in sorted((_MODELS / package).glob("modeling_*.py")))
    configs = "".join(path.read_text() for path in sorted((_MODELS / package).glob("configuration_*.py")))
    changed = "self._tied_weights_keys" in code or "tie_word_embeddings" in code
    return changed or bool(re.search(r"""\.tie_word_embeddings|["']tie_word""", configs))


@functools.cache
def prefixes(package: str) -> list[str]:
    """base_model_prefix of the package's classes: what holds the encoder, and is left out where it is stored alone."""
    found = set()
    for node in _classes(package):
        for line in node.body:
            names = (
                line.targets
                if isinstance(line, ast.Assign)
                else [line.target]
                if isinstance(line, ast.AnnAssign)
                else []
            )
            if any(isinstance(n, ast.Name) and n.id == "base_model_prefix" for n in names) and line.value is not None:
                found.add(str(ast.literal_eval(line.value)))
    return sorted(found - {""})


def tie_default(model_type: str) -> bool:
    """What tie_word_embeddings is where config.json is silent; some classes set it after their fields."""
    return _built(model_type) is not False


def ties_always(model_type: str) -> bool:
    """Whether a config that says false comes out true (T5)."""
    return _built(model_type, tie_word_embeddings=False) is not False


def _built(model_type: str, **said: bool) -> bool | None:
    """tie_word_embeddings of a config made with nothing else; None where none can be made, False where it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(getattr(CONFIG_MAPPING[model_type](**said), "tie_word_embeddings", False))
    except Exception:  # some need fields: whichever way it is, is not known then
        return None


def renamed() -> list[str]:
    """Model types and classes whose stored tensors may bear the name of another tensor of the model in memory, or have
    its name and other values: a name is no fixed point of the conversion on loading."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = []
    for key, steps in _build_checkpoint_conversion_mapping().items():
        for step in steps:
            sources, targets = _listed(step, "source_patterns"), _listed(step, "target_patterns")
            if isinstance(step, WeightConverter) and set(sources) & set(targets):
                found.append(key)
    return sorted(set(found))


def renamings() -> dict[str, dict[str, list[list[str | None]] | None]]:
    """Type -> {the type, or a class of its package, or "legacy": [pattern, replacement] in the order of loading}.

    A replacement of null: a conversion that a name cannot tell of. null for all of them: rules of a kind of their own.
    """
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    def rules(steps: list[Any]) -> list[list[str | None]] | None:
        names = [s for s in steps if not isinstance(s, WeightConverter)]
        if any(type(s) not in (WeightRenaming, PrefixChange) for s in names):
            return None
        found: list[list[str | None]] = [[s.compiled_sources.pattern, s.target_patterns[0]] for s in names]
        return found + [[s.compiled_sources.pattern, None] for s in steps if isinstance(s, WeightConverter)]

    mapping = _build_checkpoint_conversion_mapping()
    found = {"": {"legacy": rules(mapping["legacy"])}}
    for t in sorted(CONFIG_MAPPING_NAMES):
        keys = [t, *sorted(node.name for node in _classes(package_of(t)))]
        if of_type := {key: rules(mapping[key]) for key in keys if key in mapping}:
            found[t] = of_type
    return found


def _listed(step: Any, name: str) -> list[str]:
    value = getattr(step, name, None) or []
    return [value] if isinstance(value, str) else list(value)


def tables() -> dict[str, Any]:
    types = sorted(CONFIG_MAPPING_NAMES)
    packages = {t: package_of(t) for t in types}
    conv = {t: names for t in types if (names := conv1d_layers(packages[t]))}
    ties = {t: pairs for t in types if (pairs := tied(packages[t]))}
    return {
        "transformers": transformers.__version__,
        "types": types,
        "conv1d": conv,
        "transposed_experts": [t for t in types if transposed_experts(packages[t])],
        "converted": renamed(),
        "embeddings": {t: names for t in types if (names := embeddings(packages[t]))},
        "read_weights": {t: names for t in types if (names := read_weights(packages[t]))},
        "prefixes": {t: names for t in types if (names := prefixes(packages[t]))},
        "renamings": renamings(),
        "tied": ties,
        "tied_within": {t: pairs for t in types if (pairs := inner_ties(packages[t]))},
        "ties_by_default": [t for t in types if tie_default(t)],
        "ties_always": [t for t in types if ties_always(t)],
        "asks_for_ties": [t for t in types if asks_for_ties(packages[t])],
    }


def written(found: Mapping[str, Any]) -> str:
    """JSON with a line for each type, so that a change shows."""
    parts = []
    for key, value in sorted(found.items()):
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(value.items()))
            parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}"


if __name__ == "__main__":
    print(written(tables()))
