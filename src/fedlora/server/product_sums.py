"""Running sums of one matrix's updates, for methods that continue from the mean update (`core.summing.FromSums`).

They have a fixed size, 8 d_out d_in bytes and 16 d_out^2 for the votes, however many clients there are. If they are on
disk, the file has no name and disappears with the process.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.method import Update
from fedlora.core.summing import Summing, Sums
from fedlora.errors import HyperparameterError
from fedlora.linalg import gauge_splits, unit_roundoff

_BORNE_ADDITIONS = 256  # in sequence; `linalg.consensus` allows for that many float64 roundoffs


@dataclass(eq=False)
class ProductSums:
    """The sums of one matrix so far, weighted by n_i. products (d_out, d_in): sum n_i B_i A_i; votes, doubts (d_out,
    d_out): sum n_i U_i U_i^T and sum (n_i t_i)^2 U_i U_i^T. The other fields as in `Sums`, before the division: weight,
    roundoff and floor are sums over clients of n_i, n_i u_i and (n_i t_i ||terms||)^2. additions: the number of
    additions so far."""

    wanted: Summing
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
    def empty(cls, start: LoRA, wanted: Summing, *, on_disk: bool) -> ProductSums:
        """Zero sums for the same matrix as `start`."""
        d_out, d_in = (t.shape[k] for k, t in enumerate(start.factors))
        votes, doubts = (_zeros(d_out, d_out, on_disk=on_disk) if wanted.votes else None for _ in range(2))
        return cls(wanted, _zeros(d_out, d_in, on_disk=on_disk), votes, doubts)

    @property
    def nbytes(self) -> int:
        return self.products.nbytes + (2 * self.votes.nbytes if self.votes is not None else 0)

    def add(self, updates: Sequence[Update]) -> None:
        """Add updates with weights n_i, in place."""
        wanted = self.wanted
        counts = [u.weight for u in updates]
        B = torch.cat([n * u.B.double() for n, u in zip(counts, updates, strict=True)], dim=1)
        A = torch.cat([u.A.double() for u in updates])
        self.products.addmm_(B, A)
        tolerances = [wanted.tolerance(u.stored) for u in updates]
        pairs = [(u.B, u.A) for u in updates]
        bases = [U for U, _ in gauge_splits(pairs, tolerances=tolerances, canonical=wanted.canonical)]
        if self.votes is not None and self.doubts is not None:
            U = torch.cat(bases, dim=1)
            each = [(n, n * t * n * t) for n, t, own in zip(counts, tolerances, bases, strict=True) for _ in own[0]]
            for total, factors in zip((self.votes, self.doubts), U.new_tensor(each).reshape(-1, 2).mT, strict=True):
                total.addmm_(U * factors, U.mT)
        sizes = torch.linalg.vector_norm(B, dim=0) * torch.linalg.vector_norm(A, dim=1)
        by_client = torch.split(sizes, [u.lora.rank for u in updates])
        for u, n, t, own, terms in zip(updates, counts, tolerances, bases, by_client, strict=True):
            self.dtype = torch.promote_types(self.dtype, u.B.dtype)
            self.ranks[u.client] = own.shape[1]
            self.bases[u.client] = (own.to(u.B.dtype), unit_roundoff(u.stored))
            self.nominal += u.rank
            self.weight += n
            self.roundoff += n * unit_roundoff(u.stored)
            self.floor += (t * float(torch.linalg.vector_norm(terms))) ** 2
            self.terms += float(terms.sum())
        self.bases = {c: self.bases[c] for c in sorted(self.bases, reverse=True)[: wanted.bases]}
        self.additions += 1

    def mean(self, total: float | None) -> Sums:
        """The sums as methods take them; this uses them up. total: the sum of all weights; None: of those added."""
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
    """Zeros, float64. On disk: in a file without a name."""
    if not on_disk:
        return torch.zeros(rows, columns, dtype=torch.float64)
    with tempfile.TemporaryFile() as file:  # it never has a name, so a kill leaves nothing behind
        try:
            os.posix_fallocate(
                file.fileno(), 0, 8 * rows * columns
            )  # a sparse file without room would kill the process
        except OSError as error:
            raise HyperparameterError(
                f"Server: the sums of uploads beyond the memory do not fit in {tempfile.gettempdir()}: "
                f"{error.strerror}. The round is lost, the state unchanged. Make room, or let TMPDIR name another "
                f"folder."
            ) from error
        return torch.from_file(
            f"/proc/self/fd/{file.fileno()}", shared=True, size=rows * columns, dtype=torch.float64
        ).view(rows, columns)


def product_sizes(start: Adapter, wanted: Summing) -> Mapping[str, int]:
    """Module -> bytes of its sums."""
    shapes = {name: (x.factors[0].shape[0], x.factors[1].shape[1]) for name, x in start.modules.items()}
    return {name: 8 * d_out * (d_in + (2 * d_out if wanted.votes else 0)) for name, (d_out, d_in) in shapes.items()}


def require_disk(sizes: Mapping[str, int]) -> None:
    """Raises `HyperparameterError` if the folder for temporary files has no room for sums of these sizes."""
    needed, folder = sum(sizes.values()), tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        largest = max(sizes, key=lambda name: sizes[name])
        raise HyperparameterError(
            f"Server: the sums of uploads beyond the memory take {needed / 2**20:,.0f} MB ({largest!r} alone "
            f"{sizes[largest] / 2**20:,.0f}), and the folder for temporary files, {folder}, has {free / 2**20:,.0f} "
            f"MB. Let TMPDIR name another folder, adapt fewer modules, or give as much memory as the uploads take."
        )
