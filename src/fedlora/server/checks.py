"""The border: what an upload must be before any of it is used. The server repairs nothing.

Each refusal names the client and the reason, and nothing of a refused upload reaches the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA, named_tensors
from fedlora.core.messages import Client, Upload, checked_examples
from fedlora.core.method import Method, Roles
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.server.cancelling import require_measured
from fedlora.server.state import ServerState

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Products of two such entries, and their squares, stay far inside float64; nothing honest is near.
_LARGEST = 1e15


def check_types(upload: object) -> None:
    """Raises `UploadRefused` if this is not an `Upload` of torch tensors."""
    if not isinstance(upload, Upload) or not isinstance(upload.client, Client):
        raise UploadRefused(f"a {type(upload).__name__}", "it is not an Upload(client, num_examples, adapter).")
    client, adapter = upload.client.id, upload.adapter
    if not isinstance(adapter, Adapter) or not all(isinstance(lora, LoRA) for lora in adapter.modules.values()):
        raise UploadRefused(
            client, f"its adapter is a {type(adapter).__name__}, or has modules that are not LoRA pairs."
        )
    for name, tensor in named_tensors(adapter):
        if not isinstance(tensor, Tensor):
            raise UploadRefused(client, f"{name} is a {type(tensor).__name__}; adapters hold torch tensors.")


def check(upload: Upload, state: ServerState, roles: Roles, method: Method[Any]) -> float:
    """The upload's number of examples, if it is what this round asked for; 0: it abstains, and is not looked at.

    Raises:
        UploadRefused: with the client and the reason. It raises nothing else, whatever the upload holds.
    """
    try:
        examples = checked_examples(upload)
        if examples:
            _check_counted(upload, examples, state, roles, method)
    except UploadRefused:
        raise
    except Exception as error:  # a stranger's tensors may be of any kind: no client ends a round
        raise UploadRefused(upload.client.id, f"it cannot be read: {type(error).__name__}: {error}.") from error
    return examples


def _check_counted(upload: Upload, examples: float, state: ServerState, roles: Roles, method: Method[Any]) -> None:
    client, adapter = upload.client.id, upload.adapter

    def require(ok: bool, reason: str) -> None:
        if not ok:
            raise UploadRefused(client, reason)

    bounded = 1 / _LARGEST <= examples <= _LARGEST
    require(
        bounded, f"num_examples = {examples:g}; sums over clients hold numbers from {1 / _LARGEST:g} to {_LARGEST:g}."
    )
    require(not adapter.base, "it contains base weights; upload what `send(adapter, roles)` returns.")
    try:
        ranks = ranks_of(upload.client, state)
    except HyperparameterError as error:
        raise UploadRefused(client, str(error)) from error
    _check_modules(upload, ranks, state.start, roles, method)
    heads = state.heads if roles.heads == "shared" else {}
    require(
        adapter.heads.keys() == heads.keys(),
        f"heads {sorted(adapter.heads)} were sent; this round shares {sorted(heads)}.",
    )
    for name, head in heads.items():
        got, want = tuple(adapter.heads[name].shape), tuple(head.shape)
        require(got == want, f"head {name!r} has shape {got}; it must be {want}.")
    for name, tensor in named_tensors(adapter):
        if tensor.dtype not in _DTYPES:
            require(False, f"{name} is {tensor.dtype}; adapters are float16, bfloat16, float32 or float64.")
        if tensor.layout != torch.strided or tensor.is_meta:
            require(False, f"{name} is {tensor.layout} on {tensor.device.type}; adapters are plain dense tensors.")
        low, high = torch.aminmax(tensor.detach()) if tensor.numel() else (0.0, 0.0)
        if not (float(low) >= -_LARGEST and float(high) <= _LARGEST):  # NaN is neither
            bad = int((~torch.isfinite(tensor)).sum())
            require(
                not bad,
                f"{name} holds NaN or Inf in {bad} of {tensor.numel()} entries: training diverged there (a lower "
                f"learning rate or gradient clipping helps).",
            )
            require(
                False, f"{name} holds {float(tensor.detach().abs().max()):.1e}; the server sums up to {_LARGEST:g}."
            )
    for name, head in heads.items():
        fits = bool(torch.isfinite(adapter.heads[name].detach().to(head.dtype)).all())
        require(fits, f"head {name!r} holds values beyond the server's {head.dtype}.")
    if roles.both_shared:  # one factor beside a common one has no terms of the client's own
        require_measured(upload)


def _check_modules(upload: Upload, ranks: Mapping[str, int], start: Adapter, roles: Roles, method: Method[Any]) -> None:
    client, modules = upload.client.id, upload.adapter.modules
    asked = ranks if roles.shared else {}
    lacks, extra = sorted(asked.keys() - modules.keys()), sorted(modules.keys() - asked.keys())
    if lacks or extra:
        raise UploadRefused(
            client,
            f"it must hold exactly the declared modules: {len(lacks)} are missing {lacks[:3]}, "
            f"{len(extra)} are unexpected {extra[:3]}.",
        )
    for name, lora in modules.items():
        r, (B, A) = ranks[name], start.modules[name].factors
        if why := unserved(method, roles, r, start.modules[name].rank):
            raise UploadRefused(client, f"{why} in {name!r}.")
        got = {factor: tuple(t.shape) for factor, t in lora.tensors().items()}
        shapes = {"B": (B.shape[0], r), "A": (r, A.shape[1])}
        expected = {factor: shapes[factor] for factor in roles.shared}
        if got != expected:
            raise UploadRefused(client, f"module {name!r} has factors {got}; this round shares {expected}.")


def unserved(method: Method[Any], roles: Roles, rank: int, start: int) -> str:
    """Why the method cannot serve this rank, beside a common start of rank `start`; "" if it can."""
    if method.one_rank and rank != start:
        return (
            f"{method.name} averages factors entry by entry, so every client has the start's rank {start}, not {rank}; "
            f"glora, svd, flexlora and flora serve mixed ranks"
        )
    if not roles.both_shared and rank > start:
        return f"a common factor of {method.name} has the start's rank {start}, and {rank} is larger"
    return ""


def ranks_of(client: Client, state: ServerState) -> dict[str, int]:
    """Module -> r, for the modules that the client holds. Raises `HyperparameterError` for a module not adapted."""
    if isinstance(client.rank, Mapping):
        unknown = sorted(set(client.rank) - set(state.modules))
        if unknown:
            raise HyperparameterError(
                f"client {client.id!r} declares a rank for {unknown[0]!r}, which is not an adapted module. The "
                f"modules are {', '.join(list(state.modules)[:3])}, ..."
            )
    return client.ranks(state.modules)
