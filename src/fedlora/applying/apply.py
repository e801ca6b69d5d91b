"""Writes an adapter into its full base model, for serving without PEFT.

transformers loads the base and saves the result; peft says what each update is (`judge.py`). This module adds the
updates in float64 and rounds once. Then it checks itself: each of peft's updates against our own reading of the file
(`updates.py`), and the written folder, loaded again, against the model in memory, bit for bit.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlora.adapters.reader import AdapterFile
from fedlora.applying.base_folder import CONFIG, BaseFiles, SideFile, copy_side_file
from fedlora.applying.card import CARD, card_of, full_card
from fedlora.applying.judge import Change, Judged, judged, ties_of, untied
from fedlora.applying.model import WAY_OUT, config_of, load, quiet, stored_type, widest
from fedlora.applying.relation import named, relation
from fedlora.applying.sums import BLOCK, Rounding, changed, converted, filled, update
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.stored import stored_bytes

_SHARD = "5GB"  # most weights in one file
Progress = Callable[[Sequence[str]], Iterable[str]]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Cost:
    """The share of the update lost by rounding to the written type. loss: over all tensors, relative. where, most: the
    tensor that loses most, and its loss. vanished: tensors in which nothing is left of the update."""

    loss: float
    where: str
    most: float
    vanished: tuple[str, ...]


@dataclass(frozen=True)
class Applied:
    """What `apply_adapter` did, or would do.

    changed, added: names of tensors in the loaded model. left_out: files and tensors of the base that are not in the
    result, with reasons. notes: for the user. cost: None if nothing was computed.
    """

    changed: tuple[str, ...]
    added: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    cost: Cost | None = None


def check_adapter(file: AdapterFile, base: BaseFiles) -> Applied:
    """Judge as `apply_adapter` does, by names and shapes only: reads no numbers of the base model.

    Raises:
        AdapterFormatError: the adapter does not fit the base model. ConfigError: the base model's files are invalid.
    """
    _, left_out = base.side_files()
    return _applied(judged(file, base), left_out)


def apply_adapter(
    file: AdapterFile,
    base: BaseFiles,
    out: Path,
    dtype: torch.dtype | None = None,
    progress: Progress = iter,
    *,
    force: bool = False,
) -> Applied:
    """Write the base model with the adapter in it to `out`; report what was changed, added and left out.

    Args:
        dtype: for all floating-point tensors in the result; None: the base model's own.
        force: replace a model of the same files, with nothing else in its folder.

    Raises:
        AdapterFormatError: the adapter does not fit the base model.
        ConfigError: the base's files are invalid; `out` is not empty, is the base's folder, or cannot be
            written.
    """
    kept, left_out = base.side_files()
    how: Any = {"force": force, "kind": model_folder(kept), "inputs": [file.directory, base.directory]}
    check_target(out, **how)
    verdict = judged(file, base)
    with replacing_folder(out, **how) as building:
        costs = _write(verdict, building, dtype, progress)
        for side in kept:
            if side.name not in (CONFIG, CARD):
                (building / side.name).unlink(missing_ok=True)  # transformers writes its own generation_config.json
                copy_side_file(side, building / side.name)
        applied = _applied(verdict, left_out, costs)
        counts = len(applied.changed), len(applied.added)
        card = full_card(file, named(verdict.file, base), card_of(kept), *counts, verdict.built)
        files.write(building / CARD, card)
    return applied


def model_folder(kept: Sequence[SideFile]) -> FolderKind:
    """The folder that `apply_adapter` writes for a base model with these side files."""
    copied = "|".join(re.escape(file.name) for file in kept)
    shards = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    own = f"{shards}|{re.escape(CONFIG)}|{re.escape(CARD)}|generation_config\\.json"
    return FolderKind("a model that export writes for this base", CONFIG, f"{own}|{copied}")


def _applied(verdict: Judged, left_out: Sequence[str], costs: Mapping[str, Rounding] | None = None) -> Applied:
    built, several = verdict.built, ties_of(verdict.built.model) if verdict.untied else {}
    state = built.model.state_dict()
    brought = sorted(set(verdict.changes) & built.missing)
    added = sorted({*brought, *(name for name in several if name not in verdict.base.stored)})
    notes = [*relation(verdict.file, verdict.base), *built.notes]
    notes += [f"{n} {tuple(state[n].shape)} is added: the base model has no such tensor." for n in brought]
    if several:
        notes.append(
            f"one tensor of the base model becomes several separate ones, with tie_word_embeddings = false: "
            f"{', '.join(sorted(several))}."
        )
    odd = [f"{name} (a {built.kind.__name__} has no place for this tensor)" for name in built.unexpected]
    changes = tuple(sorted(set(verdict.changes) - set(added)))
    return Applied(changes, tuple(added), (*left_out, *odd), tuple(notes), None if costs is None else _cost(costs))


def _cost(costs: Mapping[str, Rounding]) -> Cost:
    update, lost = (math.hypot(*(getattr(cost, what) for cost in costs.values())) for what in ("update", "lost"))
    where = max(costs, key=lambda name: costs[name].loss, default="")
    vanished = tuple(sorted(name for name, cost in costs.items() if cost.vanished))
    return Cost(Rounding(update, lost).loss, where, costs[where].loss if where else 0.0, vanished)


# --------------------------------------------------------------------------------------------------------- the weights


def _write(verdict: Judged, folder: Path, dtype: torch.dtype | None, progress: Progress) -> dict[str, Rounding]:
    """Write the result's weights and config; return what rounding cost each changed tensor."""
    file, base, built = verdict.file, verdict.base, verdict.built
    model, _, _ = load(built.kind, built.config, base, meta=False)
    ties = ties_of(model)
    odd = next((n for n, group in ties_of(built.model).items() if ties.get(n) != group and n in verdict.changes), None)
    if odd is not None:
        raise AdapterFormatError(
            f"{file.directory}: it changes {odd!r}, which the base model's config ties but its files store with "
            f"different numbers: it is unclear which of the two it means."
        )
    if verdict.untied:
        for name, group in ties.items():
            if name != group[0]:
                _put(model, name, nn.Parameter(_tensor(model, name).clone(), requires_grad=False))
        model.config = untied(model.config)
    costs: dict[str, Rounding] = {}
    digests = dict(_change(verdict, model, dtype, progress, costs))
    with quiet():
        model.save_pretrained(folder, max_shard_size=_SHARD)
    del model
    gc.collect()  # modules refer to each other, and the next line loads another model
    _check_written(verdict, folder, digests)
    return costs


def _change(
    verdict: Judged, model: nn.Module, dtype: torch.dtype | None, progress: Progress, costs: dict[str, Rounding]
) -> Iterator[tuple[str, tuple[torch.dtype, str]]]:
    """Change the model in place; yield each tensor's name, new type and digest."""
    base, layers, ties = verdict.base, filled(verdict.file, verdict.beside), ties_of(model)
    for name in progress(list(model.state_dict())):
        group = ties.get(name, (name,))
        if name != group[0]:
            continue  # changed together with the first name
        before = _tensor(model, name)
        stored = next((kind for each in group if (kind := stored_type(base, each)) is not None), None)
        if stored is not None and torch.promote_types(stored, before.dtype) != before.dtype:
            raise ConfigError(f"transformers narrows {name!r} from {stored} to {before.dtype} as it loads. {WAY_OUT}.")
        kind = (dtype or stored or widest(base)) if before.is_floating_point() else before.dtype
        changes = next((verdict.changes[each] for each in group if each in verdict.changes), ())
        if changes:
            after, costs[name] = _sum(verdict.file, name, before, changes, layers, kind)
        else:
            after = converted(name, before, kind)
        digest = _digest(after)
        if changes and after.dtype == before.dtype:
            before.copy_(after)  # in place, because memory freed in small pieces is not returned to the system
        elif after.dtype != before.dtype:
            is_parameter = name.rpartition(".")[2] in _owner(model, name)._parameters
            new = nn.Parameter(after, requires_grad=False) if is_parameter else after
            for each in group:
                _put(model, each, new)
        yield from ((each, (kind, digest)) for each in group)


def _sum(
    file: AdapterFile,
    name: str,
    before: Tensor,
    changes: Sequence[Change],
    layers: Mapping[str, Any],
    kind: torch.dtype,
) -> tuple[Tensor, Rounding]:
    """One changed tensor of the result, and its rounding cost."""
    value, delta, magnitude = None, None, None
    for change in changes:
        if change.kind == "update":
            delta = update(file, change.source, layers[change.source], before.shape)
            continue
        if change.kind == "magnitude":
            magnitude = file.tensor(file.magnitudes[change.source]).double()
        else:
            value = file.head(change.source)
    return changed(name, before, kind, value=value, delta=delta, magnitude=magnitude)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _tensor(model: nn.Module, name: str) -> Tensor:
    tensor: Tensor = getattr(_owner(model, name), name.rpartition(".")[2])
    return tensor.detach()


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner = _owner(model, name)
    held: dict[str, Any] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    held[name.rpartition(".")[2]] = tensor


def _check_written(verdict: Judged, folder: Path, digests: Mapping[str, tuple[torch.dtype, str]]) -> None:
    """Load the written folder as any user would, and compare every tensor with the model in memory, bit for bit.

    Raises:
        AdapterFormatError: a tensor differs, or would be made up on loading.
    """
    file, base, written = verdict.file, verdict.base, BaseFiles(folder)
    kind = verdict.built.kind
    model, missing, unexpected = load(kind, config_of(written), written, meta=False)
    state = model.state_dict()
    odd = [*missing, *unexpected, *(digests.keys() ^ state.keys())]
    odd += [n for n, (dtype, digest) in digests.items() if n in state and _digest(state[n].to(dtype)) != digest]
    known = {*verdict.built.unexpected, *ties_of(verdict.built.model), *written.stored}
    twice = sorted(set(base.stored) - known)
    if len(twice) > len(set(written.stored) - set(base.stored) - verdict.built.missing):
        raise ConfigError(
            f"the base model in {base.directory} stores a tensor under two names, {twice[0]!r} and another."
        )
    if odd:
        raise AdapterFormatError(
            f"{file.directory}: the written model differs when loaded again: {odd[0]!r} ({len(odd):,} such tensors). "
            f"Nothing is written. {WAY_OUT}."
        )


def _digest(tensor: Tensor) -> str:
    found = hashlib.sha256(str(tuple(tensor.shape)).encode())
    for piece in torch.split(tensor.contiguous().reshape(-1), BLOCK):
        found.update(stored_bytes(piece))
    return found.hexdigest()
