"""Merging adapters of a 7B-shaped model, from folders to a folder: `fedlora merge` against a script of thirty lines.

    python benchmarks/merging.py [--layers 32] [--repeats 2] [--dtype float32] [--json FILE] [--quick]

8 synthetic adapters of rank 16 on all linear layers of LLaMA-7B's shapes (4096 x 4096, 11008 x 4096, 4096 x 11008). The
script is what one writes by hand: all files loaded whole, factors side by side in float32, QR of both, SVD of the small
core, written with safetensors; it checks nothing. Each contestant is a process of its own, so that its peak memory is
its own: what it held beyond its imports. Compared is processor time, of the program and of the system for it. error:
of the update that was written against the true mean, in float64, over the modules of the first layer; least: of any
adapter of its rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fedlora.adapters.reader import AdapterFile
from fedlora.core.lora import stack
from fedlora.linalg import svd_of_product
from measure import Goal, Ratio, median, memory_peak, on_stderr, report

SHAPES = {
    "q_proj": (4096, 4096), "k_proj": (4096, 4096), "v_proj": (4096, 4096), "o_proj": (4096, 4096),
    "gate_proj": (11008, 4096), "up_proj": (11008, 4096), "down_proj": (4096, 11008),
}  # fmt: skip
ADAPTERS, RANK, SCRIPT = 8, 16, "a script in memory"


def write_adapters(folder: Path, options: argparse.Namespace) -> list[Path]:
    folders = []
    for k in range(ADAPTERS):
        generator = torch.Generator().manual_seed(k)
        tensors = {}
        for layer in range(options.layers):
            for name in SHAPES:
                d_out, d_in = SHAPES[name]
                path = f"base_model.model.layers.{layer}.{name}"
                dtype = getattr(torch, options.dtype)
                A = torch.randn(RANK, d_in, generator=generator) / d_in**0.5
                tensors[f"{path}.lora_A.weight"] = A.to(dtype)
                tensors[f"{path}.lora_B.weight"] = torch.randn(d_out, RANK, generator=generator).to(dtype)
        path = folder / str(k)
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*SHAPES]}
        (path / "adapter_config.json").write_text(json.dumps(config))
        folders.append(path)
    return folders


def fedlora(rank: str) -> Callable[..., None]:
    def work(folders: list[Path], out: Path, options: argparse.Namespace) -> None:
        from fedlora.cli import app

        app(["merge", *map(str, folders), "-o", str(out), "--rank", rank, "--json"], standalone_mode=False)

    return work


def plain(folders: list[Path], out: Path, options: argparse.Namespace) -> None:
    """In memory, in float32, without a check; written in the adapters' own type."""
    loaded = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    merged = {}
    for key in [key for key in loaded[0] if key.endswith(".lora_A.weight")]:
        other = key.replace("lora_A", "lora_B")
        B = torch.cat([tensors[other].float() / len(loaded) for tensors in loaded], dim=1)
        A = torch.cat([tensors[key].float() for tensors in loaded])
        Q_B, R_B = torch.linalg.qr(B)
        Q_A, R_A = torch.linalg.qr(A.T)
        U, s, Vh = torch.linalg.svd(R_B @ R_A.T)
        root, r = s.sqrt(), RANK
        merged[other] = (Q_B @ (U[:, :r] * root[:r])).to(loaded[0][key].dtype)
        merged[key] = ((root[:r, None] * Vh[:r]) @ Q_A.T).to(loaded[0][key].dtype)
    out.mkdir()
    save_file(merged, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text((folders[0] / "adapter_config.json").read_text())


WORK = {"fedlora merge --rank 16": fedlora(str(RANK)), "fedlora merge --rank exact": fedlora("exact"), SCRIPT: plain}


def child(name: str, folder: Path, options: argparse.Namespace) -> None:
    """One contestant in this process: seconds and peak memory, as a line of JSON on stderr."""
    import fedlora.cli.merge  # noqa: F401 - commands are imported when they are called

    torch.set_num_threads(1)
    peak_before = memory_peak(anew=True)
    began, used = time.perf_counter(), time.process_time()
    WORK[name]([folder / str(k) for k in range(ADAPTERS)], folder / "out", options)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    peak = memory_peak() - peak_before
    print(json.dumps({"seconds": seconds, "processor": processor, "peak_mb": peak}), file=sys.stderr)


def errors(folders: list[Path], out: Path, rank: int) -> dict[str, float]:
    """The written update against the true mean, and the least error of its rank, over the first layer."""
    files, merged = [AdapterFile(folder) for folder in folders], AdapterFile(out)
    gap = size = best = 0.0
    for module in (name for name in merged.modules if name.startswith("layers.0.")):
        mean = stack([f.lora(module).map(torch.Tensor.double) for f in files], [1 / len(files)] * len(files))
        got = merged.lora(module).map(torch.Tensor.double)
        gap += stack([got, mean], [1.0, -1.0]).norm() ** 2
        s = svd_of_product(*mean.factors).s
        size, best = size + float(s.square().sum()), best + float(s[rank:].square().sum())
    return {"error": (gap / size) ** 0.5, "best": (best / size) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", default="float32", help="of the adapters: bfloat16, float16, float32")
    parser.add_argument("--repeats", type=int, default=2, help="in turn; the exact merge once")
    parser.add_argument("--quick", action="store_true", help="two layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options)
        return
    options.layers = 2 if options.quick else options.layers
    began = time.perf_counter()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in WORK}
    with tempfile.TemporaryDirectory() as root:
        folders = write_adapters(Path(root), options)
        turns = [(turn, name) for turn, name in itertools.product(range(options.repeats), WORK)
                 if turn == 0 or "exact" not in name]  # fmt: skip
        for turn, name in turns:
            on_stderr(f"{name}, turn {turn + 1} of {options.repeats}")
            command = [sys.executable, __file__, "--child", name, "--folder", root]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed ({done.returncode}): {done.stderr}")
            row = json.loads(done.stderr.strip().splitlines()[-1])
            if turn == 0:
                row |= errors(folders, Path(root) / "out", RANK * (ADAPTERS if "exact" in name else 1))
            runs[name].append(row)
            shutil.rmtree(Path(root) / "out")
    on_stderr("")
    table = [["", "processor s", "x the script", "clock s", "peak MB", "error", "least"]]
    spent = {name: [row["processor"] for row in found] for name, found in runs.items()}
    for name, found in runs.items():
        clock, peak = median([row["seconds"] for row in found]), max(row["peak_mb"] for row in found)
        ratio, first = Ratio.of(spent[name], spent[SCRIPT]), found[0]
        errors_of = (f"{first['error']:.1e}", f"{first['best']:.1e}")
        table.append([name, f"{median(spent[name]):.1f}", str(ratio), f"{clock:.1f}", f"{peak:.0f}", *errors_of])
    name = "fedlora merge --rank 16"
    goals = [Goal.of(f"{name} over its script", Ratio.of(spent[name], spent[SCRIPT]), "<= 1.5")]
    report(options.json, began, tables={"merging": table}, goals=goals, figures=runs)


if __name__ == "__main__":
    main()
