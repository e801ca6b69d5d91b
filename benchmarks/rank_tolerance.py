"""Where does rounding noise end and signal begin? The calibration behind `linalg.rank_tolerance`.

    python benchmarks/rank_tolerance.py [--draws 40] [--json FILE]

Draws B (d, r) of known rank k (full, repeated columns, or random combinations) with a full A (r, d), in a random gauge
of given condition, with column scales or without, stores both in each dtype, and looks at the singular values of B A
relative to ||(||b_j|| ||a_j||)_j||: the largest that is noise, and how often the library finds k. A tolerance is right
where it lies between noise and signal. "stored twice": the factors were re-expressed once more and stored again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch

from fedlora.analysis.audit import random_gauge
from fedlora.linalg import Term, projected_sum, rank_tolerance, unit_roundoff
from measure import report

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
CONDITIONS = (1.0, 1e1, 1e2, 1e3, 1e4)
D, R = 256, 8


def draw(kind: str, condition: float, scales: bool, seed: int, dtype: torch.dtype, again: bool) -> tuple[Term, int]:
    """A client's factors as stored in `dtype`, and the true rank of their product."""
    generator = torch.Generator().manual_seed(seed)
    B, A = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((D, R), (R, D)))
    rank = R
    if kind == "repeated":
        B[:, -1], B[:, -2], rank = B[:, 0], B[:, 1], R - 2
    elif kind == "combined":
        rank = 5
        B = B[:, :rank] @ torch.randn(rank, R, generator=generator, dtype=torch.float64)
    gauge = random_gauge(R, condition, seed, kind)
    if scales:
        gauge = gauge * 10.0 ** (torch.rand(R, generator=generator, dtype=torch.float64) * 9 - 6)
    B, A = B @ gauge, torch.linalg.solve(gauge, A)
    if again:
        gauge = random_gauge(R, condition, seed, kind, "again")
        B, A = B.to(dtype).double() @ gauge, torch.linalg.solve(gauge, A.to(dtype).double())
    return Term(B.to(dtype), A.to(dtype), 1.0, unit_roundoff(dtype), votes=True), rank


def largest_noise(term: Term, rank: int) -> float:
    """Of the singular values beyond the true rank, relative to the sizes of the terms."""
    B, A = term.B.double(), term.A.double()
    s = torch.linalg.svdvals(torch.linalg.qr(B).R @ torch.linalg.qr(A.mT).R.mT)
    return float(s[rank:].max() / torch.linalg.vector_norm(B.norm(dim=0) * A.norm(dim=1))) if rank < R else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, shares, noises = time.perf_counter(), {}, dict.fromkeys(itertools.product(DTYPES, (False, True)), 0.0)
    for (name, dtype), again, condition in itertools.product(DTYPES.items(), (False, True), CONDITIONS):
        noise, right, total = 0.0, 0, 0
        # Scales and a second gauge together make other columns of other sizes: not a question of rounding.
        scaling = (False,) if again else (False, True)
        for kind, scales, seed in itertools.product(("full", "repeated", "combined"), scaling, range(args.draws)):
            term, rank = draw(kind, condition, scales, seed, dtype, again)
            noise = max(noise, largest_noise(term, rank))
            right += projected_sum([term]).bases[0].shape[1] == rank
            total += 1
        noises[name, again] = max(noises[name, again], noise / unit_roundoff(dtype))
        shares[name, again, condition] = right / total
    table = [["stored as", "tolerance", "largest noise, u", *(f"right, condition {c:g}" for c in CONDITIONS)]]
    for name, again in itertools.product(DTYPES, (False, True)):
        label = f"{name}, stored twice" if again else name
        right_of = [f"{shares[name, again, c]:.0%}" for c in CONDITIONS]
        table.append(
            [label, f"{rank_tolerance(unit_roundoff(DTYPES[name])):.1e}", f"{noises[name, again]:.2g}", *right_of]
        )
    report(args.json, began, tables={"rank tolerance": table})


if __name__ == "__main__":
    main()
