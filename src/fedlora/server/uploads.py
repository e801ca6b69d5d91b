"""The one intake of whole uploads: it keeps them until the round closes or, beyond a memory limit, adds them up.

Without a limit, and while a round's uploads fit into half of it, they are kept as they came, and the round is the plain
one, bit for bit, in any order. Beyond that the server adds them up in float64, as many at a time as that half holds:
for each matrix the mean update and what else the method requests (`product_sums`), or the mean factors (`factor_sums`).
These sums have a fixed size, however many clients there are. If the other half of the memory cannot hold them, they are
on disk.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedlora.core.lora import Adapter
from fedlora.core.messages import Upload
from fedlora.core.method import Method
from fedlora.core.summing import FromMeans, FromSums, Summing
from fedlora.errors import HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.linalg.own_modes import own_modes
from fedlora.linalg.parallel import workers
from fedlora.server.cancelling import cancelling
from fedlora.server.checks import check_count
from fedlora.server.closing import closed, shares
from fedlora.server.factor_sums import FactorSums
from fedlora.server.heads import HeadSums
from fedlora.server.intake import Attendance
from fedlora.server.kept_uploads import close_whole, updates_of
from fedlora.server.method_faults import blamed_on
from fedlora.server.product_sums import ProductSums, product_sizes, require_disk
from fedlora.server.state import ServerState
from fedlora.server.terms import Terms


def summing(method: Method[Any], memory: float) -> Summing | None:
    """What to add up for the method: its `Summing`, or None for its factors.

    Raises:
        HyperparameterError: the method, or its options, need each client's upload.
    """
    if isinstance(method, FromSums):
        with blamed_on(method, "summing"):
            return method.summing()
    if not isinstance(method, FromMeans):
        raise HyperparameterError(
            f"Server: memory = {memory:g} MB needs a method that can drop uploads during a round, but {method.name} "
            f"needs all of them at once. Leave memory out: each client's upload then takes 4 r (d_out + d_in) bytes a "
            f"matrix in float32. Or use a method that can: glora, svd and flexlora average updates; fedit, fedsa-lora, "
            f"fedsvd, ffa-lora, padded-average and rolora average factors."
        )
    with blamed_on(method, "require_means"):
        method.require_means()
    return None


class Uploads:
    """An `Intake` of whole uploads, which may come in any order.

    Args:
        memory: bytes, half for held uploads, half for sums; what does not fit is on disk, except sums of factors,
            twice what a client of each rank sends in float32. Closing needs a few more float64 copies of the largest
            matrix for each of the server's workers. None: all uploads are held.

    Raises:
        HyperparameterError: the memory has no room for one client, the disk has none for the sums, or the method or
            its options need all uploads.
    """

    asked = None
    stored = False

    def __init__(self, terms: Terms, memory: float | None = None) -> None:
        self._terms, self._room, self.keeps = terms, math.inf, memory is None
        self._wanted: Summing | None = None
        self._on_disk = False
        if memory is not None:
            self._wanted, self._room = summing(terms.method, memory / 2**20), memory / 2
            _require_room(terms.state.start, memory)
            sizes = product_sizes(terms.state.start, self._wanted) if self._wanted is not None else {}
            self._on_disk = sum(sizes.values()) > self._room
            if self._on_disk:
                require_disk(sizes)
        self._attendance = Attendance(terms)
        self._held: dict[str, Upload] = {}
        self._versions: dict[str, list[int]] = {}
        self._size = 0
        self._sums: dict[str, ProductSums | FactorSums] = {}
        self._heads: HeadSums | None = None
        self._lost = False
        self._one_at_a_time = threading.RLock()

    @own_modes()
    def add(self, upload: Upload) -> None:
        """Accept one upload, or record and raise the refusal. Nothing of a refused upload reaches the state.

        Raises:
            UploadRefused: with the client id and the reason; also for example counts that running sums cannot hold.
            HyperparameterError: a held upload was changed in the meantime, or the round has ended (`close`).
        """
        with self._one_at_a_time:
            self._add(upload)

    def _add(self, upload: Upload) -> None:
        self._require_whole()
        if not self._attendance.take(upload):
            return
        client = upload.client.id
        if not self.keeps:
            try:
                check_count(upload)
            except UploadRefused as refusal:
                self._attendance.refuse(refusal)
                raise
        self._held[client], self._versions[client] = upload, _versions(upload)
        self._size += upload.nbytes_modules + upload.nbytes_heads
        if self._size > self._room:
            self._add_up()

    def refuse(self, refusal: UploadRefused) -> None:
        """As `Intake.refuse`."""
        self._attendance.refuse(refusal)

    @property
    def nbytes(self) -> int:
        """Bytes of the held uploads; the sums come on top (`summed`)."""
        return self._size

    @property
    def summed(self) -> int:
        """Bytes of the sums, in memory or on disk; 0 while all uploads fit."""
        return sum(sums.nbytes for sums in self._sums.values())

    @own_modes()
    def close(self) -> ServerState:
        """The next state. It does not depend on the uploads' order (if they were added up: up to float64 rounding).

        Raises:
            QuorumNotMet: too few good uploads. RankMismatch, RankTie: from the method.
            HyperparameterError: an upload was changed after it was added; the round was closed before; or an exception
                ended it after uploads were added up.
        """
        with self._one_at_a_time:
            self._require_whole()
            if not self._sums:
                self._require_unwritten()
                self._lost = True  # no state could include an upload that came now
                try:
                    return close_whole(self._held, self._attendance)
                except QuorumNotMet:
                    self._lost = False
                    raise
            self._add_up()
            self._attendance.require_quorum()
            self._lost = True  # the sums are used up
            return self._closed()

    def _closed(self) -> ServerState:
        terms, counts = self._terms, self._attendance.counts
        everyone = math.fsum(counts.values()) if terms.missing == "zero" else None

        def after(name: str) -> Any:
            method, before, sums = terms.method, terms.state.modules[name], self._sums.pop(name)
            if isinstance(sums, ProductSums):
                assert isinstance(method, FromSums)
                with blamed_on(method, "from_sums"):
                    return method.from_sums(before, sums.mean(everyone))
            with blamed_on(method, "aggregate"):
                return method.aggregate(before, sums.means(everyone))

        names = list(self._sums)
        with workers(terms.workers) as each:
            modules = dict(zip(names, each(after, names), strict=True))
        heads = self._heads.mean(terms.state.heads) if self._heads is not None else {}
        return closed(terms, modules, heads, self._attendance.tally(shares(dict(sorted(counts.items())))))

    @contextmanager
    def _changing_sums(self) -> Iterator[None]:
        """An interruption here, an exception or Ctrl-C, leaves sums without some uploads: the round is lost."""
        self._lost = True
        yield
        self._lost = False

    def _require_whole(self) -> None:
        if self._lost:
            raise HyperparameterError(
                "this round has ended: it was closed, or an exception interrupted it while it added up uploads, so its "
                "sums lack some of them. The state before it is unchanged. Open the round again "
                "(`server.open(state)`) and add all uploads to it."
            )

    def _require_unwritten(self) -> None:
        for client, upload in self._held.items():
            if _versions(upload) != self._versions[client]:
                raise HyperparameterError(
                    f"the upload of client {client!r} was changed after it was added: its numbers are no longer those "
                    f"that the server checked. The server keeps an upload's own tensors until it adds them up or the "
                    f"round closes. Do not change them before that, or add a copy: "
                    f"`upload.adapter.map(torch.Tensor.clone)`."
                )

    def _add_up(self) -> None:
        """Add the held uploads to the sums, and drop them."""
        self._require_unwritten()
        with self._changing_sums():
            self._add_held()

    def _add_held(self) -> None:
        uploads, counts = [self._held[c] for c in sorted(self._held)], self._attendance.counts
        self._held, self._versions, self._size = {}, {}, 0
        with workers(self._terms.workers) as each:
            found = cancelling(self._terms, uploads, each)
        for client, reason in found.refused.items():
            self._attendance.refuse(UploadRefused(client, reason))
        uploads = [u for u in uploads if u.client.id not in found.refused]
        sent = [name for name in self._terms.state.modules if any(name in u.adapter.modules for u in uploads)]
        for name in sent:
            if name not in self._sums:
                self._sums[name] = self._empty(name)

        def added(name: str) -> None:
            holders = [u for u in uploads if name in u.adapter.modules]
            self._sums[name].add(updates_of(name, holders, counts, found))

        with workers(self._terms.workers) as each:
            each(added, sent)
        if self._terms.roles.heads == "shared":
            for u in uploads:
                more = HeadSums.of(u.adapter.heads, counts[u.client.id])
                self._heads = more if self._heads is None else self._heads + more

    def _empty(self, name: str) -> ProductSums | FactorSums:
        if self._wanted is None:
            return FactorSums()
        return ProductSums.empty(self._terms.state.start.modules[name], self._wanted, on_disk=self._on_disk)


def _versions(upload: Upload) -> list[int]:
    """How often each tensor was written in place, as torch counts; writes through shared numpy memory are not seen."""
    return [0 if t.is_inference() else t._version for t in upload.adapter.tensors()]


def _require_room(start: Adapter, memory: float) -> None:
    """Raises `HyperparameterError` if one client does not fit into half of the memory."""
    largest = sum(t.numel() * 4 for lora in start.modules.values() for t in lora.factors)
    largest += sum(head.numel() * head.element_size() for head in start.heads.values())
    if largest > memory / 2:
        raise HyperparameterError(
            f"Server: half of {memory / 2**20:g} MB cannot hold a client of rank {max(start.ranks.values())}, which "
            f"sends {largest / 2**20:.3g} MB in float32. Give at least {2 * largest / 2**20:.3g} MB."
        )
