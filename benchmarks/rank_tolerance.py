"""Where does rounding noise end and signal begin? The calibration behind `linalg.rank_tolerance`.

    python benchmarks/rank_tolerance.py [--draws 40] [--json FILE]

Draws B (d, r) of known rank k (full, repeated columns, or random combinations), in a random gauge of given condition,
with column scales or without, stores it in each dtype, and looks at the singular values after column scaling, relative
to ||B||_F: the largest that is noise and the smallest that is signal. A tolerance is right where it lies between them.
"again": the stored factor was re-expressed once more in a gauge of that condition and stored again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch

from fedlora.analysis.audit import random_gauge
from fedlora.linalg import rank_tolerance, right_svd, unit_roundoff
from measure import report

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
CONDITIONS = (1.0, 1e1, 1e2, 1e3, 1e4)
D, R = 256, 8


def draw(
    kind: str, condition: float, scales: bool, seed: int, dtype: torch.dtype, again: bool
) -> tuple[torch.Tensor, int]:
    """B as stored in `dtype`, and its true rank."""
    generator = torch.Generator().manual_seed(seed)
    B = torch.randn(D, R, generator=generator, dtype=torch.float64)
    rank = R
    if kind == "repeated":
        B[:, -1], B[:, -2], rank = B[:, 0], B[:, 1], R - 2
    elif kind == "combined":
        rank = 5
        B = B[:, :rank] @ torch.randn(rank, R, generator=generator, dtype=torch.float64)
    B = B @ random_gauge(R, condition, seed, kind)
    if scales:
        B = B * 10.0 ** (torch.rand(R, generator=generator, dtype=torch.float64) * 9 - 6)
    if again:
        B = B.to(dtype).double() @ random_gauge(R, condition, seed, kind, "again")
    return B.to(dtype), rank


def relative_singular_values(B: torch.Tensor) -> torch.Tensor:
    """As `gauge_fix` sees them: columns scaled to about 1 by powers of two, relative to the Frobenius norm."""
    B = B.double()
    norms = torch.linalg.vector_norm(B, dim=0)
    s, _ = right_svd(B * torch.exp2(-torch.floor(torch.log2(norms))))
    return s / torch.linalg.vector_norm(s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, shares, noises = time.perf_counter(), {}, dict.fromkeys(itertools.product(DTYPES, (False, True)), 0.0)
    for (name, dtype), again, condition in itertools.product(DTYPES.items(), (False, True), CONDITIONS):
        tolerance = rank_tolerance(dtype)
        noise, right, total = 0.0, 0, 0
        # Scales and a second gauge together make other columns of other sizes: not a question of rounding.
        scaling = (False,) if again else (False, True)
        for kind, scales, seed in itertools.product(("full", "repeated", "combined"), scaling, range(args.draws)):
            B, rank = draw(kind, condition, scales, seed, dtype, again)
            s = relative_singular_values(B)
            noise = max([noise, *s[rank:].tolist()])
            right += int((s > tolerance).sum()) == rank
            total += 1
        noises[name, again] = max(noises[name, again], noise / unit_roundoff(dtype))
        shares[name, again, condition] = right / total
    table = [["stored as", "tolerance", "largest noise, u", *(f"right, condition {c:g}" for c in CONDITIONS)]]
    for name, again in itertools.product(DTYPES, (False, True)):
        label = f"{name}, stored twice" if again else name
        right_of = [f"{shares[name, again, c]:.0%}" for c in CONDITIONS]
        table.append([label, f"{rank_tolerance(DTYPES[name]):.1e}", f"{noises[name, again]:.2g}", *right_of])
    report(args.json, began, tables={"rank tolerance": table})


if __name__ == "__main__":
    main()
