"""Every kind of adapter that the tests know, and the error of what fedlora makes of it.

The table of docs/reference/adapter-kinds.md.

    python benchmarks/adapter_kinds.py [--write]

The kinds are those of tests/support/peft_kinds.py: peft makes two adapters on a tiny model in float64, and peft's own
dense models are the truth. A number is the relative error over all tensors that the adapters change, rounded up to a
power of ten.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.peft_kinds import KINDS, REFUSED, judged, refusal

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "adapter-kinds.md"
HEAD = """# Kinds of adapters

Does fedlora read your kind of adapter, and how exactly? `python benchmarks/adapter_kinds.py --write` made this page.
Each kind has two adapters that peft made, on a tiny base model in float64, and is a test:
`tests/adapters/test_kinds.py`. Numbers are relative errors against peft's own dense models, at most this power of ten:
*copied* means that fedlora read and wrote the adapter and peft loaded it; *merged* is `fedlora merge --weights
0.7,0.3`, loaded by peft, and this result merged with the first adapter. Files in 16 and 32 bit have the rounding of
their type; everything else is as exact as float64, except a factor whose numbers are a millionth (`small numbers`). A
kind that *fails* is a known defect, named in that test.

## What is read

| copied | merged | adapters |
|---|---|---|
"""
REFUSALS = """
## What is refused

fedlora refuses these in one line that names what is in the second column.

| adapters | what the refusal names |
|---|---|
"""


def rounded(error: float, least: int) -> str:
    """0, or the next power of ten, 10^least at least: below that lies only rounding of float64."""
    return f"1e{max(math.ceil(math.log10(error)), least)}" if error > 1e-17 else "0"


def grouped(numbers: Mapping[str, tuple[str, str]]) -> str:
    """A row for each pair of numbers, the most frequent one first. numbers: kind -> (copied, merged)."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, pair in numbers.items():
        kinds.setdefault(pair, []).append(name)
    rows = sorted(kinds.items(), key=lambda row: -len(row[1]))
    return "\n".join(f"| {' | '.join(pair)} | {'; '.join(names)} |" for pair, names in rows)


def table() -> str:
    read = {}
    for name, case in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = judged(case, Path(folder))
                read[name] = rounded(found.copied, -15), rounded(max(found.merged, found.again), -14)
            except Exception as error:  # a defect that the tests know
                read[name] = f"fails ({type(error).__name__})", ""
    refused = []
    for name, (case, words) in REFUSED.items():
        with tempfile.TemporaryDirectory() as folder:
            line = refusal(case, Path(folder))
        refused.append(f"| {name} | `{words}` |" if words in line else f"| {name} | ACCEPTED |")
    return HEAD + grouped(read) + "\n" + REFUSALS + "\n".join(refused) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/reference/adapter-kinds.md")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = table()
    if wanted.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
