"""An intake for more uploads than fit in memory: what came is added up in float64, exactly, and forgotten.

While a round's uploads fit in half of the memory they are kept as they came, and the round is the plain one, bit for
bit. Beyond that they are added up, as many at a time as that half holds: for each matrix the mean update itself, and
the clients' votes where the method's rank has to choose (`core.summing`). These sums are of fixed size, 8 d_out d_in
bytes and 16 d_out^2 for the votes, however many clients there are. Where the other half of the memory does not hold
them they lie in a file that has no name and goes with the process.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedlora.core.lora import Adapter
from fedlora.core.messages import Upload
from fedlora.core.method import Update
from fedlora.core.summing import FromSums, Summing, Sums
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.linalg import gauge_splits, unit_roundoff
from fedlora.linalg.own_modes import own_modes
from fedlora.linalg.parallel import workers
from fedlora.server.cancelling import cancelling
from fedlora.server.checks import check_count
from fedlora.server.closing import closed, shares
from fedlora.server.heads import HeadSums
from fedlora.server.intake import Attendance
from fedlora.server.kept_uploads import close_whole, updates_of
from fedlora.server.method_faults import blamed_on
from fedlora.server.state import ServerState
from fedlora.server.terms import Terms

_BORNE_ADDITIONS = 256  # one after the other; `linalg.consensus` counts on so many roundoffs of float64


class SummedUploads:
    """An `Intake` of whole uploads in so much memory.

    Args:
        method: the terms' own, which can go on from sums. memory: bytes, half of it for the uploads that are held, half
            for sums; what does not fit there is on disk. Closing takes a few copies of the largest matrix in float64
            on top, for each of the server's workers.

    Raises:
        HyperparameterError: the memory has no room for one client, the disk none for the sums, or the method's options
            need all uploads.
    """

    asked = None
    keeps = False

    def __init__(self, terms: Terms, method: FromSums[Any], memory: float) -> None:
        with blamed_on(terms.method, "summing"):
            self._wanted = method.summing()
        self._terms, self._method, self._room = terms, method, memory / 2
        _require_room(terms.state.start, memory)
        self._on_disk = sum(_sizes(terms.state.start, self._wanted).values()) > self._room
        if self._on_disk:
            _require_disk(terms.state.start, self._wanted)
        self._attendance = Attendance(terms)
        self._held: dict[str, Upload] = {}
        self._size = 0
        self._sums: dict[str, _Running] = {}
        self._heads: HeadSums | None = None

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
        self._size += upload.nbytes_modules + upload.nbytes_heads
        if self._size > self._room:
            self._add_up()

    def refuse(self, refusal: UploadRefused) -> None:
        """As `Intake.refuse`."""
        self._attendance.refuse(refusal)

    @property
    def nbytes(self) -> int:
        """Bytes of the uploads that are held for the round; the sums come on top (`summed`)."""
        return self._size

    @property
    def summed(self) -> int:
        """Bytes of the sums, in memory or on disk; 0 while all uploads fit."""
        return sum(sums.nbytes for sums in self._sums.values())

    @own_modes()
    def close(self) -> ServerState:
        """The next state; where uploads were added up, the same whatever order they came in up to rounding of float64.

        Raises:
            QuorumNotMet: too few good uploads. RankTie: as the method says.
        """
        if not self._sums:
            return close_whole(self._held, self._attendance)
        self._add_up()
        self._attendance.require_quorum()
        terms, counts = self._terms, self._attendance.counts
        everyone = math.fsum(counts.values()) if terms.missing == "zero" else None

        def after(name: str) -> Any:
            total = everyone if everyone is not None and self._wanted.weighting == "examples" else None
            with blamed_on(terms.method, "from_sums"):
                return self._method.from_sums(terms.state.modules[name], self._sums.pop(name).mean(total, self._wanted))

        names = list(self._sums)
        with workers(terms.workers) as each:
            modules = dict(zip(names, each(after, names), strict=True))
        heads = self._heads.mean(terms.state.heads) if self._heads is not None else {}
        return closed(terms, modules, heads, self._attendance.tally(shares(dict(sorted(counts.items())))))

    def _add_up(self) -> None:
        """Add the uploads that are held to the sums, and drop them."""
        uploads, counts = [self._held[c] for c in sorted(self._held)], self._attendance.counts
        self._held, self._size = {}, 0
        with workers(self._terms.workers) as each:
            found = cancelling(self._terms, uploads, each)
        for client, reason in found.refused.items():
            self._attendance.refuse(UploadRefused(client, reason))
        uploads = [u for u in uploads if u.client.id not in found.refused]
        sent = [name for name in self._terms.state.modules if any(name in u.adapter.modules for u in uploads)]
        for name in sent:
            if name not in self._sums:
                B, A = self._terms.state.start.modules[name].factors
                self._sums[name] = _Running.empty(B.shape[0], A.shape[1], self._wanted, on_disk=self._on_disk)

        def added(name: str) -> None:
            holders = [u for u in uploads if name in u.adapter.modules]
            self._sums[name].add(updates_of(name, holders, counts, found), self._wanted)

        with workers(self._terms.workers) as each:
            each(added, sent)
        if self._terms.roles.heads == "shared":
            for u in uploads:
                more = HeadSums.of(u.adapter.heads, counts[u.client.id])
                self._heads = more if self._heads is None else self._heads + more


@dataclass(eq=False)
class _Running:
    """The sums of one matrix so far, of weights n_i. products (d_out, d_in): sum n_i B_i A_i; votes, doubts (d_out,
    d_out): sum n_i U_i U_i^T and sum (n_i t_i)^2 U_i U_i^T. The other fields as in `Sums`, before the division: weight,
    roundoff and floor are sums over clients of n_i, n_i u_i and (n_i t_i ||terms||)^2. additions: how often something
    was added."""

    products: Tensor
    votes: Tensor | None
    doubts: Tensor | None
    dtype: torch.dtype = torch.float32
    ranks: dict[str, int] = field(default_factory=dict)
    bases: dict[str, tuple[Tensor, float]] = field(default_factory=dict)
    nominal: int = 0
    weight: float = 0.0
    roundoff: float = 0.0
    floor: float = 0.0
    terms: float = 0.0
    additions: int = 0

    @classmethod
    def empty(cls, d_out: int, d_in: int, wanted: Summing, *, on_disk: bool) -> _Running:
        votes, doubts = (_zeros(d_out, d_out, on_disk=on_disk) if wanted.votes else None for _ in range(2))
        return cls(_zeros(d_out, d_in, on_disk=on_disk), votes, doubts)

    @property
    def nbytes(self) -> int:
        return self.products.nbytes + (2 * self.votes.nbytes if self.votes is not None else 0)

    def add(self, updates: Sequence[Update], wanted: Summing) -> None:
        """Some more updates, with weights n_i; in place."""
        counts = [1.0 if wanted.weighting == "uniform" else u.weight for u in updates]
        B = torch.cat([n * u.B.double() for n, u in zip(counts, updates, strict=True)], dim=1)
        A = torch.cat([u.A.double() for u in updates])
        self.products.addmm_(B, A)
        tolerances = [wanted.tolerance(u.stored) for u in updates]
        splits = gauge_splits([(u.B, u.A) for u in updates], tolerances=tolerances, canonical=wanted.canonical)
        if self.votes is not None and self.doubts is not None:
            U = torch.cat([split.U for split in splits], dim=1)
            each = [(n, n * t * n * t) for n, t, s in zip(counts, tolerances, splits, strict=True) for _ in s.U[0]]
            for total, factors in zip((self.votes, self.doubts), U.new_tensor(each).reshape(-1, 2).mT, strict=True):
                total.addmm_(U * factors, U.mT)
        sizes = torch.linalg.vector_norm(B, dim=0) * torch.linalg.vector_norm(A, dim=1)
        by_client = torch.split(sizes, [u.lora.rank for u in updates])
        for u, n, t, split, terms in zip(updates, counts, tolerances, splits, by_client, strict=True):
            self.dtype = torch.promote_types(self.dtype, u.B.dtype)
            self.ranks[u.client] = split.U.shape[1]
            self.bases[u.client] = (split.U.to(u.B.dtype), unit_roundoff(u.stored))
            self.nominal += u.rank
            self.weight += n
            self.roundoff += n * unit_roundoff(u.stored)
            self.floor += (t * float(torch.linalg.vector_norm(terms))) ** 2
            self.terms += float(terms.sum())
        self.bases = {c: self.bases[c] for c in sorted(self.bases, reverse=True)[: wanted.bases]}
        self.additions += 1

    def mean(self, total: float | None, wanted: Summing) -> Sums:
        """As methods take it; uses the sums up. total: of all weights, None: of those that were added."""
        total = self.weight if total is None else total
        ranks = {client: self.ranks[client] for client in sorted(self.ranks)}
        bases = {client: self.bases[client] for client in sorted(self.bases)}
        return Sums(
            self.products.div_(total),
            None if self.votes is None else self.votes.div_(total),
            None if self.doubts is None else self.doubts.div_(total).div_(total),
            self.dtype, self.nominal, ranks, bases, roundoff=self.roundoff / self.weight,
            floor=math.sqrt(self.floor) / total,
            terms=self.terms / total * max(1.0, self.additions / _BORNE_ADDITIONS),
        )  # fmt: skip


def _zeros(rows: int, columns: int, *, on_disk: bool) -> Tensor:
    """float64. On disk: of a file that has lost its name already, so that nothing is left behind."""
    if not on_disk:
        return torch.zeros(rows, columns, dtype=torch.float64)
    with tempfile.NamedTemporaryFile(prefix="fedlora-sums-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, 8 * rows * columns)  # a hole that finds no room would kill the process
        except OSError as error:
            raise HyperparameterError(
                f"Server: the sums of uploads beyond the memory have no room in {tempfile.gettempdir()}: "
                f"{error.strerror}. The round is lost, the state unchanged. Make room, or let TMPDIR name another "
                f"folder."
            ) from error
        return torch.from_file(file.name, shared=True, size=rows * columns, dtype=torch.float64).view(rows, columns)


def _sizes(start: Adapter, wanted: Summing) -> Mapping[str, int]:
    """Module -> bytes of its sums."""
    shapes = {name: (x.factors[0].shape[0], x.factors[1].shape[1]) for name, x in start.modules.items()}
    return {name: 8 * d_out * (d_in + (2 * d_out if wanted.votes else 0)) for name, (d_out, d_in) in shapes.items()}


def _require_room(start: Adapter, memory: float) -> None:
    """Raises `HyperparameterError` where one client would not fit into half of the memory."""
    largest = sum(t.numel() * 4 for lora in start.modules.values() for t in lora.factors)
    largest += sum(head.numel() * head.element_size() for head in start.heads.values())
    if largest > memory / 2:
        raise HyperparameterError(
            f"Server: half of {memory / 2**20:g} MB holds no client of rank {max(start.ranks.values())}, which sends "
            f"{largest / 2**20:.3g} MB in float32. Give at least {2 * largest / 2**20:.3g} MB."
        )


def _require_disk(start: Adapter, wanted: Summing) -> None:
    """Raises `HyperparameterError` where the folder for temporary files has no room for the sums."""
    sizes = _sizes(start, wanted)
    needed, folder = sum(sizes.values()), tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        largest = max(sizes, key=lambda name: sizes[name])
        raise HyperparameterError(
            f"Server: the sums of uploads beyond the memory take {needed / 2**20:,.0f} MB ({largest!r} alone "
            f"{sizes[largest] / 2**20:,.0f}), and the folder for temporary files, {folder}, has {free / 2**20:,.0f} "
            f"MB. Let TMPDIR name another folder, adapt fewer modules, or give as much memory as the uploads take."
        )
