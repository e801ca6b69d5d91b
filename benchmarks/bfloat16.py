"""bfloat16 beside float32 on this processor: torch's own products, and fedlora's where instructions are missing.

    python benchmarks/bfloat16.py [--repeats 5] [--json FILE]

A training step of three linear layers (384 -> 1536 -> 1536 -> 384, 256 rows, autocast, forward and backward), one
thread. On a processor with instructions for bfloat16 the last two rows are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from fedlora.training.bfloat16 import bfloat16_autocast, has_instructions
from measure import as_json, interleaved, machine, median


def step(precision: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 1536), nn.GELU(), nn.Linear(1536, 384))
    rows = torch.randn(256, 384)

    def run() -> None:
        with precision():
            loss = net(rows).square().mean()
        loss.backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = {
        "float32": step(nullcontext),
        "bfloat16, torch": step(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        "bfloat16, fedlora": step(lambda: bfloat16_autocast(torch.device("cpu"), on=True)),
    }
    seconds = interleaved(steps, options.repeats)
    print(f"instructions for bfloat16: {'yes' if has_instructions() else 'no'}")
    for name, times in seconds.items():
        print(f"{name:20}{median(times) / median(seconds['float32']):8.2f} x float32")
    if options.json:
        found = {"machine": machine(), "has_instructions": has_instructions(), "seconds": seconds}
        options.json.write_text(as_json(found) + "\n")


if __name__ == "__main__":
    main()
