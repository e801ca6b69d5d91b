"""An intake of bounded memory: uploads are merged into a summary of fixed size once a round's uploads outgrow it.

While they fit in half of it they are kept as they came, and the round is the plain one, bit for bit. Beyond that, this
half takes in new ones until it is full, and the other holds what all before were folded into: for each matrix a pair
(M, N) of so many columns (`linalg.incremental`), from which the method makes its next state (`core.pairing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedlora.core.lora import Adapter
from fedlora.core.messages import Upload
from fedlora.core.method import Update
from fedlora.core.pairing import FromPair, Pair, Pairing
from fedlora.errors import HyperparameterError, RankMismatch, UploadRefused
from fedlora.linalg import gauge_splits, unit_roundoff
from fedlora.linalg.incremental import Folded, fold, side_by_side
from fedlora.linalg.own_modes import own_modes
from fedlora.linalg.parallel import workers
from fedlora.server.cancelling import cancelling
from fedlora.server.checks import check_count
from fedlora.server.closing import closed, shares
from fedlora.server.heads import HeadSums
from fedlora.server.intake import Attendance, WholeUpload
from fedlora.server.kept_uploads import close_whole, updates_of
from fedlora.server.method_faults import blamed_on, checked_diagnostics, checked_state
from fedlora.server.state import ServerState
from fedlora.server.terms import Terms


class BoundedMemory:
    """An `Intake` of whole uploads in so much memory.

    Args:
        method: the terms' own, which can go on from a pair. memory: bytes, for what is held and for what it was folded
            into together; while folding, as much again for a moment.

    Raises:
        HyperparameterError: the memory is less than the start needs twice, or the method's options need all uploads.
    """

    exchanges = 1
    asked = None
    keeps = False

    def __init__(self, terms: Terms, method: FromPair[Any], memory: float) -> None:
        self._terms, self._method, self._pairing = terms, method, method.pairing()
        self._room = memory / 2
        self._columns = _columns(terms.state.start, memory)
        self._attendance = Attendance(terms)
        self._held: dict[str, Upload] = {}
        self._size = 0
        self._sums: dict[str, Sums] = {}
        self._heads: HeadSums | None = None

    def ask(self) -> WholeUpload:
        return WholeUpload()

    @own_modes()
    def add(self, upload: Upload) -> None:
        """Accept one upload, or record and raise why not.

        Raises:
            UploadRefused: with the client id and the reason; also numbers of examples that running sums cannot carry.
        """
        if not self._attendance.take(upload):
            return
        try:
            check_count(upload)
        except UploadRefused as refusal:
            self._attendance.refuse(refusal)
            raise
        self._held[upload.client.id] = upload
        self._size += size(upload)
        if self._size > self._room:
            self._fold()

    @property
    def nbytes(self) -> int:
        """Bytes held for the round: of the uploads, and of what earlier ones were folded into."""
        return self._size + sum(sums.nbytes for sums in self._sums.values())

    @own_modes()
    def close(self) -> ServerState:
        """The next state; the same up to rounding, and to what was left out, whatever order the uploads came in.

        Raises:
            QuorumNotMet: too few good uploads. RankMismatch: too much of the clients' subspaces, or of their mean, had
                to be left out.
        """
        if not self._sums:
            return close_whole(self._held, self._attendance)
        self._fold()
        self._attendance.require_quorum()
        terms, counts = self._terms, self._attendance.counts
        everyone = math.fsum(counts.values()) if terms.missing == "zero" else None

        def after(name: str) -> Any:
            return self._from_pair(name, self._sums[name], everyone)

        with workers(terms.workers) as each:
            modules = dict(zip(self._sums, each(after, list(self._sums)), strict=True))
        heads = self._heads.mean(terms.state.heads) if self._heads is not None else {}
        return closed(terms, modules, heads, self._attendance.tally(shares(dict(sorted(counts.items())))))

    def _fold(self) -> None:
        """Fold in the uploads that are held, and drop them."""
        uploads, counts = [self._held[c] for c in sorted(self._held)], self._attendance.counts
        with workers(self._terms.workers) as each:
            found = cancelling(self._terms, uploads, each)
        for client, reason in found.refused.items():
            self._attendance.refuse(UploadRefused(client, reason))
        uploads = [u for u in uploads if u.client.id not in found.refused]

        def folded(name: str) -> Sums:
            holders = [u for u in uploads if name in u.adapter.modules]
            updates = updates_of(name, holders, counts, found)
            return add_to(self._sums.get(name), updates, self._pairing, self._columns)

        sent = [name for name in self._terms.state.modules if any(name in u.adapter.modules for u in uploads)]
        with workers(self._terms.workers) as each:
            self._sums |= dict(zip(sent, each(folded, sent), strict=True))
        if self._terms.roles.heads == "shared":
            for u in uploads:
                more = HeadSums.of(u.adapter.heads, counts[u.client.id])
                self._heads = more if self._heads is None else self._heads + more
        self._held, self._size = {}, 0

    def _from_pair(self, name: str, sums: Sums, everyone: float | None) -> Any:
        """The module's next state; everyone: what n_i add up to where clients without the module count as zero."""
        needed = f"Give the server more memory; all of this round needs {sums.revealed} columns."
        columns, kept = sums.folded.M.shape[1], sums.folded.kept
        if kept < 0.5:
            raise RankMismatch(
                f"only {kept:.0%} of the clients' subspaces could be kept in {columns} columns: they share too little "
                f"(a flat spectrum), and what is left would stand for few of them. {needed}"
            )
        total = sums.weight if everyone is None or self._pairing.weighting == "uniform" else everyone
        method = self._terms.method
        with blamed_on(method, "from_pair"):
            state = self._method.from_pair(self._terms.state.modules[name], sums.pair(total))
        dropped = checked_diagnostics(method, checked_state(method, "from_pair", state)).get("dropped")
        if isinstance(dropped, float) and dropped > 0.5:
            raise RankMismatch(
                f"up to {dropped:.0%} of the mean update's energy may be lost in {columns} columns of memory, although "
                f"they hold {kept:.0%} of the clients' subspaces: updates outside of what most clients share are "
                f"large. {needed} One client far larger than the others is often a fault of its own."
            )
        return state


@dataclass(frozen=True, eq=False)
class Sums:
    """What a part of a round's updates of one matrix was folded into, and sums over those updates.

    folded: (M, N) with weights n_i. weight, nominal, revealed: of n_i, of nominal and of revealed ranks. roundoff: of
    n_i u_i. noise, floor: of the squares of what rounding of the stored factors can be in one direction of M and of
    M N.
    """

    folded: Folded
    weight: float = 0.0
    nominal: int = 0
    revealed: int = 0
    roundoff: float = 0.0
    noise: float = 0.0
    floor: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.folded.nbytes

    def pair(self, total: float) -> Pair:
        """As methods take it, of the mean over `total`."""
        folded = self.folded
        return Pair(
            folded.M, folded.N, total, nominal=self.nominal, revealed=self.revealed,
            approximation="incremental" if folded.left_out else None,
            kept=folded.kept, lost=folded.lost, least=folded.least, roundoff=self.roundoff / self.weight,
            noise=folded.noise * math.sqrt(self.noise / total), floor=math.sqrt(self.floor) / total,
        )  # fmt: skip


def add_to(sums: Sums | None, updates: Sequence[Update], pairing: Pairing, columns: int) -> Sums:
    """`sums` (None: nothing yet) and some updates, with weights n_i, in at most `columns` columns of float32."""
    counts = [1.0 if pairing.weighting == "uniform" else u.weight for u in updates]
    tolerances = [pairing.tolerance(u.stored) for u in updates]
    splits = gauge_splits([(u.B, u.A) for u in updates], tolerances=tolerances, canonical=pairing.canonical)
    dtype = updates[0].B.dtype
    before = sums or Sums(Folded(updates[0].B[:, :0], updates[0].A[:0], 0.0))
    floors = [
        (n * t) ** 2 * float((u.B.square().sum(dim=0).double() * u.A.square().sum(dim=1).double()).sum())
        for u, n, t in zip(updates, counts, tolerances, strict=True)
    ]
    columns = columns * torch.float32.itemsize // dtype.itemsize
    return Sums(
        fold(sums.folded if sums else None, *side_by_side(splits, counts), columns, dtype=dtype),
        before.weight + math.fsum(counts),
        before.nominal + sum(u.rank for u in updates),
        before.revealed + sum(s.U.shape[1] for s in splits),
        before.roundoff + math.fsum(n * unit_roundoff(u.stored) for u, n in zip(updates, counts, strict=True)),
        before.noise + math.fsum(n * t * t for n, t in zip(counts, tolerances, strict=True)),
        before.floor + math.fsum(floors),
    )


def size(upload: Upload) -> int:
    """Bytes of an upload's tensors."""
    return upload.nbytes_modules + upload.nbytes_heads


def _columns(start: Adapter, memory: float) -> int:
    """How many columns of float32 half the memory holds in each matrix. Raises where one client would not fit."""
    column = 4 * sum(B.shape[0] + A.shape[1] for B, A in (lora.factors for lora in start.modules.values()))
    columns, largest = int(memory / 2 // column), max(start.ranks.values())
    if columns < largest:
        raise HyperparameterError(
            f"Server: {memory / 2**20:g} MB leave room for {columns} columns in each matrix, and one client "
            f"of rank {largest} needs {largest}. Give at least {2 * largest * column / 2**20:.3g} MB."
        )
    return columns
