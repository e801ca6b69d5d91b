"""Closes a round that kept all its uploads: judges, weighs and aggregates them in the order of client ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from fedlora.core.lora import LoRA, compute_dtype
from fedlora.core.messages import Upload
from fedlora.core.method import Update, aggregate_all
from fedlora.errors import UploadRefused
from fedlora.linalg.batches import in_batches
from fedlora.linalg.parallel import Each, workers
from fedlora.server.cancelling import Cancelling, cancelling
from fedlora.server.closing import closed, shares
from fedlora.server.heads import mean_heads
from fedlora.server.intake import Attendance
from fedlora.server.judging import Round, far_counts, judge, look, require_enough
from fedlora.server.method_faults import blamed_on
from fedlora.server.robust_rules.rule import Rule
from fedlora.server.state import ServerState
from fedlora.server.terms import Terms

log = logging.getLogger("fedlora.server")
_AT_ONCE = 2**25  # bytes of updates: work enough for every thread, and little beside a round that fills a memory


def close_whole(held: dict[str, Upload], attendance: Attendance) -> ServerState:
    """The next state from all uploads that count. held: client -> upload.

    Once it is certain who counts, it empties `held`, and it drops each group of matrices once their states are made. If
    nobody else holds the uploads, a round hardly needs memory for both them and the next state.
    """
    attendance.require_quorum()
    terms, counts = attendance.terms, dict(sorted(attendance.counts.items()))
    for client, reason in far_counts(counts).items() if terms.rule is not None else ():
        attendance.refuse(UploadRefused(client, reason))
    attendance.require_quorum()
    uploads = [held[client] for client in sorted(attendance.counts)]
    with workers(terms.workers) as each:
        found = cancelling(terms, uploads, each)
        if found.refused:
            for client, reason in found.refused.items():
                attendance.refuse(UploadRefused(client, reason))
            attendance.require_quorum()
            uploads = [u for u in uploads if u.client.id not in found.refused]
        judged = None
        if terms.rule is not None:
            uploads, judged = _judged(terms.rule, uploads, counts, attendance, each)
        weights = shares({u.client.id: counts[u.client.id] for u in uploads})
        weighed = uploads if judged is None else judged.heads(uploads)
        heads = mean_heads(terms.state.heads, weighed, list(weights.values())) if terms.roles.heads == "shared" else {}
        updates = _updates(terms, uploads, counts, found, judged)
        told = None if judged is None else judged.judged
        held.clear()
        del uploads, weighed, judged
        after = _aggregated(terms, updates, each)
    return closed(terms, after, heads, replace(attendance.tally(weights), judged=told))


def _judged(
    rule: Rule, uploads: Sequence[Upload], counts: Mapping[str, float], attendance: Attendance, each: Each
) -> tuple[list[Upload], Round]:
    """(the uploads whose change can be measured, the rule's verdict on them). It refuses the others."""
    seen = look(attendance.terms, uploads, each)
    for client, reason in seen.unmeasured().items():
        attendance.refuse(UploadRefused(client, reason))
    attendance.require_quorum()
    seen = seen.of(attendance.counts)
    return list(seen.uploads), judge(require_enough(rule, attendance, counts), attendance.terms, seen, counts)


def _updates(
    terms: Terms, uploads: Sequence[Upload], counts: Mapping[str, float], found: Cancelling, judged: Round | None
) -> dict[str, list[Update]]:
    """Module -> what the method gets of it."""
    updates = dict[str, list[Update]]()
    for name in terms.state.modules:
        holders = [u for u in uploads if name in u.adapter.modules]
        over = holders if terms.missing == "renormalise" else uploads
        if holders:
            plain = updates_of(name, holders, shares({u.client.id: counts[u.client.id] for u in over}), found)
            updates[name] = plain if judged is None else judged.updates(name, plain)
    return updates


def _aggregated(terms: Terms, updates: dict[str, list[Update]], each: Each) -> dict[str, Any]:
    """Module -> its next state. It empties `updates`, some `_AT_ONCE` bytes of them at a time."""
    names = list(updates)

    def made(members: list[int]) -> list[Any]:
        group = [names[k] for k in members]
        before = [terms.state.modules[name] for name in group]
        after = aggregate_all(terms.method, before, [updates.pop(name) for name in group], each)
        if len(after) != len(before):
            raise TypeError(f"{len(after)} states came back for {len(before)} matrices")
        return after

    sizes = [sum(t.nbytes for u in updates[name] for t in u.lora.tensors().values()) for name in names]
    with blamed_on(terms.method, "aggregate"):
        return dict(zip(names, in_batches(made, [None] * len(names), sizes, most=_AT_ONCE), strict=True))


def updates_of(module: str, uploads: Sequence[Upload], weights: Mapping[str, float], found: Cancelling) -> list[Update]:
    """The method's input from the clients of `uploads`, for one module that all of them hold, in one compute dtype."""
    dtype = reduce(torch.promote_types, (compute_dtype(u.adapter.modules[module]) for u in uploads))
    updates = []
    for u in uploads:
        lora, rank = u.adapter.modules[module], u.client.rank
        handed = found.handed_on(module, u.client.id, promoted(lora, dtype))
        updates.append(
            Update(
                u.client.id,
                weights[u.client.id],
                rank if isinstance(rank, int) else rank[module],
                handed,
                _stored_dtype(lora),
            )
        )
    return updates


def promoted(lora: LoRA, dtype: torch.dtype) -> LoRA:
    """The pair in that dtype and without gradients; the same tensors if nothing has to change."""
    if all(t.dtype == dtype and not t.requires_grad for t in lora.tensors().values()):
        return lora
    return lora.map(lambda t: t.detach().to(dtype))


def _stored_dtype(lora: LoRA) -> torch.dtype:
    """The narrower dtype of the two received factors."""
    dtypes = {t.dtype for t in lora.tensors().values()}
    return max(dtypes, key=lambda d: torch.finfo(d).eps) if len(dtypes) > 1 else dtypes.pop()
