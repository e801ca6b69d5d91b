"""The full model with an adapter written into it, for serving without PEFT.

transformers loads the base model and saves the result, peft says what each update is (`judge.py`). The sums are made
here, in float64, and rounded once. Then the program checks itself: each update of peft's against the adapter file's own
reading, while it is added; and the written folder, loaded again, against what was in memory, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from fedlora.adapters import allocation
from fedlora.adapters.mark import marked, only_by
from fedlora.adapters.reader import PREFIX, WEIGHTS_FILE, AdapterFile
from fedlora.adapters.untrusted_files import StrangersFile, tensor_of
from fedlora.applying.base_folder import CONFIG, BaseFiles, SideFile, copy_side_file
from fedlora.applying.card import CARD, card_of, full_card
from fedlora.applying.judge import NAME, Change, Judged, judged, ties_of, untied
from fedlora.applying.model import WAY_OUT, config_of, load, quiet, stored_type, widest
from fedlora.applying.relation import relation
from fedlora.applying.sums import BLOCK, Rounding, changed, converted
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.stored import stored_bytes

_APPLY = "fedlora apply"
_FACTOR = re.compile(r"(\.lora_(?:embedding_)?[ABE])(\.weight)?$")
Progress = Callable[[Sequence[str]], Iterable[str]]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Applied:
    """What `apply` does, or would do.

    changed, added: names of tensors, as the model in memory has them. left_out: files and tensors of the base model that
    are not part of the result, with reasons. notes: lines for a reader. loss: of the update by rounding it to the type
    that is written, relative. worst: the tensor that loses most, and how much. vanished: tensors in which nothing of the
    update is left. The last three are known where it was written.
    """

    changed: tuple[str, ...]
    added: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    loss: float = 0.0
    worst: tuple[str, float] = ("", 0.0)
    vanished: tuple[str, ...] = ()


def check_adapter(file: AdapterFile, base: BaseFiles) -> Applied:
    """The judgement of `apply_adapter`, by names and shapes: no number of the base model is read.

    Raises:
        AdapterFormatError: the adapter does not fit the base model. ConfigError: the base model's files are unsound.
    """
    _, left_out = base.side_files()
    return _applied(file, base, judged(file, base), left_out, {})


def apply_adapter(
    file: AdapterFile,
    base: BaseFiles,
    out: Path,
    dtype: torch.dtype | None = None,
    progress: Progress = iter,
    *,
    force: bool = False,
) -> Applied:
    """Write the base model with the adapter in it to `out`; tell what was changed, added and left out.

    Args:
        dtype: of all floating-point tensors of the result; None: as the base model has them.
        force: a model of the same files that `apply` wrote is replaced.

    Raises:
        AdapterFormatError: the adapter does not fit the base model, or the work would take more memory than its limit.
        ConfigError: the base's files are unsound; `out` is not empty, lies in an input, or cannot be written.
    """
    kept, left_out = base.side_files()
    how: Any = {"force": force, "kind": model_folder(kept), "inputs": [file.directory, base.directory]}
    _refuse_inside(file.directory, base.directory, out)
    check_target(out, **how)
    verdict = judged(file, base)
    _check_memory(file, base, verdict)
    with replacing_folder(out, **how) as building:
        costs = _written(file, base, verdict, building, kept, dtype, progress)
        applied = _applied(file, base, verdict, left_out, costs)
        card = full_card(file, card_of(kept), len(applied.changed), len(applied.added), verdict.built)
        files.write(building / CARD, card)
    return applied


def model_folder(kept: Sequence[SideFile]) -> FolderKind:
    """What `apply_adapter` writes for a base model with these files beside its weights."""
    copied = "|".join(re.escape(file.name) for file in kept)
    shards = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    mark = only_by(_APPLY, "model*.safetensors")
    own = f"{shards}|{re.escape(CONFIG)}|{re.escape(CARD)}|generation_config\\.json"
    return FolderKind("a model that apply writes for this base", CONFIG, f"{own}|{copied}", mark)


def _refuse_inside(adapter: Path, base: Path, out: Path) -> None:
    """Raises `ConfigError` where the result would lie in one of the folders that it is made from."""
    place = Path(os.path.realpath(out))
    for name, folder in (("the adapter", adapter), ("the base model", base)):
        if Path(os.path.realpath(folder)) in (place, *place.parents):
            raise ConfigError(f"{out} is the folder of {name}, or lies in it; name another directory.")


def _check_memory(file: AdapterFile, base: BaseFiles, verdict: Judged) -> None:
    """The whole model in its widest type, twice where transformers stores tensors otherwise than it holds them; the
    adapter in float64; and the update of the largest tensor in float64."""
    state = verdict.built.model.state_dict()
    width = torch.finfo(widest(base)).bits // 8
    whole = width * sum(tensor.numel() for tensor in state.values())
    twice = any(name not in state for name in base.stored if name not in verdict.built.unexpected)
    adapter = 8 * sum(math.prod(stored.shape) for stored in file.stored.values())
    largest = max((8 * state[name].numel() for name in verdict.changes), default=0)
    needed = whole * (2 if twice else 1) + adapter + 2 * largest + 2**26
    allocation.check(needed, f"loading the base model in {base.directory} and changing it", file.limits)


def _applied(
    file: AdapterFile, base: BaseFiles, verdict: Judged, left_out: Sequence[str], costs: Mapping[str, Rounding]
) -> Applied:
    update, lost = (math.hypot(*(getattr(cost, what) for cost in costs.values())) for what in ("update", "lost"))
    worst = max(costs, key=lambda name: costs[name].loss, default="")
    added = sorted(name for name in verdict.changes if name in verdict.built.missing)
    if verdict.untied:
        added = sorted({*added, *(name for name in ties_of(verdict.built.model) if name not in base.stored)})
    odd = [f"{name} (a tensor that {verdict.built.kind.__name__} has no place for)" for name in verdict.built.unexpected]
    return Applied(
        changed=tuple(sorted(set(verdict.changes) - set(added))),
        added=tuple(added),
        left_out=(*left_out, *odd),
        notes=(*relation(file, base), *verdict.notes, *_told(file, verdict, added)),
        loss=Rounding(update, lost).loss,
        worst=(worst, costs[worst].loss if worst else 0.0),
        vanished=tuple(sorted(name for name, cost in costs.items() if cost.vanished)),
    )


def _told(file: AdapterFile, verdict: Judged, added: Sequence[str]) -> Iterable[str]:
    state = verdict.built.model.state_dict()
    for name in added:
        if name in verdict.built.missing:
            yield f"{name} {tuple(state[name].shape)} is added: the base model has no such tensor."
    if verdict.untied:
        yield (
            f"what was one tensor in the base model becomes several, and tie_word_embeddings = false: "
            f"{', '.join(sorted(ties_of(verdict.built.model)))} stand by themselves."
        )


# -------------------------------------------------------------------------------------------------------- the numbers


def _written(
    file: AdapterFile, base: BaseFiles, verdict: Judged, folder: Path, kept: Sequence[SideFile], dtype: torch.dtype | None,
    progress: Progress,
) -> dict[str, Rounding]:  # fmt: skip
    """All files of the result but its card; returns what rounding has cost each changed tensor."""
    built = verdict.built
    model, _, _ = load(built.kind, built.config, base, meta=False, most=file.limits.tensors)
    ties = ties_of(model)
    odd = [name for name, group in ties_of(built.model).items() if ties.get(name) != group and name in verdict.changes]
    if odd:
        raise AdapterFormatError(
            f"{file.directory}: it changes {odd[0]!r}, which the base model's config ties and its files store with different "
            f"numbers: which of the two it means is not known."
        )
    if verdict.untied:
        _split(model)
        model.config = untied(model.config)
    costs, digests = _change(file, base, verdict, model, dtype, progress)
    with quiet():
        model.save_pretrained(folder, max_shard_size=max(base.largest_file, 2**16))
    for path in folder.glob("model*.safetensors"):
        _mark(path)
    for side in kept:
        if side.name not in (CONFIG, CARD):
            (folder / side.name).unlink(missing_ok=True)
            copy_side_file(side, folder / side.name)
    del model
    _check_written(file, base, built.kind, folder, digests)
    return costs


def _split(model: nn.Module) -> None:
    """Each use of a tied parameter gets one of its own."""
    for name, group in ties_of(model).items():
        if name != group[0]:
            _put(model, name, nn.Parameter(model.get_parameter(name).detach().clone(), requires_grad=False))


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner = _owner(model, name)
    held: dict[str, Any] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    held[name.rpartition(".")[2]] = tensor


Digests = dict[str, tuple[torch.dtype, str]]


def _change(
    file: AdapterFile, base: BaseFiles, verdict: Judged, model: Any, dtype: torch.dtype | None, progress: Progress
) -> tuple[dict[str, Rounding], Digests]:
    """Changes the model in place; returns what rounding cost, and a digest of every tensor as it now is."""
    layers = _filled(file, verdict)
    costs: dict[str, Rounding] = {}
    digests: Digests = {}
    ties, names = ties_of(model), list(model.state_dict())
    for name in progress(names):
        group = ties.get(name, (name,))
        if name != group[0]:
            continue  # changed with the first
        before = _tensor(model, name)
        stored = next((kind for each in group if (kind := stored_type(base, each)) is not None), widest(base))
        kind = (dtype or stored) if before.is_floating_point() else before.dtype
        changes = next((verdict.changes[each] for each in group if each in verdict.changes), ())
        if changes:
            after, costs[name] = _sum(file, name, before, changes, layers, kind)
        else:
            after = converted(name, before, kind)
        new = nn.Parameter(after, requires_grad=False) if name in dict(_owner(model, name)._parameters) else after
        for each in group:
            _put(model, each, new)
        del before
        digests |= dict.fromkeys(group, (kind, _digest(after)))
    return costs, digests


def _sum(
    file: AdapterFile, name: str, before: Tensor, changes: Sequence[Change], layers: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Rounding]:
    """One tensor of the result."""
    value: Tensor | None = None
    delta: Callable[[int, int], Tensor] | None = None
    for change in changes:
        if change.kind == "update":
            dense = _update(file, change.source, layers[change.source], before.shape)
            delta = lambda i, j, dense=dense: dense[i:j]  # noqa: E731
            continue
        head = file.head(change.source)
        if change.kind == "bias":
            delta = lambda i, j, head=head: head[i:j].double().reshape(-1, 1)  # noqa: E731
        elif change.kind == "rows":
            value = before.to(torch.promote_types(before.dtype, head.dtype), copy=True)
            value[list(change.rows)] = head.to(value.dtype)
        else:
            value = head
    return changed(name, before, dtype, value=value, delta=delta)


def _filled(file: AdapterFile, verdict: Judged) -> dict[str, Any]:
    """peft's layers with the file's factors in them, in float64. The rest of its model stays on the meta device."""
    weights = StrangersFile(file.directory / WEIGHTS_FILE)
    factors = {key: _FACTOR.sub(rf"\1.{NAME}\2", key) for key in file.stored if _FACTOR.search(key)}
    state = {name: tensor_of(weights, file.stored[key]).double() for key, name in factors.items()}
    told = verdict.peft.load_state_dict(state, strict=False, assign=True)
    if told.unexpected_keys:
        raise AdapterFormatError(f"{file.directory}: peft has no place for {told.unexpected_keys[0]!r}.")
    found = {name.removeprefix(PREFIX): module for name, module in verdict.peft.named_modules()}
    return {path: module for path, module in found.items() if isinstance(module, LoraLayer)}


@torch.no_grad()
def _update(file: AdapterFile, path: str, layer: Any, shape: Sequence[int]) -> Tensor:
    """What peft adds to a weight, in float64 and as the weight is kept, as a matrix. It must be what the file's own
    reading says, one way round or the other: that is peft's to know.

    Raises:
        AdapterFormatError: the two differ.
    """
    if isinstance(layer, ParamWrapper):  # it gives the update the type and device of the weight, which is on meta
        layer.get_param = lambda: torch.empty(0, dtype=torch.float64)
    delta = layer.get_delta_weight(NAME)
    if delta.dim() + 1 == len(shape) and shape[0] == 1:
        delta = delta[None]  # of one expert
    if tuple(delta.shape) != tuple(shape):
        raise AdapterFormatError(f"{file.directory}: peft's update of {path!r} is {tuple(delta.shape)}, the weight {tuple(shape)}.")
    layout = file.layouts[path]
    parts = delta if layout.kind == "parameter" and delta.dim() == 3 else [delta.flatten(1)]
    for module, part in zip(layout.modules(path), parts, strict=True):
        pair, scale = file.unscaled(module)
        B, A = (factor.double() for factor in pair.factors)
        if not any(_agrees(part, left * scale, right) for left, right in ((B, A), (A.mT, B.mT))):
            raise AdapterFormatError(
                f"{file.directory}: peft's update of {path!r} is another one than the file's own reading says. Nothing is "
                f"written; this is a defect of one of them."
            )
    return delta.flatten(1)


def _agrees(part: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether part = left @ right up to the rounding of float64, by blocks of rows."""
    if part.shape != (left.shape[0], right.shape[1]):
        return False
    step = max(1, BLOCK // max(1, right.shape[1]))
    return all(
        bool(((part[i : i + step] - left[i : i + step] @ right).abs()
              <= 1e-9 * (left[i : i + step].abs() @ right.abs()) + 1e-300).all())
        for i in range(0, len(left), step)
    )  # fmt: skip


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _tensor(model: nn.Module, name: str) -> Tensor:
    tensor: Tensor = getattr(_owner(model, name), name.rpartition(".")[2])
    return tensor.detach()


# ---------------------------------------------------------------------------------------------------------- the files


def _mark(path: Path) -> None:
    """Says in the file's header who wrote it: transformers lets nobody say it."""
    new = path.with_name(f"{path.name}.new")
    with path.open("rb") as source, new.open("xb") as target:
        length = struct.unpack("<Q", source.read(8))[0]
        header = json.loads(source.read(length)) | {"__metadata__": marked(_APPLY)}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        target.write(struct.pack("<Q", len(raw)) + raw)
        shutil.copyfileobj(source, target, 2**23)
    os.replace(new, path)


def _check_written(file: AdapterFile, base: BaseFiles, kind: Any, folder: Path, digests: Digests) -> None:
    """Loads the written folder as anybody would, and compares every tensor with what was in memory, bit for bit.

    Raises:
        AdapterFormatError: something differs, or would be made up on loading.
    """
    written = BaseFiles(folder)
    model, missing, unexpected = load(kind, config_of(written), written, meta=False, most=file.limits.tensors)
    state = model.state_dict()
    odd = [*missing, *unexpected, *(digests.keys() ^ state.keys())]
    odd += [name for name, (dtype, digest) in digests.items() if name in state and _digest(state[name].to(dtype)) != digest]
    if odd:
        raise AdapterFormatError(
            f"{file.directory}: the model that transformers wrote does not load as it was made: {odd[0]!r} ({len(odd):,} such "
            f"tensors). Nothing is written. {WAY_OUT}."
        )


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().contiguous().reshape(-1)
    found = hashlib.sha256(str(tuple(tensor.shape)).encode())
    for i in range(0, len(content), BLOCK):
        found.update(bytes(stored_bytes(content[i : i + BLOCK])))
    return found.hexdigest()
