"""Very many clients: streamed rounds add uploads up as they come.

    python benchmarks/many_clients.py [--clients 100,1000] [--matrices 1] [--d 4096] [--methods svd] [--json FILE]
    python benchmarks/many_clients.py --clients 10000 --matrices 24 --d 768      W1's matrices

Clients of rank 8 with independent columns on d x d matrices, one thread. svd: the mean of products, whole; svd of rank
64: cut to that; fedit: the factors. ms a client: checks and additions. close: one SVD a matrix; both in processor time.
Peak: the process's own memory at its most, above what it had before the round. Error: of the mean update that the
server keeps of the first matrix, against the true mean, which is summed densely beside it (where it is cut: against the
true mean's projection on the kept directions, so that the cut is no error; of fedit: against the product of the true
mean factors).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Streamed, Upload, build
from measure import Goal, memory_peak, report

RANK, R = 8, 64
METHODS: dict[str, dict[str, Any]] = {"svd": {"energy": 1.0}, "svd cut": {"rank": R}, "fedit": {}}


@dataclass(frozen=True)
class Row:
    method: str
    clients: int
    matrices: int
    client_ms: float
    close_s: float
    peak_mb: float
    error: float


def uploads(clients: int, matrices: int, d: int) -> Iterator[Upload]:
    """Independent normal factors, weights 1 to 3."""
    for k in range(clients):
        g = torch.Generator().manual_seed(k + 1)
        pairs = {
            f"m{j}": LoRA(torch.randn(d, RANK, generator=g) / d**0.5, torch.randn(RANK, d, generator=g) / d**0.5)
            for j in range(matrices)
        }
        yield Upload(Client(f"c{k}", RANK), 1 + k % 3, Adapter(pairs))


def measured(method: str, clients: int, matrices: int, d: int) -> Row:
    server = Server(build(method.split()[0], **METHODS[method]), round=Streamed())
    seed = {f"m{j}": LoRA(torch.zeros(d, RANK), torch.ones(RANK, d)) for j in range(matrices)}
    opened = server.open(server.init(Adapter(seed)))
    true, spent = _True(d, factors=method == "fedit"), 0.0
    before = memory_peak(anew=True)
    for upload in uploads(clients, matrices, d):
        began = time.process_time()
        opened.add(upload)
        spent += time.process_time() - began
        true.add(*upload.adapter.modules["m0"].factors, upload.num_examples)
    began = time.process_time()
    after = opened.close()
    took = time.process_time() - began
    peak = memory_peak() - before
    off = error(server.global_update(after)["m0"], true.mean(), cut=method == "svd cut")
    return Row(method, clients, matrices, 1e3 * spent / clients, took, peak, off)


class _True:
    """The mean update in float64, or the product of the mean factors. Its pages are there before the round begins."""

    def __init__(self, d: int, *, factors: bool) -> None:
        shapes = [(d, RANK), (RANK, d)] if factors else [(d, d)]
        self.sums, self.total = [torch.full(shape, 0.0, dtype=torch.float64).add_(0.0) for shape in shapes], 0.0

    def add(self, B: Tensor, A: Tensor, weight: float) -> None:
        self.total += weight
        if len(self.sums) == 1:
            self.sums[0].addmm_(B.double(), A.double(), alpha=weight)
        else:
            for total, factor in zip(self.sums, (B, A), strict=True):
                total.add_(factor, alpha=weight)

    def mean(self) -> Tensor:
        return (
            torch.linalg.multi_dot([t / self.total for t in self.sums]) if self.sums[1:] else self.sums[0] / self.total
        )


def error(update: LoRA, true: Tensor, *, cut: bool) -> float:
    B, A = (t.double() for t in update.factors)
    if cut:
        Q = torch.linalg.qr(B).Q
        return float((Q.mT @ B @ A - Q.mT @ true).norm() / (Q.mT @ true).norm())
    return float(torch.addmm(true, B, A, alpha=-1).norm() / true.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[100, 1000])
    parser.add_argument("--matrices", type=int, default=1)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    began = time.perf_counter()
    table = [["method", "clients", "ms a client", "close, s", "peak, MB", "error"]]
    for method, count in itertools.product(options.methods, options.clients):
        row = measured(method, count, options.matrices, options.d)
        rows.append(row)
        figures = (f"{row.client_ms:.1f}", f"{row.close_s:.1f}", f"{row.peak_mb:.0f}", f"{row.error:.1e}")
        table.append([method, f"{count:,}", *figures])
    worst = Goal("very many clients: worst error", max(r.error for r in rows), "<= 3e-7", form=".1e")
    report(options.json, began, tables={"many clients": table}, goals=[worst], figures=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
