"""Merges that take the SVD of a dense matrix, FlexLoRA so and peft, beside the thin SVD and our server.

    python benchmarks/dense.py [--quick] [--json FILE]

W1 and W2; the dense contestants run on two and one of their matrices, and the figure is counted up. peft's is its
`add_weighted_adapter(combination_type="svd")`: it merges in memory and sends nothing.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contestants import THIN, Sample, each, flexlora_dense, samples_of, served, thin_svd_core
from measure import Contestant, Ratio, contest, on_stderr, report
from workloads import WORKLOADS, Workload

OURS, FLEX, PEFT = "glora in our server", "flexlora, dense SVD", "peft, svd merge"


def peft_merge(samples: Sequence[Sample], repeats: int) -> Contestant:
    """peft's `add_weighted_adapter(combination_type="svd")` on bare linear layers that hold every client's factors."""
    from peft import LoraConfig, get_peft_model

    def loaded(sample: Sample) -> Any:
        layers = {f"m{k}": torch.nn.Linear(sample.shape.d_in, sample.shape.d_out, bias=False)
                  for k in range(len(sample.modules))}  # fmt: skip
        configs = {f"c{i}": LoraConfig(r=r, lora_alpha=r, target_modules=list(layers))
                   for i, r in enumerate(sample.w.ranks)}  # fmt: skip
        model = get_peft_model(torch.nn.ModuleDict(layers), configs["c0"], adapter_name="c0")
        for name, config in list(configs.items())[1:]:
            model.add_adapter(name, config)
        for k, loras in enumerate(sample.modules):
            layer = model.base_model.model[f"m{k}"]
            for i, lora in enumerate(loras):
                B, A = lora.factors
                layer.lora_B[f"c{i}"].weight.data, layer.lora_A[f"c{i}"].weight.data = B, A
        return model

    def merge(model: Any, w: Workload) -> None:
        names = [f"c{i}" for i in range(len(w.ranks))]
        model.add_weighted_adapter(names, w.weights, "merged", combination_type="svd", svd_rank=max(w.ranks))
        model.delete_adapter("merged")

    return Contestant([(s.times, partial(merge, loaded(s), s.w)) for s in samples], repeats)


def contestants(sample: Sample) -> dict[str, Contestant]:
    few = [sample.first(2 if sample.shape.d_out < 1000 else 1)]
    return {
        THIN: each([sample], thin_svd_core),
        OURS: served([sample], "glora"),
        FLEX: each(few, flexlora_dense, 3),
        PEFT: peft_merge(few, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="W1's matrices only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peft
    began, found = time.perf_counter(), {}
    for name in ("W1",) if args.quick else ("W1", "W2"):
        sample = samples_of(WORKLOADS[name], args.quick)[0]
        rows = contestants(sample)
        size = f"{sample.shape.d_out} x {sample.shape.d_in}"
        found[size] = contest(rows, 7, progress=lambda what, size=size: on_stderr(f"{size}: {what}"))
    on_stderr("")
    table = [["over the thin SVD core", *found]]
    for row in next(iter(found.values())):
        if row != THIN:
            table.append([row, *(str(Ratio.of(times[row], times[THIN])) for times in found.values())])
    report(args.json, began, tables={"dense": table}, figures={"seconds": found})


if __name__ == "__main__":
    main()
