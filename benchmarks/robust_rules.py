"""What a robust rule costs beside the aggregation that it guards: one round of many clients, in one process.

    python benchmarks/robust_rules.py [--d 768,4096] [--repeats 5] [--json FILE] [--quick]

25 clients of ranks 8 to 32 on one module of d x d, float32, the second round, so that readouts are no zeros. Rows: the
changes' Gram matrix alone (readouts included); the aggregation by glora with each rule. A rule that moves changes adds
what clients were sent to the sum, so a rule's round is compared with one without a rule that has as many columns, from
more clients. One thread, contestants interleaved, processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.server.changes import distinct_slots, gram_of_changes
from fedlora.server.kept import Kept
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping, Rule
from measure import Contestant, Goal, Ratio, contest, on_stderr, report

CLIENTS, RANKS, F = 25, (8, 16, 24, 32), 5
BESIDE = "a round without a rule, of as many columns"
PLAIN, GRAM, AS_MANY = "no rule", "the Gram matrix of the changes, alone", "no rule, as many columns as a rule's sum"
RULES: dict[str, Rule] = {
    "krum": Krum(F), "multi-krum": MultiKrum(F), "mixing, then multi-krum": NNM(MultiKrum(F), F),
    "clip at the median": NormClipping(), "geometric median": GeometricMedian(),
    "centered clipping": CenteredClipping(),
}  # fmt: skip


def a_round(modules: int, d: int) -> tuple[Server, ServerState, list[Upload]]:
    """A server after one round, and the uploads of the next."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    names = [f"layer.{k}" for k in range(modules)]
    clients = [Client(f"c{k:02}", RANKS[k % len(RANKS)]) for k in range(CLIENTS)]
    server = Server(build("glora"))
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


def contestants(d: int) -> dict[str, Callable[[], object]]:
    server, state, uploads = a_round(1, d)
    (name,) = state.modules

    def gram() -> torch.Tensor:
        begun = [server.download(state, u.client).adapter for u in uploads]
        return gram_of_changes(uploads, begun, {})

    def of_as_many_columns() -> list[Upload]:
        slots, _ = distinct_slots([server.download(state, u.client).adapter.modules[name] for u in uploads])
        of_B, of_A = (t.std() for t in uploads[-1].adapter.modules[name].factors)
        more = []
        for k in range(0, slots.rank, max(RANKS)):
            r = min(max(RANKS), slots.rank - k)
            lora = LoRA(of_B * torch.randn(d, r), of_A * torch.randn(r, d))
            more.append(Upload(Client(f"more{k}", r), 100, Adapter({name: lora})))
        return more

    more = of_as_many_columns()
    return {
        PLAIN: lambda: server.aggregate(state, uploads),
        GRAM: gram,
        AS_MANY: lambda: server.aggregate(state, [*uploads, *more]),
        **{name: partial(replace(server, round=Kept(rule)).aggregate, state, uploads) for name, rule in RULES.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--d", type=lambda text: [int(d) for d in text.split(",")], default=[768, 4096])
    parser.add_argument("--quick", action="store_true", help="small modules, two repeats: whether it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, found = time.perf_counter(), {}
    for d in [256] if args.quick else args.d:
        rows = {name: Contestant([(1.0, work)]) for name, work in contestants(d).items()}
        repeats = 2 if args.quick else args.repeats if d < 2000 else 2
        found[d] = contest(rows, repeats, progress=lambda what, d=d: on_stderr(f"{d}: {what}"))
    on_stderr("")
    over = {d: {name: Ratio.of(t, times[AS_MANY]) for name, t in times.items()} for d, times in found.items()}
    table = [[f"x {BESIDE}", *(f"{d} x {d}" for d in found)]]
    table += [[name, *(str(over[d][name]) for d in found)] for name in (PLAIN, GRAM, *RULES)]
    goals = []
    for d, ratios in over.items():
        slowest = max(RULES, key=lambda name, ratios=ratios: ratios[name].value)
        goals.append(Goal.of(f"{d} x {d}: slowest rule, {slowest}", ratios[slowest], "<= 1.3"))
    report(args.json, began, tables={"rules": table}, goals=goals, figures={"seconds": found})


if __name__ == "__main__":
    main()
