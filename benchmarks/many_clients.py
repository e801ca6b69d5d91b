"""Very many clients in constant memory: uploads folded in as they arrive, and the two-pass sketch.

    python benchmarks/many_clients.py [--clients 100,1000] [--memory 8] [--json FILE]

One 4096 x 4096 matrix, clients of rank 8, R = 64, one thread. shared: all clients' columns in one space of dimension 48
up to a tail of 1e-3. flat: independent clients. fold: `Server(memory=...)`, one exchange, uploads as ever. sketch: two
exchanges of plain sums. Error is that of the update against the true mean, which is summed densely beside it; server ms
for one more client, all its exchanges; client ms: what a client computes for them beside training; MB: the most that
the server held for the round, between two clients. A flat spectrum is refused by default; its error is measured with
the refusal off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.errors import RankMismatch
from fedlora.linalg import Spectrum
from fedlora.server.sketch import CoreMessage, SketchPlan, core_message, range_basis, range_message, sketched
from measure import as_json, machine

D, RANK, R, COMMON = 4096, 8, 64, 48


@dataclass(frozen=True)
class Row:
    kind: str
    how: str
    clients: int
    server_ms: float
    client_ms: float
    close_ms: float
    server_mb: float
    error: float
    kept: float
    bound: float
    refused: bool


def client(kind: str, k: int, space: Tensor) -> LoRA:
    generator = torch.Generator().manual_seed(k + 1)
    A = torch.randn(RANK, D, generator=generator) / D**0.5
    if kind == "flat":
        return LoRA(torch.randn(D, RANK, generator=generator) / D**0.5, A)
    tail = torch.randn(D, RANK, generator=generator) / D**0.5
    return LoRA(space @ torch.randn(COMMON, RANK, generator=generator) / COMMON**0.5 + 1e-3 * tail, A)


def error(spectrum: Spectrum, true: Tensor) -> float:
    return float(torch.addmm(true, spectrum.U * spectrum.s, spectrum.Vh, alpha=-1).norm() / true.norm())


def measured(kind: str, clients: int, memory: float) -> list[Row]:
    """Both ways over the same clients."""
    space = torch.linalg.qr(torch.randn(D, COMMON, generator=torch.Generator().manual_seed(0)))[0]
    plan, true = SketchPlan(D, D, rank=R, seed=1), torch.zeros(D, D)
    server = Server(build("glora", rank=R, history_limit=0), memory=memory)
    opened = server.open(server.init(Adapter({"m": LoRA(torch.zeros(D, RANK), torch.ones(RANK, D))})))
    folds, makes, adds, total, most = [], [], [], None, 0
    for k in range(clients):
        lora = client(kind, k, space)
        began = time.perf_counter()
        opened.add(Upload(Client(f"c{k}", RANK), 1, Adapter({"m": lora})))
        folds.append(time.perf_counter() - began)
        most = max(most, opened.nbytes)
        began = time.perf_counter()
        message = range_message(lora, 1.0, plan)
        made = time.perf_counter()
        total = message if total is None else total + message
        makes.append(made - began)
        adds.append(time.perf_counter() - made)
        true.addmm_(*lora.factors, alpha=1 / clients)
    assert total is not None
    basis, second = range_basis(total, plan), None
    for k in range(clients):
        lora = client(kind, k, space)
        began = time.perf_counter()
        message2 = core_message(lora, 1.0, basis, plan)
        made = time.perf_counter()
        second = message2 if second is None else second + message2
        makes[k] += made - began
        adds[k] += time.perf_counter() - made
    assert second is not None
    held = sum(t.nbytes for t in (total.Y, basis, second.Z, second.C)) / 2**20
    return [
        _folded(kind, clients, server, opened, true, mean(folds), most / 2**20),
        _sketched(kind, clients, plan, basis, second, true, (median(adds), median(makes)), held),
    ]


def _folded(kind: str, clients: int, server: Server, opened: Any, true: Tensor, per_client: float, mb: float) -> Row:
    sums = opened._sums
    began = time.perf_counter()
    try:
        state, refused = opened.close(), False
        facts: Mapping[str, Any] = server.diagnostics(state)["m"]
        result = state.modules["m"].spectrum
        kept, bound = facts["kept"], facts["error"]
    except RankMismatch:  # what it would have been
        pair = sums["m"].folded
        refused, kept, bound = True, pair.kept, float("nan")
        U, s, Vh = torch.linalg.svd(pair.M / clients, full_matrices=False)
        result = Spectrum(U[:, :R], s[:R], Vh[:R] @ pair.N)
    took = time.perf_counter() - began
    return Row(kind, "fold", clients, per_client * 1e3, 0.0, took * 1e3, mb, error(result, true), kept, bound, refused)


def _sketched(
    kind: str, clients: int, plan: SketchPlan, basis: Tensor, second: CoreMessage, true: Tensor,
    each: tuple[float, float], held: float,
) -> Row:  # fmt: skip
    began = time.perf_counter()
    result = sketched(second, basis, plan, least_captured=0.0, most_error=1.0)
    took = time.perf_counter() - began
    try:
        sketched(second, basis, plan)
        refused = False
    except RankMismatch:
        refused = True
    return Row(
        kind, "sketch", clients, each[0] * 1e3, each[1] * 1e3, took * 1e3, held, error(result.spectrum, true),
        result.captured, result.error_bound, refused,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[100, 1000])
    parser.add_argument("--memory", type=float, default=8.0, help="MB that the server may take for a round by fold")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(
        "| spectrum | how | clients | server, ms a client | client, ms | close, ms | server, MB | error | kept "
        "| refused |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for kind in ("shared", "flat"):
        for count in options.clients:
            for row in measured(kind, count, options.memory):
                rows.append(row)
                print(
                    f"| {row.kind} | {row.how} | {row.clients:,} | {row.server_ms:.2f} | {row.client_ms:.1f} | "
                    f"{row.close_ms:.0f} | {row.server_mb:.1f} | {row.error:.1e} | {row.kept:.3f} | "
                    f"{'yes' if row.refused else ''} |",
                    flush=True,
                )
    if options.json:
        options.json.write_text(as_json({"machine": machine(), "rows": [asdict(row) for row in rows]}) + "\n")


if __name__ == "__main__":
    main()
