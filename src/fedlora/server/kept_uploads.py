"""Closes a round that kept all its uploads: judges, weighs and aggregates them in the order of client ids."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch

from fedlora.core.lora import LoRA, compute_dtype
from fedlora.core.messages import Upload
from fedlora.core.method import Update, aggregate_all
from fedlora.errors import UploadRefused
from fedlora.linalg.parallel import workers
from fedlora.server.cancelling import Cancelling, cancelling
from fedlora.server.closing import closed, held_to_share, shares
from fedlora.server.heads import mean_heads
from fedlora.server.intake import Attendance
from fedlora.server.judging import far_counts, judge, look, require_enough
from fedlora.server.method_faults import blamed_on
from fedlora.server.state import ServerState

log = logging.getLogger("fedlora.server")


def close_whole(held: Mapping[str, Upload], attendance: Attendance) -> ServerState:
    """The next state from all uploads that count. held: client -> upload."""
    attendance.require_quorum()
    terms, counts = attendance.terms, dict(sorted(attendance.counts.items()))
    most = terms.max_weight_share
    for client, reason in far_counts(held_to_share(counts, most)).items() if terms.rule is not None else ():
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
            seen = look(terms, uploads, each)
            for client, reason in seen.unmeasured().items():
                attendance.refuse(UploadRefused(client, reason))
            attendance.require_quorum()
            seen = seen.of(attendance.counts)
            uploads = list(seen.uploads)
            judged = judge(require_enough(terms.rule, attendance, counts), terms, seen, counts)
        counts = {u.client.id: counts[u.client.id] for u in uploads}
        weights = shares(counts, most)
        updates: dict[str, list[Update]] = {}
        alike: dict[str, int] = {}
        for name in terms.state.modules:
            holders = [u for u in uploads if name in u.adapter.modules]
            over = holders if terms.missing == "renormalise" else uploads
            if holders:
                plain = updates_of(name, holders, shares({u.client.id: counts[u.client.id] for u in over}, most), found)
                alike |= {name: len(over)} if len(over) * most < 1 else {}
                updates[name] = plain if judged is None else judged.updates(name, plain)
        with blamed_on(terms.method, "aggregate"):
            before = [terms.state.modules[name] for name in updates]
            after = aggregate_all(terms.method, before, list(updates.values()), each)
            if len(after) != len(before):
                raise TypeError(f"{len(after)} states came back for {len(before)} matrices")
    held_to = uploads if judged is None else judged.heads(uploads)
    heads = mean_heads(terms.state.heads, held_to, list(weights.values())) if terms.roles.heads == "shared" else {}
    if alike:
        log.warning(
            "round %d: max_weight_share = %.3g cannot hold with fewer than %d clients: all who count have equal "
            "weight in %s%s",
            terms.number, most, math.ceil(1 / most), ", ".join([*alike][:3]), ", ..." if len(alike) > 3 else "",
        )  # fmt: skip
    told = None if judged is None else judged.judged
    tally = replace(attendance.tally(weights), judged=told, alike=alike)
    return closed(terms, dict(zip(updates, after, strict=True)), heads, tally)


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
