"""Checks an upload before any of it is used: the declared modules, roles, shapes and types, with finite numbers.

The server repairs nothing. Each refusal names the client and the reason, and no refused upload reaches the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA, compute_dtype, named_tensors
from fedlora.core.messages import Client, Upload
from fedlora.core.method import Roles
from fedlora.errors import UploadRefused
from fedlora.linalg.batches import norms

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sizes that the server can calculate with, by the dtype in which it keeps them. Nothing honest is near either end.
# LEAST: a quarter of the exponents stays free below it, for weights and for entries smaller than the largest, so a mean
# never becomes zero where it is stored. Squares are taken in float64, or relative to the largest, so they stay normal.
# _MOST: squares stay finite up to 2^3 times that. The norms of a readout's factors may multiply to sqrt(r) times the
# mean update, so up to r = 64 what a client gets after a mean of such uploads, and returns with a step, fits as well.
LEAST = {torch.float32: 2.0**-96, torch.float64: 2.0**-768}
_LARGEST = {dtype: math.sqrt(torch.finfo(dtype).max) for dtype in LEAST}
_MOST = {dtype: 2.0**-3 * size for dtype, size in _LARGEST.items()}
_STEP = 1 + 2.0**-10  # a client that was sent something larger than _MOST may return it, and train a step
_ROUGH = 2.0**-40  # squares of entries may underflow in a norm below this


def check_types(upload: object) -> None:
    """Raises `UploadRefused` if this is not an `Upload` of torch tensors."""
    if not isinstance(upload, Upload) or not isinstance(upload.client, Client):
        raise UploadRefused(f"a {type(upload).__name__}", "it is not an Upload(client, num_examples, adapter).")
    client, adapter = upload.client.id, upload.adapter
    if not isinstance(adapter, Adapter) or not all(isinstance(lora, LoRA) for lora in adapter.modules.values()):
        raise UploadRefused(
            client, f"its adapter is a {type(adapter).__name__}, or has modules that are not LoRA pairs."
        )
    if not all(isinstance(tensor, Tensor) for tensor in adapter.tensors()):
        name, tensor = next((name, t) for name, t in named_tensors(adapter) if not isinstance(t, Tensor))
        raise UploadRefused(client, f"{name} is a {type(tensor).__name__}; adapters hold torch tensors.")


def check_count(upload: Upload) -> None:
    """Raises `UploadRefused` if num_examples would vanish in a sum over clients, or make the others vanish."""
    if not 1e-12 <= upload.num_examples <= 1e12:
        raise UploadRefused(
            upload.client.id,
            f"num_examples = {upload.num_examples:g}: sums over clients can hold numbers from 1e-12 to 1e12.",
        )


def check_adapter(
    upload: Upload,
    *,
    ranks: Mapping[str, int],
    roles: Roles,
    start: Adapter,
    heads: Mapping[str, Tensor],
    begun: Callable[[], Mapping[str, LoRA]],
    averages: bool,
) -> None:
    """Raises `UploadRefused` unless the upload's adapter matches what this round requested from the client.

    Args:
        ranks: module -> r_i, for the modules that the client holds. roles: this round's. start: gives each module's
            (d_out, d_in) and the dtype in which the server keeps it. heads: the server's, by name. begun: what the
            client was sent, by module; called only if an upload is unusually large.
        averages: whether the method averages factors, so that one client's B multiplies another's A.
    """
    shared = [factor for factor in ("A", "B") if getattr(roles, factor) == "shared"]
    if upload.adapter.base:
        raise UploadRefused(upload.client.id, "it contains base weights; upload what `send(adapter, roles)` returns.")
    _check_modules(upload, ranks if shared else {}, shared, start)
    _check_heads(upload, heads if roles.heads == "shared" else {})
    _check_sizes(upload, _check_numbers(upload), start, heads, begun, averages)
    for name, head in upload.adapter.heads.items():
        if not bool(torch.isfinite(head.detach().to(heads[name].dtype)).all()):
            raise UploadRefused(
                upload.client.id, f"head {name!r} holds values beyond the server's {heads[name].dtype}."
            )


def _check_modules(upload: Upload, ranks: Mapping[str, int], shared: list[str], start: Adapter) -> None:
    client, got = upload.client.id, set(upload.adapter.modules)
    lacks, extra = sorted(set(ranks) - got), sorted(got - set(ranks))
    if lacks or extra:
        raise UploadRefused(
            client,
            f"it must hold exactly the declared modules: {len(lacks)} are missing {lacks[:3]}, "
            f"{len(extra)} are unexpected {extra[:3]}.",
        )
    for name, lora in upload.adapter.modules.items():
        present, r = lora.tensors(), ranks[name]
        if sorted(present) != shared:
            raise UploadRefused(
                client, f"module {name!r} carries factors {sorted(present)}; this round's roles share {shared}."
            )
        if lora.rank != r:
            raise UploadRefused(client, f"module {name!r} has rank {lora.rank}; the client's rank is {r}.")
        B, A = start.modules[name].factors
        expected = {"B": (B.shape[0], lora.rank), "A": (lora.rank, A.shape[1])}
        for factor, tensor in present.items():
            if tuple(tensor.shape) != expected[factor]:
                raise UploadRefused(
                    client,
                    f"factor {factor} of module {name!r} has shape {tuple(tensor.shape)}; "
                    f"it must be {expected[factor]}.",
                )


def _check_heads(upload: Upload, heads: Mapping[str, Tensor]) -> None:
    client, sent = upload.client.id, upload.adapter.heads
    if set(sent) != set(heads):
        raise UploadRefused(client, f"heads {sorted(sent)} were sent; this round shares {sorted(heads)}.")
    for name, head in heads.items():
        if sent[name].shape != head.shape:
            raise UploadRefused(
                client, f"head {name!r} has shape {tuple(sent[name].shape)}; it must be {tuple(head.shape)}."
            )


def _check_numbers(upload: Upload) -> list[float]:
    """The size of each tensor, in the order of `Adapter.tensors`: see `_sizes`. Raises `UploadRefused`."""
    client, tensors = upload.client.id, list(upload.adapter.tensors())

    def name(at: int) -> str:
        return [name for name, _ in named_tensors(upload.adapter)][at]

    for k, tensor in enumerate(tensors):
        if tensor.dtype not in _DTYPES:
            raise UploadRefused(
                client, f"{name(k)} is {tensor.dtype}; adapters are float16, bfloat16, float32 or float64."
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            raise UploadRefused(
                client, f"{name(k)} is {tensor.layout} on {tensor.device.type}; adapters are plain dense tensors."
            )
    # One pass answers both: a norm is finite only if every entry is.
    sizes = _sizes(tensors)
    for k, size in enumerate(sizes):
        if not math.isfinite(size) and not bool(torch.isfinite(tensors[k]).all()):
            bad = int((~torch.isfinite(tensors[k])).sum())
            raise UploadRefused(
                client,
                f"{name(k)} holds NaN or Inf in {bad} of {tensors[k].numel()} entries: training diverged there "
                f"(a lower learning rate or gradient clipping helps).",
            )
    return sizes


def _sizes(tensors: list[Tensor]) -> list[float]:
    """||X||_F of each; of a tiny one the largest |entry|, which is 0 only if all of them are."""
    return [
        float(tensor.detach().abs().max()) if size < _ROUGH and tensor.numel() else size
        for tensor, size in zip(tensors, norms(tensors), strict=True)
    ]


def kept_dtype(sent: LoRA | Tensor, held: LoRA | Tensor) -> torch.dtype:
    """Whose range sizes have to fit: float64's if a client sends it and the server's start has it, otherwise float32's.
    So no client can move the others beyond what they can send themselves."""
    both = [compute_dtype(x) if isinstance(x, LoRA) else x.dtype for x in (sent, held)]
    return torch.float64 if both == [torch.float64] * 2 else torch.float32


def too_small(what: str, size: float, dtype: torch.dtype) -> str:
    """Why a size that is not zero, but below LEAST, is refused."""
    return (
        f"{what} cannot be measured: its size is {size:.1e}, neither zero nor at least {LEAST[dtype]:.1e}, so it would "
        f"vanish in the rounding of {str(dtype).removeprefix('torch.')}. Training gives no such numbers: send zeros, "
        f"or abstain with 0 examples."
    )


def _check_sizes(
    upload: Upload,
    sizes: list[float],
    start: Adapter,
    heads: Mapping[str, Tensor],
    begun: Callable[[], Mapping[str, LoRA]],
    averages: bool,
) -> None:
    client, left = upload.client.id, iter(sizes)
    for module, lora in upload.adapter.modules.items():
        dtype = kept_dtype(lora, start.modules[module])
        factors = {factor: next(left) for factor in lora.tensors()}
        for factor, size in factors.items():
            if 0 < size < LEAST[dtype]:
                raise UploadRefused(client, too_small(f"factor {factor} of module {module!r}", size, dtype))
        size = _reach(list(factors.values()), averages)
        if not size <= _MOST[dtype]:
            sent = begun()[module].tensors()
            was = _reach(_sizes([sent[factor] for factor in factors if factor in sent]), averages)
            if not size <= min(_LARGEST[dtype], _STEP * was):
                raise UploadRefused(client, _too_large(f"the update of module {module!r} has size up to", size, dtype))
    for (head, tensor), size in zip(upload.adapter.heads.items(), left, strict=True):
        dtype = kept_dtype(tensor, heads[head])
        if 0 < size < LEAST[dtype]:
            raise UploadRefused(client, too_small(f"the head {head!r}", size, dtype))
        if not size <= _MOST[dtype] and not size <= min(_LARGEST[dtype], _STEP * _sizes([heads[head]])[0]):
            raise UploadRefused(client, _too_large(f"the head {head!r} has size", size, dtype))


def _reach(factors: list[float], averages: bool) -> float:
    """The most that the factors' norms can make of the update: NaN for a zero beside one that has overflowed."""
    return max(factors) ** 2 if averages and max(factors) > 1 else max(*factors, math.prod(factors), 0.0)


def _too_large(what: str, size: float, dtype: torch.dtype) -> str:
    return (
        f"{what} {size:.1e}, above {_MOST[dtype]:.1e}; its energy would overflow, here or after later rounds, in the "
        f"server's {str(dtype).removeprefix('torch.')}."
    )
