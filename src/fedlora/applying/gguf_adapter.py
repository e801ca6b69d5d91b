"""Writes an adapter as a GGUF file, which llama.cpp adds to its base model (`--lora`).

llama.cpp computes W + alpha / r lora_b lora_a for each pair, with one alpha for the whole file and the tensor's own r.
It takes nothing else that was trained: a saved head, a trained bias or token is named and refused, or left out if the
user says so. Names, shapes and the order of rows: `gguf_base`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters import allocation
from fedlora.adapters.card_text import base_line
from fedlora.adapters.narrowing import TYPES, common_type, name_of, narrowed_pair
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.base_folder import BaseFiles
from fedlora.applying.gguf_base import GGUFBase, base_of_file, base_of_folder, check_fits
from fedlora.applying.judge import judged
from fedlora.applying.relation import relation
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.core.lora import LoRA
from fedlora.errors import AdapterFormatError, ConfigError, escaped

NAME, CARD = "adapter.gguf", "README.md"
_MARK, _BY = "fedlora.written_by", "fedlora export --for gguf"
GGUF_TYPES = {name: TYPES[name] for name in ("float16", "bfloat16", "float32")}
_EQUAL = 2.0**-23  # alpha is a float32, and llama.cpp divides in float32


@dataclass(frozen=True)
class WrittenGGUF:
    """What was written. arch: llama.cpp's name of the base's architecture. names: module -> the base's tensor. alpha:
    the file's. folded: modules whose own scale went into lora_b. dropped: what the file leaves out. rounding: the
    relative change of the updates by writing `dtype`."""

    arch: str
    names: Mapping[str, str]
    alpha: float
    folded: tuple[str, ...]
    dropped: tuple[str, ...]
    dtype: str
    rounding: float
    notes: tuple[str, ...]


def write_gguf(
    file: AdapterFile,
    base: Path,
    out: Path,
    dtype: str | None = None,
    *,
    drop: bool = False,
    force: bool = False,
) -> WrittenGGUF:
    """Write `out`/adapter.gguf and a card.

    Args:
        base: the base model's directory, or its GGUF file. dtype: of the factors, from `GGUF_TYPES`; None: as they are
            stored, or float32 if that is wider or a scale went into them. drop: leave out what llama.cpp does not take.
        force: replace what this function wrote earlier.

    Raises:
        AdapterFormatError: the adapter does not fit the base, or llama.cpp would not add all of it. ConfigError: the
            base or the target is impossible.
    """
    if dtype is not None and dtype not in GGUF_TYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(GGUF_TYPES)}; got {dtype[:40]!r}.")
    place: dict[str, Any] = {"force": force, "kind": _KIND}
    check_target(out, **place)
    try:
        given, (file, served, notes) = file, _fitted(file, base)
        names = check_fits(file, served)  # first: to leave something out helps no pair that llama.cpp cannot add
        dropped = _checked_extras(given, BaseFiles(base) if base.is_dir() else None, drop=drop)
        allocation.check(3 * allocation.bytes_to_read(file.stored.values()), "writing GGUF", file.limits)
        alpha, folded = _alpha(file)
        wide = common_type(each.dtype for path in names for each in file.pair(path))[0]
        wide = torch.float32 if folded or wide == torch.float64 else wide
        stored = GGUF_TYPES[dtype] if dtype else wide
        tensors, rounding = _tensors(file, served, names, alpha, folded, stored)
    except AdapterFormatError as error:
        known = escaped(str(file.directory)) in str(error)
        raise error if known else AdapterFormatError(f"{file.directory}: {str(error).rstrip('.')}.") from error
    with replacing_folder(out, **place) as building:
        _write(building / NAME, served.arch, alpha, tensors)
        files.write(building / CARD, _card(file, served.arch, len(names)))
    return WrittenGGUF(served.arch, names, alpha, folded, dropped, name_of(stored), rounding, notes)


# -------------------------------------------------------------------------------------------------------------- inside


def _checked_extras(file: AdapterFile, base: BaseFiles | None, *, drop: bool) -> tuple[str, ...]:
    """Names of the tensors other than pairs, which the file leaves out, without mere copies of the base's own. Raises
    unless the user agreed."""
    added = next((name for name in file.heads if file.kind(name) == "added"), None)
    if added is not None:
        raise AdapterFormatError(
            f"llama.cpp takes no biases of the update (lora_bias), such as {added!r}, and --drop does not help, as "
            f"they are part of the update; `fedlora export --for merged` writes the whole"
        )
    lost = tuple(name for name in file.heads if not (base is not None and _is_copy(file, name, base)))
    if lost and not drop:
        kinds = Counter(map(file.kind, lost))
        what = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(kinds.items()))
        raise AdapterFormatError(
            f"llama.cpp would not get {len(lost)} tensors trained or stored beside the pairs ({what}), such as "
            f"{lost[0]!r}. `fedlora export --for merged` writes the whole; --drop leaves them out, but the "
            f"result is then another model"
        )
    return lost


def _is_copy(file: AdapterFile, name: str, base: BaseFiles) -> bool:
    """Whether a tensor beside the pairs is the base's own: peft stores a copy of an adapted embedding."""
    if file.kind(name) != "base" or name not in base.stored:
        return False
    copy, own = file.head(name), base.tensor(name)
    return copy.shape == own.shape and torch.equal(copy, own.to(copy.dtype))


def _fitted(file: AdapterFile, base: Path) -> tuple[AdapterFile, GGUFBase, tuple[str, ...]]:
    """The adapter under the base's names, the base, and notes."""
    if base.is_file():
        return file, base_of_file(base), ()
    verdict = judged(file, BaseFiles(base))
    return verdict.file, base_of_folder(verdict), (*relation(verdict.file, verdict.base), *verdict.built.notes)


def _alpha(file: AdapterFile) -> tuple[float, tuple[str, ...]]:
    """The alpha that is right for most modules, and the modules for which it is not."""
    each = {path: file.scale(path) * file.ranks[path] for path in file.layouts}
    rounded = torch.tensor(list(each.values()), dtype=torch.float32).tolist()
    alpha: float = Counter(rounded).most_common(1)[0][0]
    return alpha, tuple(path for path, own in each.items() if not math.isclose(own, alpha, rel_tol=_EQUAL))


def _tensors(
    file: AdapterFile,
    base: GGUFBase,
    names: Mapping[str, str],
    alpha: float,
    folded: tuple[str, ...],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], float]:
    """Name -> tensor of the GGUF file, and the relative rounding over all modules."""
    found, sizes, moves = {}, [], []
    for path, name in names.items():
        pair, scale = file.unscaled(path)
        if path in folded:
            B, A = pair.map(lambda t: t.double()).factors
            pair = LoRA(B * (scale * pair.rank / alpha), A)
        pair, moved = narrowed_pair(pair, dtype, path)
        B, A = pair.factors
        sizes.append(pair.norm())
        moves.append(moved)
        embedding = file.layouts[path].kind == "embedding"  # here A is (r, vocabulary), and llama.cpp looks up its rows
        found[f"{name}.lora_a"] = A.mT.contiguous() if embedding else A
        found[f"{name}.lora_b"] = B if embedding else base.ordered(name, B)
    whole = math.hypot(*sizes)
    return found, math.hypot(*moves) / whole if whole else 0.0


def _write(path: Path, arch: str, alpha: float, tensors: Mapping[str, Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_string(_MARK, _BY)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _card(file: AdapterFile, arch: str, modules: int) -> str:
    return (
        f"---\n{base_line(file.base_model)}library_name: gguf\ntags:\n- lora\n- fedlora\n---\n\n"
        f"# A LoRA adapter for llama.cpp\n\n{modules} modules of a base model of architecture {arch}. "
        f"`llama-cli -m BASE.gguf --lora {NAME}` adds them to that model.\n"
    )


def _not_ours(folder: Path) -> str | None:
    """Why `_BY` did not write a folder, in words."""
    import gguf

    try:
        fields = gguf.GGUFReader(folder / NAME).fields
        said = bytes(fields[_MARK].parts[-1]).decode() if _MARK in fields else ""
    except (ValueError, IndexError, OSError, OverflowError):
        said = ""
    return None if said == _BY else f"holds an {NAME} that `{_BY}` did not write"


_KIND = FolderKind("an adapter for llama.cpp", NAME, r"adapter\.gguf|README\.md", _not_ours)
