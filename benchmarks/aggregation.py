"""The server's work, as a multiple of a thin SVD: every method, and the paper's pseudo-code.

    python benchmarks/aggregation.py [--workloads W1,W2,W3,W4] [--repeats 5] [--quick] [--json FILE] [--compare FILE]

The baseline is `baseline.thin_svd`: QR, QR and the SVD of the small core, in float32, from gauge-fixed clients to a
readout for every client. The methods run in a `Server`, from raw (B_i, A_i) to a download for every client, so that
checks, gauge fixing and histories count. One thread, one process, contestants interleaved, processor time: a ratio is
the median over the repeats, with its spread. A workload runs a sample of its modules (`workloads.py`) and counts it up.

--compare FILE: the ratios of a stored result beside those of this run, where processor and torch are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contestants import (
    BARE,
    THIN,
    U32,
    Sample,
    bare_thin_svd_of,
    each,
    flexlora_dense,
    samples_of,
    served,
    thin_svd_core,
    together,
)
from fedlora import LoRA
from fedlora.linalg import Term, projected_sums, weighted_mean
from measure import Contestant, Goal, Ratio, Table, contest, machine, median, on_stderr, report
from workloads import WORKLOADS, Workload

LIMIT = 10.0  # seconds after which a contestant gets no more repeats
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "glora, rho = 1": ("glora", {}), "glora, rho = 0.1": ("glora", {"rho": 0.1}), "svd": ("svd", {}),
    "flexlora": ("flexlora", {}), "hetlora": ("hetlora", {}), "flora": ("flora", {}),
}  # fmt: skip
OF_ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "fedit": ("fedit", {}), "fedex-lora": ("fedex-lora", {}), "fedrot-lora": ("fedrot-lora", {}),
}  # fmt: skip
OURS, CORE, PAPER = "glora, rho = 1", "glora's core alone, rho = 1", "the paper's pseudo-code, float32, rho = {:g}"
CLOSE, EPS = "glora, rho = 1, clients within 1 %", 0.01
GOALS = {"W1": "<= 2.0", "W2": "<= 1.5", "W3": "<= 1.25", "W4": "<= 1.0"}
MEAN, NORMS, DENSE = "the mean of the factors", "hetlora, dense norms", "flexlora, dense SVD, from 2 of the modules"
# The paper's table 6 (Homo, seconds), and what is measured here for its rows.
TABLE_6 = {
    "FedIT": (1.3, MEAN), "GLoRA, rho = 0.1": (2.2, PAPER.format(0.1)), "GLoRA, rho = 0.5": (3.7, PAPER.format(0.5)),
    "HetLoRA": (4.4, NORMS), "GLoRA, rho = 1": (8.3, PAPER.format(1)), "FlexLoRA": (70.7, DENSE),
}  # fmt: skip
ONLY_TABLE_6 = (MEAN, NORMS, DENSE, PAPER.format(0.1), PAPER.format(0.5))
Times = Mapping[str, list[float]]


def glora_core(sample: Sample) -> None:
    """From raw factors to a balanced pair for every client, and each client's basis and alignments."""
    sums = [
        [Term(*lora.factors, p, U32, votes=True) for lora, p in zip(loras, sample.w.weights, strict=True)]
        for loras in sample.modules
    ]
    for made in projected_sums(sums, [None] * len(sums)):
        for r in sample.w.ranks:
            made.spectrum.balanced(torch.arange(r))


def glora_paper_float32(sample: Sample, k: int, rho: float) -> None:
    """The paper's pseudo-code as one would type it in torch, float32: Gram, eigh, a projection loop, thin SVD."""
    p, N = sample.w.weights, sample.cores[k].N
    bases = [U for U, _ in sample.cores[k].pairs]
    M = torch.cat([math.sqrt(x) * U for x, U in zip(p, bases, strict=True)], dim=1)
    R = sample.w.budget(rho)
    values, V = torch.linalg.eigh(M.T @ M)
    U_ref = M @ (V.flip(1)[:, :R] / values.flip(0)[:R].clamp(min=1e-12).sqrt())
    Z, at = torch.zeros(R, N.shape[1]), 0
    for x, U in zip(p, bases, strict=True):
        Z += x * (U_ref.T @ U) @ (N[at : at + U.shape[1]] / math.sqrt(x))
        at += U.shape[1]
    O, s, Vh = torch.linalg.svd(Z, full_matrices=False)
    U_s = U_ref @ O
    for r in sample.w.ranks:
        _ = U_s[:, :r] * s[:r].sqrt(), s[:r].sqrt()[:, None] * Vh[:r]


def mean_factors(sample: Sample, k: int) -> LoRA:
    """FedIT: all clients get the same pair, so there is nothing to read out."""
    B, A = zip(*(lora.factors for lora in sample.modules[k]), strict=True)
    return LoRA(weighted_mean(B, sample.w.weights), weighted_mean(A, sample.w.weights))


def hetlora_dense(sample: Sample, k: int) -> None:
    """HetLoRA of one rank, as papers time it: the norm of each dense product, the weighted mean, a copy for each
    client."""
    sizes = [float(torch.linalg.matrix_norm(lora.delta())) for lora in sample.modules[k]]
    B, A = zip(*(lora.factors for lora in sample.modules[k]), strict=True)
    w = [size / math.fsum(sizes) for size in sizes]
    mean = LoRA(weighted_mean(B, w), weighted_mean(A, w))
    for r in sample.w.ranks:
        _ = mean.B[:, :r].clone(), mean.A[:r].clone()


# ------------------------------------------------------------------------------------------------------ contests


def contestants(w: Workload, samples: Sequence[Sample], close: Sequence[Sample]) -> dict[str, Contestant]:
    """close: samples whose clients are near each other, as after training."""
    rows = {THIN: each(samples, thin_svd_core), BARE: each(samples, bare_thin_svd_of)}
    rows |= {CORE: together(samples, glora_core), CLOSE: served(close, "glora")}
    methods = SERVED | (OF_ONE_RANK if len(set(w.ranks)) == 1 else {})
    rows |= {row: served(samples, name, **hparams) for row, (name, hparams) in methods.items()}
    for rho in (0.1, 0.5, 1.0) if w.name == "W1" else (1.0,):
        rows[PAPER.format(rho)] = each(samples, partial(glora_paper_float32, rho=rho))
    if w.name == "W1":
        rows |= {MEAN: each(samples, mean_factors), NORMS: each(samples, hetlora_dense),
                 DENSE: each([samples[0].first(2)], flexlora_dense, 3)}  # fmt: skip
    return rows


# -------------------------------------------------------------------------------------------------------- output


def say(name: str, what: str) -> None:
    on_stderr(f"{name}: {what}")


def methods_table(found: Mapping[str, Times]) -> Table:
    """Every row over the thin SVD core; the core itself in milliseconds of all modules."""
    rows = dict.fromkeys(row for times in found.values() for row in times if row not in (THIN, *ONLY_TABLE_6))
    table = [
        ["x the thin SVD core", *found],
        ["thin SVD core, ms", *(f"{1e3 * median(t[THIN]):.0f}" for t in found.values())],
    ]
    for row in rows:
        cells = [str(Ratio.of(times[row], times[THIN])) if row in times else "" for times in found.values()]
        table.append([f"**{row}**" if row == OURS else row, *cells])
    return table


def table_6(times: Times) -> Table:
    """The paper's seconds and ours beside them, each also as a multiple of its GLoRA at rho = 0.1."""
    least, ours = TABLE_6["GLoRA, rho = 0.1"]
    rows = [["", "paper, s", "over GLoRA at 0.1", "here", "ms", "over the pseudo-code at 0.1"]]
    for name, (seconds, row) in TABLE_6.items():
        ratio = Ratio.of(times[row], times[ours])
        rows.append(
            [name, f"{seconds:g}", f"{seconds / least:.1f}", row, f"{1e3 * median(times[row]):.1f}", str(ratio)]
        )
    return rows


def goals(found: Mapping[str, Times]) -> list[Goal]:
    return [
        Goal.of(f"{name}: glora over a thin SVD", Ratio.of(found[name][OURS], found[name][THIN]), bound)
        for name, bound in GOALS.items()
        if name in found
    ]


def compare(table: Table, stored: Mapping[str, Any]) -> None:
    """Print the methods' ratios beside those of an earlier result."""
    now = machine()
    for part in ("processor", "torch"):
        if now[part] != stored["machine"][part]:
            print(f"Not compared: {part} is {now[part]!r}, it was {stored['machine'][part]!r}.")
            return
    earlier = {
        row[0]: dict(zip(stored["tables"]["methods"][0], row, strict=True)) for row in stored["tables"]["methods"]
    }
    print(f"\nx the thin SVD core, at commit {stored['machine']['commit']} -> now")
    for row in table[1:]:
        cells = zip(table[0][1:], row[1:], strict=True)
        print(
            row[0], *(f"{name}: {earlier.get(row[0], {}).get(name, '')} -> {cell}" for name, cell in cells), sep="   "
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5, help="three times as many of W1")
    parser.add_argument("--quick", action="store_true", help="few modules, two repeats: whether it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, repeats = time.perf_counter(), 2 if args.quick else args.repeats
    before = json.loads(args.compare.read_text()) if args.compare else None
    found: dict[str, Times] = {}
    for name in args.workloads:
        on_stderr(f"{name}: drawing and gauge-fixing the clients")
        w = WORKLOADS[name]
        rows = contestants(w, samples_of(w, args.quick), samples_of(w, args.quick, EPS))
        found[name] = contest(rows, repeats * w.repeats, LIMIT, partial(say, name))
        on_stderr("")
    tables = {"methods": methods_table(found)}
    if "W1" in found:
        tables["table 6"] = table_6(found["W1"])
    report(args.json, began, tables=tables, goals=goals(found), figures={"seconds": found})
    if before:
        compare(tables["methods"], before)


if __name__ == "__main__":
    main()
