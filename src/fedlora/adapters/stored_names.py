"""Under which names a base model's files keep the tensors of the model in memory.

transformers renames tensors as it saves and loads (ViT, LLaVA, GPT-NeoX's head), by rules in known_models.json; and an
encoder is stored alone or within a model with a head. Adapters name tensors as the model in memory has them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from fedlora.adapters.architecture import Architecture, known
from fedlora.adapters.base_model import BaseFiles
from fedlora.adapters.layouts import Layout
from fedlora.adapters.module_names import plain
from fedlora.errors import AdapterFormatError

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


class StoredNames:
    """The stored names of the base model's tensors: as the adapter's model has them, or by the rules of its type, and
    without the module that holds the encoder (encoders are stored alone), or within it.

    Args:
        layouts: the adapter's pairs, by path.
    """

    def __init__(self, layouts: Mapping[str, Layout], base: BaseFiles, architecture: Architecture) -> None:
        self.base, self._architecture = base, architecture
        self._rules = _Rules(architecture, base.config.get("architectures"))
        self._of: dict[str, str] = {}  # name in memory -> stored name
        self._in: dict[str, str] = {}
        self._doubled: set[str] = set()
        for stored in base.names:
            name = self._rules.loaded(stored)
            self._in[stored] = name or stored
            if name is not None and self._of.setdefault(name, stored) != stored:
                self._doubled.add(name)
        self._firsts = {name.partition(".")[0] for name in self._of}
        self.drop, self.put = "", ""  # the first part of names that the stored ones lack, or have more
        names = [self._wanted(path, layout) for path, layout in layouts.items()]
        absent = [name for name in names if not self._is_there(name)]
        allowed = architecture.prefixes
        if not absent:
            return
        prefix = absent[0].partition(".")[0]
        if prefix not in self._firsts and (allowed is None or prefix in allowed):
            inner = [name.partition(".")[2] for name in absent if name.startswith(f"{prefix}.")]
            if len(inner) == len(absent) and any(self._is_there(name) for name in inner):
                self.drop = prefix
                return
        outer = [p for p in sorted(self._firsts) if allowed is None or p in allowed]
        if not {name.partition(".")[0] for name in absent} & self._firsts:
            fits = [p for p in outer if any(self._is_there(f"{p}.{name}") for name in absent)]
            self.put = fits[0] if len(fits) == 1 else ""

    @property
    def moved(self) -> str:
        return self.drop or self.put

    def _wanted(self, path: str, layout: Layout) -> str:
        return plain(layout.pattern) if layout.kind == "parameter" else f"{plain(path)}.weight"

    def _is_there(self, name: str) -> bool:
        return name in self._of or f"{name.removesuffix('.weight')}.in_proj_weight" in self._of

    def find(self, name: str) -> str | None:
        """The stored name of a tensor. Raises `AdapterFormatError` where it is stored under two."""
        first, _, inner = name.partition(".")
        others = [inner] if self.drop and first == self.drop else []
        others += [f"{self.put}.{name}"] if self.put and first not in self._firsts else []
        found = next((n for n in (name, *others) if n in self._of), None)
        if found in self._doubled:
            raise AdapterFormatError(f"the base model in {self.base.directory} stores {name!r} under two names.")
        return None if found is None else self._of[found]

    def new(self, name: str) -> str:
        """The name under which a tensor that is not stored yet is added. Raises `AdapterFormatError` where loading
        would make another name of it."""
        if self._rules.loaded(name) != name:
            raise AdapterFormatError(
                f"{name!r} would be added, and transformers takes that name for another as it loads "
                f"{self._architecture}. Merge this adapter with peft's merge_and_unload."
            )
        return name

    def in_memory(self, stored: str) -> str:
        """The name of a stored tensor in the adapter's model."""
        name = self._in[stored]
        if self.drop:
            return f"{self.drop}.{name}"
        return name.removeprefix(f"{self.put}.") if self.put else name

    def weight_of(self, path: str) -> str:
        """The weight that a layer's pair updates, as the adapter's model has it."""
        module = plain(path)
        joint = f"{module}.in_proj_weight"  # nn.MultiheadAttention's
        return joint if self.find(f"{module}.weight") is None and self.find(joint) is not None else f"{module}.weight"

    def missing(self, name: str) -> AdapterFormatError:
        one_by_one = ".experts." in name and any(_ONE_EXPERT.search(other) for other in self.base.names)
        if one_by_one:
            why = "its experts are stored one by one. Merge this adapter with peft's merge_and_unload."
        elif self._rules.any:
            why = (
                f"transformers stores some tensors of {self._architecture} under other names, or in other shapes, than "
                f"the model in memory has, and this one was not found again (or it is another model). Merge this "
                f"adapter with peft's merge_and_unload."
            )
        else:
            why = (
                "another model, or a weight tied to another one and not stored. "
                f"It has {', '.join(itertools.islice(self.base.names, 3))}, ..."
            )
        return AdapterFormatError(f"the base model in {self.base.directory} has no {name!r}: {why}")


class _Rules:
    """How transformers renames a model's tensors as it loads them.

    The class of the model has its rules, or else its type; those of a class within it hold for what lies in it.
    """

    def __init__(self, architecture: Architecture, classes: object) -> None:
        named = [c for c in classes if isinstance(c, str)] if isinstance(classes, list) else []
        steps: list[tuple[bool, Sequence[Sequence[str | None]] | None]] = []  # (within the model, its rules)
        for t in architecture.types:
            of_type = known()["renamings"].get(t, {})
            own = next((c for c in named if c in of_type), t)
            steps += [(False, of_type[own])] if own in of_type and (t == architecture.types[0] or own == t) else []
            steps += [(True, rules) for c, rules in of_type.items() if c not in (own, t) and c.endswith("Model")]
        self.any = bool(steps)
        steps.append((False, known()["renamings"][""]["legacy"]))
        self._steps = [
            (within, [(re.compile(str(pattern)), to) for pattern, to in rules])
            for within, rules in steps
            if rules is not None
        ]
        self._prefixes = sorted(f"{p}." for t in architecture.types for p in known()["prefixes"].get(t, ()))

    def loaded(self, stored: str) -> str | None:
        """The name in memory; None where the tensor is converted, so that none has it as it is."""
        name = stored
        for within, rules in self._steps:
            start = next((p for p in self._prefixes if within and name.startswith(p)), "")
            inner: str | None = name.removeprefix(start)
            for pattern, to in rules:
                inner = _renamed(pattern, to, inner) if inner is not None else None
            if inner is None:
                return None
            name = f"{start}{inner}"
        return name


def _renamed(pattern: re.Pattern[str], to: str | None, name: str) -> str | None:
    """transformers' `WeightTransform.rename_source_key`: the first match, once."""
    found = pattern.search(name)
    if found is None:
        return name
    if to is None:
        return None
    if r"\1" in to:
        group = next(key for key, value in found.groupdict().items() if value is not None)
        to = to.replace(r"\1", found.group(pattern.groupindex[group] + 1))
    return name.replace(found.group(0), to, 1)
