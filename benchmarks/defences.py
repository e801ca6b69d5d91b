"""What a robust rule costs beside the aggregation that it guards: one round of many clients, in one process.

    python benchmarks/defences.py [--d 768] [--repeats 7] [--modules 4] [--json FILE] [--quick]

25 clients of ranks 8 to 32 on modules of d x d, float32, the second round, so that readouts are no zeros. Rows: the
server's aggregation by glora without a rule; its look at terms that cancel; the changes' Gram matrix alone (readouts
included); the rules alone, on that matrix; the aggregation with each rule. A rule that moves changes adds what clients
were sent to the mean, which has as many columns more as these readouts have different ones. One row is a round without
a rule of that many, from one client more: what the exact sum costs by itself where a rule leaves nobody out. One
thread, contestants interleaved, processor time: ratios count, absolute times do not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.linalg import distinct
from fedlora.linalg.parallel import one_by_one
from fedlora.server.cancelling import cancelling
from fedlora.server.changes import Changes, Sent, changes
from fedlora.server.judging import weigh
from fedlora.server.robust_rules import CentredClipping, Clip, GeometricMedian, Krum, Mixing, MultiKrum, Rule
from measure import machine, median, spread

CLIENTS, RANKS, LIARS = 25, (8, 16, 24, 32), 5
TARGETS = {"Gram matrix of the changes": 0.5, "aggregation": 1.5}  # of the aggregation without a rule
RULES: tuple[Rule, ...] = (
    Clip(), GeometricMedian(), Krum(liars=LIARS), MultiKrum(liars=LIARS), CentredClipping(),
    Mixing(MultiKrum(liars=LIARS), liars=LIARS),
)  # fmt: skip


def a_round(modules: int, d: int) -> tuple[Server, object, list[Upload]]:
    """A server after one round, and the uploads of the next."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    names = [f"layer.{k}" for k in range(modules)]
    clients = [Client(f"c{k:02}", RANKS[k % len(RANKS)]) for k in range(CLIENTS)]
    server = Server(build("glora"), workers=1)
    state = server.init(Adapter({m: LoRA(torch.zeros(d, max(RANKS)), draw(max(RANKS), d) / d**0.5) for m in names}))
    uploads: list[Upload] = []
    for last in (False, True):
        uploads = []
        for client in clients:
            sent = server.download(state, client).adapter
            moved = {
                m: LoRA(*(t + 0.1 * t.std().clamp(min=0.01) * draw(*t.shape) for t in sent.modules[m].factors))
                for m in names
            }
            uploads.append(Upload(client, 100 + int(100 * torch.rand((), generator=generator)), Adapter(moved)))
        if not last:
            state = server.aggregate(state, uploads)
    return server, state, uploads


def processor_times(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Name -> seconds of each repeat, one repeat of each in turn, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for k in range(repeats + 1):
        for name, work in contestants.items():
            began = time.process_time()
            work()
            if k:
                times[name].append(time.process_time() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--modules", type=int, default=4)
    parser.add_argument("--d", type=int, default=768, help="rows and columns of a module")
    parser.add_argument("--quick", action="store_true", help="one module, three repeats")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    server, state, uploads = a_round(1 if args.quick else args.modules, args.d)
    names = list(state.modules)  # type: ignore[attr-defined]

    def gram() -> Changes:
        begun = [server.download(state, u.client).adapter.modules for u in uploads]  # type: ignore[arg-type]
        sent = [[Sent(u.adapter.modules[m], b[m]) for u, b in zip(uploads, begun, strict=True)] for m in names]
        return changes(sent, uploads, {})

    def of_as_many_columns() -> Upload:
        sent = [server.download(state, u.client).adapter.modules[names[0]].factors for u in uploads]  # type: ignore[arg-type]
        at, _ = distinct(torch.cat([B for B, _ in sent], dim=1), torch.cat([A for _, A in sent]))
        of_B, of_A = (t.std() for t in uploads[-1].adapter.modules[names[0]].factors)
        more = {m: LoRA(of_B * torch.randn(args.d, len(at)), of_A * torch.randn(len(at), args.d)) for m in names}
        return Upload(Client("more", len(at)), 100, Adapter(more))

    found, more = gram(), of_as_many_columns()
    counts = torch.tensor([u.num_examples for u in uploads], dtype=torch.float64)
    p, who = counts / counts.sum(), [u.client.id for u in uploads]
    contestants: dict[str, Callable[[], object]] = {
        "aggregation, no rule": lambda: server.aggregate(state, uploads),  # type: ignore[arg-type]
        "of that, looking for terms that cancel": lambda: cancelling(server.terms(state), uploads, one_by_one),  # type: ignore[arg-type]
        "aggregation, no rule, of as many columns": lambda: server.aggregate(state, [*uploads, more]),  # type: ignore[arg-type]
        "Gram matrix of the changes": gram,
    }
    for rule in RULES:
        contestants[f"{rule.said}: the rule alone"] = lambda rule=rule: weigh(rule, found, p, who)
        guarded = replace(server, rule=rule)
        contestants[f"{rule.said}: aggregation"] = lambda guarded=guarded: guarded.aggregate(state, uploads)
    times = processor_times(contestants, 3 if args.quick else args.repeats)
    base = median(times["aggregation, no rule"])
    shape = f"{len(names)} modules of {args.d} x {args.d}, {CLIENTS} clients of ranks {RANKS}"
    print(f"## {shape}, sum r_i = {sum(RANKS[k % len(RANKS)] for k in range(CLIENTS))}\n")
    print("| | ms | spread | x aggregation without a rule |\n|---|---:|---:|---:|")
    for name, spent in times.items():
        print(f"| {name} | {1e3 * median(spent):.1f} | {spread(spent):.0%} | {median(spent) / base:.3f} |")
    print(f"\ndifferent columns of readouts: {more.client.rank}")
    for what, most in TARGETS.items():
        ratios = {name: median(t) / base for name, t in times.items() if name.endswith(what)}
        far = [f"{name} {x:.2f}" for name, x in ratios.items() if x > most]
        print(f"{what} <= {most:g}: {'NOT met by ' + ', '.join(far) if far else 'met'}")
    if args.json:
        rows = {name: {"ms": 1e3 * median(spent), "x": median(spent) / base} for name, spent in times.items()}
        args.json.write_text(json.dumps({"machine": machine(), "workload": shape, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
