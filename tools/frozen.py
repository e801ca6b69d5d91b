"""What must not change while the code becomes less: python tools/frozen.py says each difference, --write freezes anew.

    golden    the frozen vectors' files
    corpus    some 400 adapters, made by peft and drawn by the grammar of hostile ones: accepted or refused, and what is
              read and merged out of them
    runs      bits: a run by each method, one that was stopped and resumed, and a round through Flower's messages
    faults    the rows of the table of faults

Verdicts are an error's class: wording is free. Bits are those of AVX2 code, which newer processors run too, and of one
torch; on another machine they are left out, and said to be. A minute or two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "frozen.json"
ONE_RANK = ("fedit", "fedsa-lora", "fedex-lora", "rolora", "lora-fair", "fedrot-lora")  # methods
DRAWN = 130  # cases of one to three adapters each
sys.path[:0] = [str(ROOT / "tests")]
# Before torch is imported: processors that know more than AVX2 add in another order.
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
Facts = dict[str, Any]


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def bits(tensors: Mapping[str, Any]) -> str:
    """Of all tensors: names, shapes, types, bytes."""
    import torch

    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        whole.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return whole.hexdigest()[:16]


# ---- files -----------------------------------------------------------------------------------------------------------


def golden() -> Facts:
    folder = ROOT / "tests" / "golden"
    return {
        p.name: digest(p.read_bytes().hex()) for p in sorted(folder.iterdir()) if p.suffix in (".json", ".safetensors")
    }


def faults() -> Facts:
    page = (ROOT / "docs" / "how-to" / "runbook.md").read_text()
    return dict(re.findall(r"^\| \*\*(.+?)\*\*: (.+?) \|", page, re.MULTILINE))


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapters(home: Path) -> Iterator[tuple[str, Path, str]]:
    """Each kind that peft makes, and the size of what peft makes of it; drawn ones with up to three changes."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from support import peft_kinds
    from support.hostile import Draft
    from support.hostile import adapters as drawn_adapters

    for name, case in sorted(peft_kinds.KINDS.items()):
        folder = peft_kinds.made(case, 0, home / digest(name))
        changes = peft_kinds.updates(peft_kinds.dense(case, folder), peft_kinds.base_state(case))
        size = _size({key: float(change.norm()) for key, change in changes.items()})
        yield f"peft: {name}", folder, f"peft {size}; "
    drawn: list[tuple[str, list[Draft]]] = []

    every = settings(max_examples=DRAWN, database=None, deadline=None, phases=[Phase.generate])

    @seed(33)
    @settings(every, suppress_health_check=[*HealthCheck])
    @given(drawn_adapters())
    def draw(case: tuple[str, list[Draft]]) -> None:
        drawn.append(case)

    draw()
    for k, (kind, drafts) in enumerate(drawn):
        for draft in drafts:
            changes = ascii(", ".join(draft.changes) or "sound")
            yield f"drawn {k}: {kind}: {changes:.150}", draft.write(home / f"drawn-{k}"), ""


def read(folder: Path) -> str:
    """What fedlora reads of an adapter: the sum of all of its updates, or the class of what refuses it."""
    from fedlora.adapters import AdapterFile, merge
    from fedlora.errors import FedLoRAError

    try:
        file = AdapterFile(folder)
        total = {name: float(file.lora(name).delta().double().norm()) for name in file.modules}
    except FedLoRAError as error:
        return type(error).__name__
    out = folder.with_name(folder.name + "-merged")
    try:
        merge([folder, folder], out, weights=[0.75, 0.25])
        merged = AdapterFile(out)
        again = {name: float(merged.lora(name).delta().double().norm()) for name in merged.modules}
    except FedLoRAError as error:
        return f"{len(total)} modules, {_size(total)}; merge: {type(error).__name__}"
    return f"{len(total)} modules, {_size(total)}; merged {len(again)}, {_size(again)}"


def _size(norms: Mapping[str, float]) -> str:
    return f"{sum(x * x for x in norms.values()) ** 0.5:.6g}"


def corpus() -> Facts:
    with tempfile.TemporaryDirectory() as home:
        return {name: said + read(folder) for name, folder, said in adapters(Path(home))}


# ---- bits ------------------------------------------------------------------------------------------------------------


def runs() -> Facts:
    """Rounds by each method through Flower's own messages; runs of a config, one of them stopped and resumed."""
    import torch

    from fedlora import Client, Server, build
    from fedlora.methods import METHODS
    from support.flower_grid import RANKS, federation
    from support.projects import configured, make_project, ran, written

    torch.set_num_threads(1)
    found: Facts = {}
    with tempfile.TemporaryDirectory() as home:
        place = Path(home)
        for name in sorted(METHODS):
            server = Server(build(name), seed=3)
            ranks = dict.fromkeys(RANKS, 4) if name in ONE_RANK else RANKS
            strategy, grid = federation(place / name, server, ranks, seed=5)
            strategy.start(grid, num_rounds=2)
            got: dict[str, Any] = {}
            for client, rank in ranks.items():
                down = server.download(strategy.flower_state.state.server, Client(client, rank))
                for module, lora in [*down.adapter.modules.items(), *down.base_delta.items()]:
                    got |= {f"{client} {module} {len(got)} {name}": x for name, x in lora.tensors().items()}
                got |= {f"{client} {head}": tensor for head, tensor in down.adapter.heads.items()}
            found[f"flower, {name}"] = bits(got)
        project, steps = make_project(place / "project", layers=2), ("train.steps=4", "train.batch_size=8")
        for name, stop in (("a run", None), ("a resumed run", 1)):
            folder = ran(configured(project, *steps), place / name.replace(" ", "-"), stop)
            if stop is not None:
                ran(configured(project, *steps), folder.path, resume=True)
            adapters = {file: said for file, said in written(folder).items() if file.endswith(".safetensors")}
            losses = [line["losses"] for line in folder.metrics()]
            found[name] = digest(adapters, losses)
    return found


def machine() -> str:
    """What bits depend on."""
    import torch

    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{model[1] if model else '?'}; torch {torch.__version__}; {torch.backends.cpu.get_cpu_capability()}"


PARTS: Mapping[str, Callable[[], Facts]] = {
    "golden": golden, "faults": faults, "corpus": corpus, "runs": runs,
}  # fmt: skip


def compared(before: Facts, now: Facts) -> list[str]:
    """Each difference, a line."""
    lines = []
    for name in sorted({*before, *now}):
        if name not in now:
            lines.append(f"gone     {name}: {before[name]}")
        elif name not in before:
            lines.append(f"new      {name}: {now[name]}")
        elif before[name] != now[name]:
            lines.append(f"changed  {name}: {before[name]} -> {now[name]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, if none is named")
    parser.add_argument("--write", action="store_true", help="freeze what is there now")
    said = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    stored: dict[str, Any] = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    here, differences = machine(), 0
    for name in said.parts or PARTS:
        facts = PARTS[name]()
        if said.write:
            stored[name] = facts
        elif name == "runs" and stored["machine"] != here:
            print(f"{name}: not compared: frozen on {stored['machine']}, and this is {here}")
            continue
        lines = compared(stored.get(name, {}), facts)
        differences += len(lines)
        print(f"{name}: {len(facts)} facts, {len(lines)} differences", *lines, sep="\n  ", flush=True)
    if said.write:
        if "runs" in (said.parts or PARTS):  # the machine of the bits, and of no other part
            stored["machine"] = here
        FACTS.write_text(json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=True) + "\n")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
