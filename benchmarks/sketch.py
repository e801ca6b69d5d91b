"""The two-pass sketch for very many clients: the server's time for one more client, its memory, error, captured share.

    python benchmarks/sketch.py [--clients 100,1000] [--json FILE]

One 4096 x 4096 matrix, clients of rank 8, R = 64, one thread. shared: all clients' columns in one space of dimension 48
up to a tail of 1e-3. flat: independent clients. Error is that of the update against the true mean, which is summed
densely beside it. server ms: for one more client, both exchanges; client ms: what a client computes for them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedlora.lora import LoRA
from fedlora.sketch import SketchPlan, core_message, range_basis, range_message, sketched
from measure import as_json, machine

D, RANK, R, COMMON = 4096, 8, 64, 48


def client(kind: str, k: int, space: Tensor) -> LoRA:
    generator = torch.Generator().manual_seed(k + 1)
    A = torch.randn(RANK, D, generator=generator) / D**0.5
    if kind == "flat":
        return LoRA(torch.randn(D, RANK, generator=generator) / D**0.5, A)
    tail = torch.randn(D, RANK, generator=generator) / D**0.5
    return LoRA(space @ torch.randn(COMMON, RANK, generator=generator) / COMMON**0.5 + 1e-3 * tail, A)


def measured(kind: str, clients: int) -> dict[str, Any]:
    space = torch.linalg.qr(torch.randn(D, COMMON, generator=torch.Generator().manual_seed(0)))[0]
    plan = SketchPlan(D, D, rank=R, seed=1)
    makes, adds, total = [], [], None
    for k in range(clients):
        lora, began = client(kind, k, space), time.perf_counter()
        message = range_message(lora, 1.0, plan)
        made = time.perf_counter()
        total = message if total is None else total + message
        makes.append(made - began)
        adds.append(time.perf_counter() - made)
    assert total is not None
    basis, second, mean = range_basis(total, plan), None, torch.zeros(D, D)
    for k in range(clients):
        lora, began = client(kind, k, space), time.perf_counter()
        message = core_message(lora, 1.0, basis, plan)
        made = time.perf_counter()
        second = message if second is None else second + message
        makes[k] += made - began
        adds[k] += time.perf_counter() - made
        mean.addmm_(*lora.factors)
    assert second is not None
    began = time.perf_counter()
    result = sketched(second, basis, plan, least_captured=0.0)
    close = time.perf_counter() - began
    s = result.spectrum
    mean /= clients
    size = float(mean.norm())
    error = float(torch.addmm(mean, s.U * s.s, s.Vh, alpha=-1).norm()) / size
    held = sum(t.numel() * t.element_size() for t in (total.Y, basis, second.Z, second.C))
    return {
        "kind": kind, "clients": clients, "server_ms": median(adds) * 1e3, "client_ms": median(makes) * 1e3,
        "close_ms": close * 1e3, "server_mb": held / 2**20, "error": error, "captured": result.captured,
        "bound": result.error_bound,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[100, 1000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    heads = ("clients", "server ms", "client ms", "close ms", "server MB", "error", "captured")
    print("        " + "".join(f"{head:>11}" for head in heads))
    for kind in ("shared", "flat"):
        for count in options.clients:
            row = measured(kind, count)
            rows.append(row)
            print(
                f"{kind:8}{count:11}{row['server_ms']:11.3f}{row['client_ms']:11.2f}{row['close_ms']:11.0f}"
                f"{row['server_mb']:11.1f}{row['error']:11.1e}{row['captured']:11.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(as_json({"machine": machine(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
