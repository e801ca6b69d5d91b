"""Merging adapters of a 7B-shaped model, from folders to folder: fedlora against peft and chorus-fl.

    python benchmarks/merging.py [--adapters 8] [--rank 16] [--modules q_proj] [--layers 1] [--json FILE]
    python benchmarks/merging.py --only "fedlora;plain script" --modules all-linear --layers 32 --dtype bfloat16

Synthetic adapters of rank r on linear layers of LLaMA-7B's shapes (4096 x 4096, 11008 x 4096, 4096 x 11008). Each
contestant is a process of its own, so that its peak memory is its own: peak is what it held beyond its imports. error
is that of the update it wrote against the true mean, in float64, over the modules of the first two layers; best is the
least that any adapter of its rank can have. chorus-fl is from PyPI (pip install --no-deps chorus-fl) and left out
where it is not installed; it reads no alpha, so it is given factors with alpha = r. The dense contestants take minutes
a module: name few.

"plain script" is what one writes by hand: all files loaded whole, factors side by side in float32, QR of both, SVD of
the small core, written with safetensors; it checks nothing. Compared is processor time in user mode, which a busy
machine moves less than the clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fedlora.adapters.reader import AdapterFile
from fedlora.core.lora import stack
from fedlora.linalg import rank_tolerance, svd_of_product
from measure import as_json, machine, median

SHAPES = {
    "q_proj": (4096, 4096), "k_proj": (4096, 4096), "v_proj": (4096, 4096), "o_proj": (4096, 4096),
    "gate_proj": (11008, 4096), "up_proj": (11008, 4096), "down_proj": (4096, 11008),
}  # fmt: skip
CONTESTANTS = ("fedlora", "fedlora, exact", "plain script", "peft cat", "peft svd", "peft svd, thin", "chorus-fl")


def write_adapters(folder: Path, options: argparse.Namespace) -> list[Path]:
    folders = []
    for k in range(options.adapters):
        generator = torch.Generator().manual_seed(k)
        tensors = {}
        for layer in range(options.layers):
            for name in options.modules:
                d_out, d_in = SHAPES[name]
                path = f"base_model.model.layers.{layer}.{name}"
                dtype = getattr(torch, options.dtype)
                A = torch.randn(options.rank, d_in, generator=generator) / d_in**0.5
                tensors[f"{path}.lora_A.weight"] = A.to(dtype)
                tensors[f"{path}.lora_B.weight"] = torch.randn(d_out, options.rank, generator=generator).to(dtype)
        path = folder / str(k)
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "r": options.rank, "lora_alpha": options.rank, "target_modules": options.modules}
        (path / "adapter_config.json").write_text(json.dumps(config))
        folders.append(path)
    return folders


class Layer(torch.nn.Module):
    """The base model that peft needs in memory: bare linear layers."""

    def __init__(self, modules: list[str], layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            shapes = {name: SHAPES[name] for name in modules}
            self.layers.append(
                torch.nn.ModuleDict(
                    {name: torch.nn.Linear(d_in, d_out, bias=False) for name, (d_out, d_in) in shapes.items()}
                )
            )


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
        root, r = s.sqrt(), options.rank
        merged[other] = (Q_B @ (U[:, :r] * root[:r])).to(loaded[0][key].dtype)
        merged[key] = ((root[:r, None] * Vh[:r]) @ Q_A.T).to(loaded[0][key].dtype)
    out.mkdir()
    save_file(merged, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text((folders[0] / "adapter_config.json").read_text())


def peft(kind: str, **more: Any) -> Callable[..., None]:
    def work(folders: list[Path], out: Path, options: argparse.Namespace) -> None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(Layer(options.modules, options.layers), folders[0], adapter_name="a0")
        for k, folder in enumerate(folders[1:], 1):
            model.load_adapter(folder, adapter_name=f"a{k}")
        names, weight = [f"a{k}" for k in range(len(folders))], 1 / len(folders)
        model.add_weighted_adapter(names, [weight] * len(folders), "merged", combination_type=kind, **more)
        model.save_pretrained(out, selected_adapters=["merged"])
        for file in (out / "merged").iterdir():
            file.rename(out / file.name)

    return work


def chorus(folders: list[Path], out: Path, options: argparse.Namespace) -> None:
    package = types.ModuleType("chorus")  # its __init__ wants a web client; the aggregator does not
    package.__path__ = list(importlib.util.find_spec("chorus").submodule_search_locations)  # type: ignore
    server = types.ModuleType("chorus.server")
    server.__path__ = [f"{path}/server" for path in package.__path__]
    sys.modules |= {"chorus": package, "chorus.server": server}
    from chorus.server.aggregation import FedExLoRA

    loaded = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    merged = FedExLoRA().aggregate(loaded)
    out.mkdir()
    save_file(merged, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text((folders[0] / "adapter_config.json").read_text())


def work_of(name: str, options: argparse.Namespace) -> Callable[..., None]:
    return {
        "fedlora": fedlora(str(options.rank)),
        "fedlora, exact": fedlora("exact"),
        "plain script": plain,
        "peft cat": peft("cat"),
        "peft svd": peft("svd", svd_rank=options.rank),
        "peft svd, thin": peft("svd", svd_rank=options.rank, svd_full_matrices=False),
        "chorus-fl": chorus,
    }[name]


def child(name: str, folder: Path, options: argparse.Namespace) -> None:
    """One contestant in this process: seconds and peak memory, as a line of JSON on stderr."""
    import peft  # noqa: F401 - everybody has the same imports before the clock starts

    import fedlora.cli.merge  # noqa: F401 - commands are imported when they are called

    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work_of(name, options)([folder / str(k) for k in range(options.adapters)], folder / "out", options)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - used
    print(json.dumps({"seconds": seconds, "user": user, "peak_mb": peak / 1024}), file=sys.stderr)


def errors(folders: list[Path], out: Path, rank: int) -> dict[str, float]:
    """The written update against the true mean, and the least error of its rank, over the first two layers."""
    files, merged = [AdapterFile(folder) for folder in folders], AdapterFile(out)
    gap = size = best = 0.0
    for module in (name for name in merged.modules if name.startswith(("layers.0.", "layers.1."))):
        mean = stack([f.lora(module).map(torch.Tensor.double) for f in files], [1 / len(files)] * len(files))
        got = merged.lora(module).map(torch.Tensor.double)
        gap += stack([got, mean], [1.0, -1.0]).norm() ** 2
        s = svd_of_product(*mean.factors, tolerance=rank_tolerance(torch.float64)).s
        size, best = size + float(s.square().sum()), best + float(s[rank:].square().sum())
    return {"error": (gap / size) ** 0.5, "best": (best / size) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument(
        "--modules", type=lambda text: list(SHAPES) if text == "all-linear" else text.split(","), default=["q_proj"]
    )
    parser.add_argument("--dtype", default="float32", help="of the adapters: bfloat16, float16, float32")
    parser.add_argument("--repeats", type=int, default=1, help="of all contestants in turn; the median counts")
    parser.add_argument("--only", type=lambda text: text.split(";"), default=list(CONTESTANTS), help="separated by ;")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options)
        return
    names = [n for n in CONTESTANTS if n in options.only and (n != "chorus-fl" or importlib.util.find_spec("chorus"))]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    print(f"{'':16}{'seconds':>10}{'user s':>9}{'x fedlora':>11}{'peak MB':>10}{'error':>11}{'best of its rank':>18}")
    with tempfile.TemporaryDirectory() as root:
        folders = write_adapters(Path(root), options)
        size = (folders[0] / "adapter_model.safetensors").stat().st_size / 2**20
        shape = ["--modules", ",".join(options.modules), "--layers", str(options.layers)]
        counts = ["--adapters", str(options.adapters), "--rank", str(options.rank)]
        for turn in range(options.repeats):
            for name in names:
                command = [sys.executable, __file__, "--child", name, "--folder", root, *shape, *counts]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{name:16} failed ({done.returncode}): {(done.stderr.strip() or 'killed').splitlines()[-1]}")
                    continue
                row = json.loads(done.stderr.strip().splitlines()[-1])
                if turn == 0:
                    kept = options.rank * (options.adapters if name in ("fedlora, exact", "peft cat") else 1)
                    row |= errors(folders, Path(root) / "out", kept)
                runs[name].append(row)
                shutil.rmtree(Path(root) / "out")
    rows = {name: found[0] | {key: median([row[key] for row in found]) for key in ("seconds", "user", "peak_mb")}
            for name, found in runs.items() if found}  # fmt: skip
    for name, row in rows.items():
        ratio = row["user"] / rows["fedlora"]["user"] if "fedlora" in rows else float("nan")
        print(
            f"{name:16}{row['seconds']:10.2f}{row['user']:9.2f}{ratio:11.2f}{row['peak_mb']:10.0f}"
            f"{row['error']:11.2e}{row['best']:18.2e}"
        )
    print(f"an adapter has {size:.1f} MB of {options.dtype}; {options.adapters} of rank {options.rank}")
    if options.json:
        options.json.write_text(as_json({"machine": machine(), "rows": rows, "adapter_mb": size}) + "\n")


if __name__ == "__main__":
    main()
