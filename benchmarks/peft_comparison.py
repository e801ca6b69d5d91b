"""Merging two adapters by peft and by fedlora, case by case: the table of docs/how-to/adapters.md.

    python benchmarks/peft_comparison.py [--write]

The cases are those of tests/support/peft_cases.py: peft makes two adapters on a tiny model, weights 0.7 and 0.3. The
truth is the mean of the two dense models that peft's merge_and_unload makes. A number is the relative error of what the
merge changes in the base model, over all of its tensors, after saving it and loading it again; "refused" is an error of
the library, "not reloadable" a result that peft cannot load again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from fedlora.adapters import AdapterFile
from fedlora.cli import app
from fedlora.errors import FedLoRAError
from support import peft_cases

SHOWN = (
    "linear", "list, regex", "rank and alpha patterns", "rsLoRA", "rsLoRA with patterns", "bfloat16", "Conv1D",
    "lm_head", "heads",
)  # fmt: skip
PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "adapters.md"
BEGIN, END = "<!-- made by benchmarks/peft_comparison.py -->", "<!-- end -->"


def error(got: Mapping[str, Tensor], want: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> float:
    gap = sum(float((got[k].double() - want[k].double()).square().sum()) for k in want)
    size = sum(float((want[k].double() - base[k].double()).square().sum()) for k in want)
    return float((gap / size) ** 0.5)


def by_peft(case: Any, folders: list[Path], out: Path, kind: str) -> None:
    model = PeftModel.from_pretrained(case.build(), folders[0], adapter_name="one")
    model.load_adapter(folders[1], adapter_name="two")
    model.add_weighted_adapter(["one", "two"], list(peft_cases.WEIGHTS), "merged", combination_type=kind)
    model.save_pretrained(out, selected_adapters=["merged"])
    for file in (out / "merged").iterdir():
        file.rename(out / file.name)


def by_fedlora(case: Any, folders: list[Path], out: Path, kind: str) -> None:
    narrow = {stored.dtype for stored in AdapterFile(folders[0]).stored.values()} & {"F16", "BF16"}
    more = ["--dtype", "float32"] if narrow else []  # as peft, which computes and writes narrow adapters in float32
    args = ["merge", *map(str, folders), "--weights", "0.7,0.3", *more, "-o", str(out), "--json"]
    with contextlib.redirect_stdout(io.StringIO()):
        app(args, standalone_mode=False)


def outcome(case: Any, folders: list[Path], merge: Callable[..., None], kind: str, base: Any, want: Any) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        try:
            merge(case, folders, out, kind)
        except (Exception, SystemExit) as refusal:
            return "refused" if isinstance(refusal, FedLoRAError) else f"refused ({type(refusal).__name__})"
        try:
            got = peft_cases.dense(case, out).state_dict()
        except Exception:
            return "not reloadable"
        off = error(got, want, base)
        return f"{off:.0e}" if off < 1e-5 else f"**{off:.2f}**"


def table() -> str:
    rows = ["| adapters | peft linear | peft cat | peft svd | fedlora merge |", "|---|---|---|---|---|"]
    for name in SHOWN:
        case = peft_cases.CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            folders = [peft_cases.saved(case, k, Path(scratch) / str(k)) for k in (0, 1)]
            states = [peft_cases.dense(case, folder).state_dict() for folder in folders]
            want = {k: sum(w * s[k] for w, s in zip(peft_cases.WEIGHTS, states, strict=True)) for k in states[0]}
            base = peft_cases.base_state(case)
            cells = [outcome(case, folders, by_peft, kind, base, want) for kind in ("linear", "cat", "svd")]
            cells.append(outcome(case, folders, by_fedlora, "", base, want))
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/how-to/adapters.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = table()
    if options.write:
        text = PAGE.read_text()
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(f"{text[:begin]}\n{made}\n{text[end:]}")


if __name__ == "__main__":
    main()
