"""How GLoRA's server grows: exponents fitted to times, beside what the paper's appendix on complexity says.

    python benchmarks/complexity.py [--json FILE]

Each term by itself, then the core as a whole. One size grows in a row and the others stay; the exponent is the slope of
log time over log size, by least squares, of the fastest of some repeats. Sizes are large enough that overhead does not
rule, and small enough that a term that is not meant stays below: a row says which. Times mix terms and caches, so a
cube shows as 2.6 and a square as 1.8; what counts is that no exponent is above what is promised.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baseline import thin_svd
from fedlora import build
from fedlora.core.lora import LoRA
from fedlora.core.method import Update
from fedlora.linalg import Budget, Spectrum, consensus_means, gauge_splits, gram, rank_tolerance
from fedlora.methods._spectral import instantiate
from measure import as_json, elapsed, machine, on_stderr
from workloads import draw_factors, gauge_fixed

U32 = rank_tolerance(torch.float32)
SECONDS = 0.25  # for the repeats of one size


@dataclass(frozen=True)
class Term:
    """make(size) prepares and returns what is timed. expected: the slope at most, of the paper or of the algebra."""

    name: str
    paper: str
    grows: str
    sizes: tuple[int, ...]
    expected: float
    make: Callable[[int], Callable[[], object]]


def fastest(work: Callable[[], object]) -> float:
    work()
    times, until = [elapsed(work), elapsed(work)], time.perf_counter() + SECONDS
    while time.perf_counter() < until and len(times) < 200:
        times.append(elapsed(work))
    return min(times)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least squares in log and log."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


# ------------------------------------------------------------------------------------------------------ the terms


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def client_qr(d_out: int, r: int) -> Callable[[], object]:
    pair = (normal(d_out, r), normal(r, 256))
    return lambda: gauge_splits([pair], tolerances=[U32])


def of_gram(d_out: int, S: int) -> Callable[[], object]:
    X = normal(d_out, S)
    return lambda: gram(X)


def eigenproblem(S: int) -> Callable[[], object]:
    G = gram(normal(2 * S, S))
    return lambda: torch.linalg.eigh(G)


def of_columns(d: int, S: int) -> Callable[[], object]:
    M, X = normal(d, S), normal(S, S)
    return lambda: M @ X


def of_rows(S: int, d: int) -> Callable[[], object]:
    Y, N = normal(S, S), normal(S, d)
    return lambda: Y @ N


def core(d_out: int, d_in: int, S: int, R: int | None = None) -> Callable[[], object]:
    """Of clients of rank 16, gauge-fixed; their weights are unequal, so that R cuts no tie."""
    ranks = (16,) * (S // 16)
    weights = [(k + 2) / sum(range(2, len(ranks) + 2)) for k in range(len(ranks))]
    sent, budget = gauge_fixed(draw_factors(d_out, d_in, ranks, seed=0), weights).sent, Budget(R or S)
    (made,) = consensus_means([sent], [budget])
    assert not made.tied
    return lambda: consensus_means([sent], [budget])


def thin_svd_core(d: int, S: int) -> Callable[[], object]:
    M, N = normal(d, S), normal(S, d)
    return lambda: thin_svd(M, N, U32)


def glora_state(d_out: int, ranks: tuple[int, ...]) -> tuple[Any, Any]:
    """GLoRA and its state after one aggregation of clients c0, c1, ... of these ranks."""
    method = build("glora")
    loras = draw_factors(d_out, max(2 * sum(ranks), 256), ranks, seed=0)
    updates = [Update(f"c{i}", 1 / len(ranks), r, loras[i], torch.float32) for i, r in enumerate(ranks)]
    rows = loras[0].factors[1]
    return method, method.aggregate(method.init(LoRA(torch.zeros(d_out, len(rows)), rows), 0), updates)


def selection(d_out: int, clients: int, r: int, stored: bool) -> Callable[[], object]:
    """Of a client of rank r among l = r * clients components."""
    method, state = glora_state(d_out, (r,) * clients)
    assert state.alignment, "the aggregation left no alignment to select by"
    state = state if stored else replace(state, alignment={})
    return lambda: method.select(state, "c0", r)


def scaling(d: int, r: int, clients: int = 1) -> Callable[[], object]:
    spectrum, chosen = Spectrum(normal(d, 256), normal(256).abs(), normal(256, d)), torch.arange(r)

    def every() -> None:
        for _ in range(clients):
            instantiate(spectrum, chosen, r, split="balanced", start=None, seed=(0, 0, ""))

    return every


TALL, WIDE, RANKS = (4096, 8192, 16384, 32768), (128, 256, 512, 1024), (16, 32, 64, 128)
QR, GRAM, CUBE = "client QR: gauge_splits", "Gram matrix M^T M", "eigenproblem"
LEFT, RIGHT, SELECT, SCALE = "U_s = M X", "V^T = Y N", "readout: select, alignment {}", "readout: instantiate"
CORE, CUT = "core, rho = 1, without readouts", "core, cut at R, without readouts"
THIN = "thin SVD core, without readouts"
WHOLE, ON_CLIENT, TRANSLATE = "S^2 (d_out + d_in) + S^3", "on the client, not counted", "S^2 d_in, for R = O(S)"

TERMS = (
    Term(QR, ON_CLIENT, "d_out (r = 32, d_in = 256)", TALL, 1, lambda d: client_qr(d, 32)),
    Term(QR, ON_CLIENT, "r (d_out = 8192, d_in = 256)", RANKS, 2, lambda r: client_qr(8192, r)),
    Term(GRAM, "d_out S^2", "d_out (S = 128)", TALL, 1, lambda d: of_gram(d, 128)),
    Term(GRAM, "d_out S^2", "S (d_out = 4096)", WIDE, 2, lambda S: of_gram(4096, S)),
    Term(CUBE, "S^3", "S", (128, 256, 512, 768), 3, eigenproblem),
    Term(LEFT, "not named", "d_out (S = 128)", TALL, 1, lambda d: of_columns(d, 128)),
    Term(LEFT, "not named", "S (d_out = 4096)", WIDE, 2, lambda S: of_columns(4096, S)),
    Term(RIGHT, TRANSLATE, "d_in (S = 128)", TALL, 1, lambda d: of_rows(128, d)),
    Term(RIGHT, TRANSLATE, "S (d_in = 4096)", WIDE, 2, lambda S: of_rows(S, 4096)),
    Term(
        SELECT.format("stored"), "not counted", "clients, l = 16 of them (d_out = 1024)", (4, 8, 16, 32), 1,
        lambda n: selection(1024, n, 16, stored=True),
    ),
    Term(
        SELECT.format("not stored"), "not counted", "clients, l = 16 of them (d_out = 4096)", (4, 8, 16, 32), 1,
        lambda n: selection(4096, n, 16, stored=False),
    ),
    Term(
        SELECT.format("not stored"), "not counted", "d_out (r = 16, l = 128)", TALL, 1,
        lambda d: selection(d, 8, 16, stored=False),
    ),
    Term(SCALE, "not counted", "d_out = d_in (r = 32)", (1024, 2048, 4096, 8192), 1, lambda d: scaling(d, 32)),
    Term(SCALE, "not counted", "r (d_out = d_in = 4096)", (8, 16, 32, 64), 1, lambda r: scaling(4096, r)),
    Term(SCALE, "not counted", "readouts (r = 16, d = 4096)", RANKS, 1, lambda n: scaling(4096, 16, n)),
    Term(CORE, WHOLE, "S (d_out = d_in = 4096)", (64, 128, 256, 512), 3, lambda S: core(4096, 4096, S)),
    Term(CORE, WHOLE, "d_out (S = 128, d_in = 256)", TALL, 1, lambda d: core(d, 256, 128)),
    Term(CORE, WHOLE, "d_in (S = 128, d_out = 256)", TALL, 1, lambda d: core(256, d, 128)),
    Term(CUT, WHOLE, "R (S = 256, d = 8192)", (16, 32, 64, 128), 1, lambda R: core(8192, 8192, 256, R)),
    Term(THIN, "not in the paper", "S (d_out = d_in = 4096)", (64, 128, 256, 512), 3, lambda S: thin_svd_core(4096, S)),
)  # fmt: skip


def history_bytes(d_out: int, r: int) -> int:
    """What the state keeps of one client for one matrix: the storage behind its bases."""
    _, state = glora_state(d_out, (r, r))
    return sum(trace.basis.untyped_storage().nbytes() for trace in state.history["c0"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(
        "| term | the paper's appendix says | grows | sizes | ms | at most | fitted |\n|---|---|---|---|---|---:|---:|"
    )
    for term in TERMS:
        on_stderr(f"{term.name} in {term.grows}")
        seconds = [fastest(term.make(size)) for size in term.sizes]
        fitted = slope(term.sizes, seconds)
        on_stderr("")
        sizes, shown = ", ".join(map(str, term.sizes)), ", ".join(f"{1e3 * t:.3g}" for t in seconds)
        print(
            f"| {term.name} | {term.paper} | {term.grows} | {sizes} | {shown} | {term.expected:g} | {fitted:.2f} |",
            flush=True,
        )
        rows.append({"term": term.name, "grows": term.grows, "sizes": term.sizes, "seconds": seconds, "fitted": fitted})

    print("\n| history of one client and matrix | bytes | / (4 r_i d_out) |\n|---|---:|---:|")
    history = {
        f"d_out = {d}, r_i = {r}": (history_bytes(d, r), 4 * r * d) for d, r in ((768, 8), (768, 64), (4096, 16))
    }
    for what, (have, want) in history.items():
        print(f"| {what} | {have} | {have / want:.3f} |")
    if args.json:
        args.json.write_text(as_json({"machine": machine(), "rows": rows, "history_bytes": history}) + "\n")


if __name__ == "__main__":
    main()
