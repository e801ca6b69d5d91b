"""Many small modules: 2,000 of 16 x 16 through the server, over a loop of thin SVDs and over `svd` in the same server.

    python benchmarks/small_modules.py [--repeats 5] [--quick] [--json FILE]

Three clients of rank 4. The loop weighs and stacks the factors and takes `baseline.bare_thin_svd`, one module after
the other, in their dtype. Modules in float64 and those with deficient factors go by Householder's QR: 250 of them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from baseline import bare_thin_svd
from contestants import Sample, served
from measure import Contestant, Goal, Ratio, contest, on_stderr, report
from workloads import Shape, Workload, draw_factors

LOOP = "a loop of thin SVDs"
SMALL = {"float32": (2000, ""), "float64": (250, ""), "float32, deficient": (250, "deficient")}


def small_modules(kind: str, quick: bool) -> dict[str, Contestant]:
    """Modules of 16 x 16 from three clients of rank 4. deficient: the last column of every B is the sum of the others.

    The loop is `baseline.bare_thin_svd`, one module after the other, in the dtype of the factors.
    """
    count, how = SMALL[kind]
    count = count // 10 if quick else count
    dtype = torch.float64 if kind == "float64" else torch.float32
    w = Workload("small", kind, (Shape(16, 16, count, count, count),), (4,) * 3)
    modules = [[lora.map(lambda t: t.to(dtype)) for lora in draw_factors(16, 16, w.ranks, k)] for k in range(count)]
    if how:
        for B, _ in (lora.factors for loras in modules for lora in loras):
            B[:, -1] = B[:, :-1].sum(dim=1)
    sample = Sample(w, w.shapes[0], modules, [])

    def loop() -> None:
        for loras in modules:
            Bs, As = zip(*(lora.factors for lora in loras), strict=True)
            weighed = [p * B for p, B in zip(w.weights, Bs, strict=True)]
            bare_thin_svd(torch.cat(weighed, dim=1), torch.cat(As))

    served_by = {name: served([sample], name) for name in ("svd", "glora")}
    return {LOOP: Contestant([(1.0, loop)]), **served_by}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the modules")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = {}
    for kind in SMALL:
        rows, repeats = small_modules(kind, args.quick), 2 if args.quick else args.repeats
        found[kind] = contest(rows, repeats, progress=lambda what, kind=kind: on_stderr(f"{kind}: {what}"))
    on_stderr("")
    heads = ("how many", "svd, server, over the loop", "**glora, server, over the loop**", "glora over svd")
    table: list[list[str]] = [["modules of 16 x 16", *heads]]
    goals: list[Goal] = []
    for kind, times in found.items():
        of_svd, ours, both = (
            Ratio.of(times[over], times[under]) for over, under in (("svd", LOOP), ("glora", LOOP), ("glora", "svd"))
        )
        table.append([kind, f"{SMALL[kind][0]:,}", str(of_svd), str(ours), str(both)])
        goals.append(Goal.of(f"16 x 16, {kind}: glora over {LOOP}", ours, "<= 2"))
    report(args.json, began, tables={"small modules": table}, goals=goals, figures={"seconds": found})


if __name__ == "__main__":
    main()
