"""A PEFT adapter on disk, opened without reading its tensors: its modules, each of them read on demand.

Reading module by module keeps memory at one module, however many adapters are merged. (Pairs that the config ties are
the exception: opening the file compares them.) Before reading any numbers, it refuses by name whatever would change the
update or does not fit the config, in this order:

    which fields may a config have?                   config_fields
    what is each key in the file?                     parsed.parse, with config_meaning.extra_kind
    which modules, ranks, alphas do patterns name?    parsed.understand, with config_meaning.resolve and patterns
    does the file hold what its config says?          judged.judge
    do copies of one tensor agree?                    here, with parsed.copies_in; tied_pairs
    with a base model (`export`, validate --base):
    would peft load and compute exactly that?         export.attached; with_base leaves it what a base decides
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters import allocation
from fedlora.adapters.config_fields import check_config, check_scaling
from fedlora.adapters.config_meaning import ties_targets
from fedlora.adapters.judged import check_size, check_update, judge
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.limits import Limits
from fedlora.adapters.module_names import may_be_embedding, plain
from fedlora.adapters.narrowing import common_type
from fedlora.adapters.parsed import PREFIX, Meaning, Parsed, copies_in, parse, understand
from fedlora.adapters.tied_pairs import check_tied
from fedlora.adapters.untrusted_files import (
    FLOATS,
    Stored,
    StrangersFile,
    header_of,
    json_of,
    largest,
    largest_of_each,
    same_bytes,
    tensor_of,
)
from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, escaped

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
__all__ = ["CONFIG_FILE", "PREFIX", "WEIGHTS_FILE", "AdapterFile", "scaled"]


class AdapterFile:
    """A PEFT LoRA directory; AdaLoRA is read as LoRA.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: the unit of the updates from `lora`: with the default 1.0, B @ A is the update itself.
        limits: what the files may claim. allow_unknown: config fields to treat as harmless.
        with_base: a base model will be consulted (`export`), so leave what depends on it open.
        dora: also read DoRA: `lora` gives s B A alone, and a head of kind "magnitude" the norms of a weight's rows.
        names: key of a tensor -> the key to treat it as.

    `notes` tell the user what could not be decided without the base model.

    Raises:
        AdapterFormatError: missing, damaged or pickled files; a feature that is not W0 + s B A; keys or shapes that do
            not fit the config; differing copies of one tensor.

    Example:
        >>> file = AdapterFile("adapter", scaling=2.0)  # reads only names and shapes
        >>> file.lora("q")
        LoRA(B=(6, 4) float32, A=(4, 5) float32)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        scaling: float = 1.0,
        limits: Limits | None = None,
        allow_unknown: Collection[str] = (),
        with_base: bool = False,
        dora: bool = False,
        names: Mapping[str, str] = ReadOnly({}),
    ) -> None:
        check_scaling(scaling)
        self.directory = Path(directory)
        self.scaling = scaling
        self.limits = limits or Limits()
        try:
            self._weights, self._parsed, self._meaning = _opened(
                self.directory, self.limits, allow_unknown, names, dora=dora
            )
            self.notes = judge(self._parsed, self._meaning, self.limits, scaling, with_base=with_base)
            self._check_copies()
            self._tied_heads = frozenset(self._heads_by_tie())
        except AdapterFormatError as error:
            raise self._named(error) from error
        self.config: Mapping[str, Any] = self._parsed.config
        self.layouts: Mapping[str, Layout] = self._meaning.layouts
        self.ranks: Mapping[str, int] = ReadOnly(
            {
                name: max(self._meaning.ranks[path], 1)
                for path in self.layouts
                for name in self.layouts[path].modules(path)
            }
        )
        self._cached: tuple[str, Tensor, Tensor] | None = None  # experts share their tensors, so keep the last pair
        # Names of the adapted matrices: paths of layers, sorted, and PATH[e] for each expert of a parameter.
        self.modules = tuple(name for path in sorted(self.layouts) for name in self.layouts[path].modules(path))
        # Sorted names of tensors other than pairs, fully trained ones and biases (`kind`): their names in the base
        # model without wrappers; for added biases and token rows, their paths.
        self.heads = tuple(sorted(self._parsed.beside))
        if ties_targets(self.config):
            self._check_tied()

    def _named(self, error: AdapterFormatError) -> AdapterFormatError:
        """The error with the directory prefixed."""
        known = escaped(str(self.directory)) in str(error)
        return error if known else AdapterFormatError(f"{self.directory}: {error}")

    # ---- names and shapes, from the config and the header ------------------------------------------------------------

    @property
    def base_model(self) -> str | None:
        """The base model named in the config."""
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor's header entry, by key."""
        return self._parsed.tensors

    def has_head(self, name: str) -> bool:
        """Whether the file has this tensor other than a pair."""
        return name in self._parsed.beside

    def kind(self, head: str) -> str:
        """What a tensor other than a pair is: `config_meaning.extra_kind`. A copy of a saved module made by
        ensure_weight_tying also counts as a head, even if modules_to_save does not name it."""
        return "head" if head in self._tied_heads else self._parsed.beside[head][1]

    def stored_head(self, path: str) -> Stored:
        """The header entry of a tensor other than a pair."""
        return self.stored[self._parsed.beside[path][0]]

    def update_shape(self, path: str) -> tuple[int, int]:
        """(d_out, d_in) of the update stored at a path, from the header; of one matrix, if there are several."""
        return self._parsed.shape(path, "B")[0], math.prod(self._parsed.shape(path, "A")[1:])

    def pair(self, module: str) -> tuple[Stored, ...]:
        """Header entries of a module's B and A, and AdaLoRA's E."""
        keys = self._parsed.pairs[self._path(module)]
        return tuple(self.stored[keys[factor]] for factor in ("B", "A", "E") if factor in keys)

    def scale(self, module: str) -> float:
        """The module's own alpha / r (or alpha / sqrt(r)), from the config."""
        return self._meaning.scale(self._path(module))

    def wide(self, module: str) -> torch.dtype:
        """float64 if a factor is stored so, otherwise float32: the precision for results made from this module."""
        return torch.promote_types(common_type(each.dtype for each in self.pair(module))[0], torch.float32)

    def size(self) -> int:
        """Bytes of the weights file."""
        return self._weights.size

    def tensor_bytes(self) -> int:
        """Bytes in all tensors: the file without its header."""
        return sum(stored.size for stored in self.stored.values())

    def _path(self, module: str) -> str:
        return module if module in self.layouts else stored_path(module)

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def lora(self, module: str) -> LoRA:
        """One module's pair, in units of `scaling` and in its stored type: in float32 if that type is narrower and B
        must be scaled; in the wider type if the two factors differ.

        Raises:
            AdapterFormatError: it cannot be read, or holds NaN or Inf.
        """
        pair, scale = self.unscaled(module)
        wide, mixed = self.wide(module), pair.factors[0].dtype != pair.factors[1].dtype
        return scaled(pair.map(lambda t: t.to(wide) if mixed or t.dtype == torch.float64 else t), scale)

    def unscaled(self, module: str) -> tuple[LoRA, float]:
        """One module's pair with the file's numbers, and its scale in units of `scaling`. In a sum the scale goes into
        the float64 weights, since multiplying it into B would round in float32.

        Raises:
            AdapterFormatError: as in `lora`.
        """
        path = self._path(module)
        layout = self.layouts[path]
        if self._cached is None or self._cached[0] != path:
            self._cached = (path, *self._pair(path))
        _, B, A = self._cached
        if layout.kind != "parameter":
            self._cached = None
        return layout.unpacked(B, A, layout.expert(path, module)), self._meaning.scale(path, self.scaling)

    def head(self, path: str) -> Tensor:
        """One tensor other than a pair; an added bias in units of `scaling`, like the update it is part of."""
        key, kind = self._parsed.beside[path]
        self._foretell([key], path)
        tensor, _ = self._tensor(key)
        if kind == "added":
            factor = self._meaning.scale(path.removesuffix(".lora_B.bias"), self.scaling)
            if factor != 1:
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
        return tensor

    def check(self) -> None:
        """Read every number once, in pieces of a few MB, so that large files take time but no memory.

        Raises:
            AdapterFormatError: a number is NaN, Inf or absurdly large, or an update could be.
        """
        found = largest_of_each(self._weights, self.stored)
        for key, size in found.items():
            self._check_size(key, size)
        for path, keys in self._parsed.pairs.items():
            self._check_update(path, [found[key] for key in keys.values()])

    def sha256(self) -> str:
        """SHA-256 of the weights file; raises if the file has changed since it was opened."""
        return self._weights.sha256()

    def _pair(self, path: str) -> tuple[Tensor, Tensor]:
        keys = self._parsed.pairs[path]
        self._foretell(keys.values(), path)
        read = {factor: self._tensor(key) for factor, key in keys.items()}
        self._check_update(path, [size for _, size in read.values()])
        (B, _), (A, _) = read["B"], read["A"]
        if "E" in keys:
            E = read["E"][0]
            B, A = B.double(), A.double() * E.double()  # exact, unless the factors are float64 themselves
            if not len(A):  # AdaLoRA pruned the module away: a zero update
                B, A = B.new_zeros(len(B), 1), A.new_zeros(1, A.shape[1])
        return B, A

    def _check_tied(self) -> None:
        """Let `tied_pairs` compare the pairs whose names and shapes allow them to be one weight."""
        tied = [path for path in self.layouts if may_be_embedding(plain(path)) and not self.layouts[path].experts]
        for one, other in itertools.combinations(tied, 2):
            if {*self.update_shape(one)} == {*self.update_shape(other)}:
                try:
                    check_tied(one, self.unscaled(one), other, self.unscaled(other))
                except AdapterFormatError as error:
                    raise self._named(error) from error

    def same(self, key: str, other: str) -> bool:
        """Whether two stored tensors have the same type, shape and bytes."""
        return same_bytes(self._weights, self.stored[key], self.stored[other])

    def row(self, head: str, number: int) -> Tensor:
        """One row of a tensor other than a pair, in float64."""
        stored = self.stored_head(head)
        size = stored.size // stored.shape[0]
        begin = stored.begin + number * size
        return tensor_of(self._weights, replace(stored, shape=stored.shape[1:], begin=begin, size=size)).double()

    def _check_copies(self) -> None:
        """Raise `AdapterFormatError` if the file has one tensor under two names with different numbers."""
        for key, others in copies_in(self._parsed).items():
            if not any(self.same(key, other) for other in others):
                raise AdapterFormatError(
                    f"{quoted(key, 120)} and {quoted(others[0], 120)} are the same tensor to peft, which keeps only "
                    f"one, but their numbers differ: the file is damaged, or was changed after peft wrote it. Save the "
                    f"adapter again with peft."
                )

    def _heads_by_tie(self) -> Iterator[str]:
        beside = self._parsed.beside if self._parsed.config.get("ensure_weight_tying") else {}
        heads = [key for key, kind in beside.values() if kind == "head"]
        for name, (key, kind) in beside.items():
            if kind == "base" and name.endswith(".weight") and ".original_module." not in name:
                yield from [name] if any(self.same(key, head) for head in heads) else []

    def _foretell(self, keys: Collection[str], name: str) -> None:
        needed = allocation.bytes_to_read(self.stored[key] for key in keys)
        allocation.check(needed, f"{self.directory}: reading module {quoted(name)}", self.limits)

    def _tensor(self, key: str) -> tuple[Tensor, float]:
        """A tensor, and its largest absolute value (0 if it is not floating-point)."""
        stored = self.stored[key]
        tensor = tensor_of(self._weights, stored)
        size = largest(tensor) if stored.dtype in FLOATS else 0.0
        self._check_size(key, size)
        return tensor, size

    def _check_size(self, key: str, size: float) -> None:
        try:
            check_size(key, size)
        except AdapterFormatError as error:
            raise self._named(error) from error

    def _check_update(self, path: str, sizes: list[float]) -> None:
        scale = max(self._meaning.scale(path, self.scaling), 1) * max(self.scaling, 1)
        try:
            check_update(path, self._parsed.shape(path, "A")[0], sizes, scale)
        except AdapterFormatError as error:
            raise self._named(error) from error


def scaled(lora: LoRA, factor: float) -> LoRA:
    """B times `factor`; narrow types become float32 first, since rounding B again would change the update."""
    if factor == 1:
        return lora
    B, A = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in lora.factors)
    return LoRA(B * factor, A)


def _opened(
    directory: Path, limits: Limits, allow_unknown: Collection[str], names: Mapping[str, str], *, dora: bool
) -> tuple[StrangersFile, Parsed, Meaning]:
    """The weights, still unread, and what the two files contain and mean."""
    config_path, weights_path = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    for path in (config_path, weights_path):
        if not os.path.lexists(path):
            raise AdapterFormatError(f"{directory} is not a PEFT adapter: it has no {path.name}.")
    config_file = StrangersFile(config_path)
    config = ReadOnly(json_of(config_file, limits))
    check_config(config, where=str(config_path), allow=allow_unknown, dora=dora)
    weights = StrangersFile(weights_path)
    header = {names.get(key, key): stored for key, stored in header_of(weights, limits).items()}
    asked = sum(len(config.get(field) or ()) for field in ("modules_to_save", "target_parameters"))
    limits.check("questions", asked * len(header), f"{asked:,} names for {len(header):,} tensors are too many")
    parsed = parse(config, header)
    meaning = understand(parsed, limits.pattern_seconds)
    config_file.unchanged()  # config and weights belong together
    return weights, parsed, meaning
