"""The border: what an upload must be before any of it is used. The server repairs nothing.

Each refusal names the client and the reason, and nothing of a refused upload reaches the state.

Columns may be huge and almost cancel, in bad coordinates or by intent: a small update with a large rounding error.

    terms = sum_j ||b_j|| ||a_j||        ||B A|| may be any fraction of it

Columns of 2^20 that cancel add their rounding to everybody's mean, and a rule measures a change only up to it. So an
upload that float64 cannot tell from the rounding of its own terms is refused, and the log names one whose terms are far
larger than their sum: averages of factors move by the terms, whatever the sum. A diagonal gauge, columns of 1e6 with
rows of 1e-6, has no terms that cancel: averages of factors stay exposed to it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from fedlora.core.lora import LoRA, compute_dtype, named_tensors
from fedlora.core.messages import Client, Upload, checked_examples
from fedlora.core.method import Method, Roles
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.linalg import norm, unit_roundoff
from fedlora.linalg.stacks import in_stacks, stacked
from fedlora.server.state import ServerState

log = logging.getLogger("fedlora.server")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Products of two such entries, and their squares, stay far inside float64; nothing honest is near.
_LARGEST = 1e15
_ARITHMETIC = 64 * unit_roundoff(torch.float64)  # the rounding of a float64 sum, relative to its terms
_BLURRED = 1e-3  # relative to the update: less rounding hides nothing that matters
_SILENT = 1e4  # terms of 1e4 move an average of factors by 1e2; audits themselves use coordinates of condition 1e3


def check(upload: Upload, state: ServerState, roles: Roles, method: Method[Any]) -> float:
    """The upload's number of examples, if it is what this round asked for; 0: it abstains, and is not looked at.

    Raises:
        UploadRefused: with the client and the reason. It raises nothing else, whatever the upload holds.
    """
    try:
        examples = checked_examples(upload)
        if examples and not 1 / _LARGEST <= examples <= _LARGEST:  # a share of 1e-324 would be a weight of 0
            raise UploadRefused(
                upload.client.id, f"num_examples = {examples:g}; sums hold from {1 / _LARGEST:g} to {_LARGEST:g}."
            )
        if examples:
            _check_parts(upload, state, roles, method)
            _check_numbers(upload, state, roles)
    except UploadRefused:
        raise
    except Exception as error:  # a stranger's tensors may be of any kind: no client ends a round
        raise UploadRefused(upload.client.id, f"it cannot be read: {type(error).__name__}: {error}.") from error
    return examples


def _check_parts(upload: Upload, state: ServerState, roles: Roles, method: Method[Any]) -> None:
    """Its modules, ranks, factors and heads, and their shapes."""
    client, modules = upload.client.id, upload.adapter.modules
    if upload.adapter.base:
        raise UploadRefused(client, "it contains base weights; upload what `send(adapter, roles)` returns.")
    ranks = ranks_of(upload.client, state)
    asked = ranks if roles.shared else {}
    lacks, extra = sorted(asked.keys() - modules.keys()), sorted(modules.keys() - asked.keys())
    if lacks or extra:
        raise UploadRefused(
            client,
            f"it must hold exactly the declared modules: {len(lacks)} are missing {lacks[:3]}, "
            f"{len(extra)} are unexpected {extra[:3]}.",
        )
    for name, lora in modules.items():
        r, (B, A) = ranks[name], state.start.modules[name].factors
        if why := unserved(method, roles, r, B.shape[1]):
            raise UploadRefused(client, f"{why} in {name!r}.")
        got = {factor: tuple(t.shape) for factor, t in lora.tensors().items()}
        shapes = {"B": (B.shape[0], r), "A": (r, A.shape[1])}
        expected = {factor: shapes[factor] for factor in roles.shared}
        if got != expected:
            raise UploadRefused(
                client, f"module {name!r} has factors {got}; this round shares {expected} (`client.send`)."
            )
    shared = state.heads if roles.heads == "shared" else {}
    heads, wanted = ({name: tuple(t.shape) for name, t in of.items()} for of in (upload.adapter.heads, shared))
    if heads != wanted:
        raise UploadRefused(client, f"heads {heads} were sent; this round shares {wanted}.")


def _check_numbers(upload: Upload, state: ServerState, roles: Roles) -> None:
    """Its tensors' kinds and values."""
    client = upload.client.id
    for name, tensor in named_tensors(upload.adapter):
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise UploadRefused(
                client, f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}; adapters are dense tensors of "
                f"float16, bfloat16, float32 or float64.",
            )  # fmt: skip
        low, high = torch.aminmax(tensor.detach())
        if not (float(low) >= -_LARGEST and float(high) <= _LARGEST):  # NaN is neither
            bad = int((~torch.isfinite(tensor)).sum())
            raise UploadRefused(
                client,
                f"{name} holds NaN or Inf in {bad} of {tensor.numel()} entries: training diverged there (a lower "
                f"learning rate or gradient clipping helps)."
                if bad
                else f"{name} holds {float(tensor.detach().abs().max()):.1e}; the server sums up to {_LARGEST:g}.",
            )
    for name, head in upload.adapter.heads.items():
        dtype = state.heads[name].dtype
        if not bool(torch.isfinite(head.detach().to(dtype)).all()):
            raise UploadRefused(client, f"head {name!r} holds values beyond the server's {dtype}.")
    if roles.both_shared:  # one factor beside a common one has no terms of the client's own
        _check_terms(upload)


def _check_terms(upload: Upload) -> None:
    """Refuses it if rounding of the terms could make up one of its updates; warns if terms are large."""
    client, modules, worst = upload.client.id, upload.adapter.modules, (0.0, "")
    for name, (terms, size) in zip(modules, terms_and_sizes([*modules.values()]), strict=True):
        if _ARITHMETIC * terms > _BLURRED * size:
            raise UploadRefused(
                client,
                f"its update of {name!r} cannot be measured: terms of size {terms:.2g} cancel to {size:.2g}, and their "
                f"rounding would enter everybody's mean. Send the same update in other coordinates, such as balanced "
                f"factors.",
            )
        if terms > _SILENT * size:
            worst = max(worst, (terms / size, name))
    if worst[1]:
        log.warning(
            "the terms of %s's factors are up to %.1e times their sum (in %s): bad coordinates, or a hostile client. "
            "Methods that average products still get the right mean.", client, *worst,
        )  # fmt: skip


def terms_and_sizes(loras: Sequence[LoRA]) -> list[tuple[float, float]]:
    """(sum_j ||b_j|| ||a_j||, ||B A||) of each. Cost: r^2 (d_out + d_in), and two QRs in float64 if terms cancel."""

    def kind(lora: LoRA) -> tuple[Hashable, int]:
        B, A = lora.factors
        return (B.shape, A.shape, B.dtype, A.dtype, B.device), 8 * max(B.numel(), A.numel())

    def work(alike: list[LoRA]) -> list[tuple[float, float]]:
        wide = compute_dtype(alike[:1])
        B, A = (stacked([t.detach().to(wide) for t in side]) for side in zip(*(x.factors for x in alike), strict=True))
        of_B, of_A = B.mT @ B, A @ A.mT
        terms = (of_B.diagonal(dim1=1, dim2=2) * of_A.diagonal(dim1=1, dim2=2)).sqrt().sum(dim=1, dtype=torch.float64)
        squares = (of_B * of_A).sum(dim=(1, 2), dtype=torch.float64)
        found = []
        for lora, t, x in zip(alike, terms.tolist(), squares.tolist(), strict=True):
            size = max(x, 0.0) ** 0.5
            if not (1e-15 < t < 1e15 and size > 1e-2 * t):  # beyond, float32 loses the sum or overflows
                L, R = (side.detach() for side in lora.factors)
                t, size = float((norm(L, dim=0) * norm(R, dim=1)).sum()), lora.norm()
            found.append((t, size))
        return found

    return in_stacks(work, loras, kind)


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
