"""Reading out one server state for many clients: milliseconds a client, and over plain copying of the same bytes.

    python benchmarks/readouts.py [--large] [--json FILE]

The state is GLoRA's after two rounds of 24 modules of 768 x 768 (--large: 4 of 4096 x 4096), each from 50 participants
of five ranks, others in the second than in the first. Clients, all of the five ranks in equal shares: of the last round
(their alignment with each component came with the aggregate), of the round before (a product with every component), and
unknown ones (the strongest components, nothing to compare). Where more are read out than took part, they come again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from measure import Contestant, as_json, contest, machine, median, on_stderr, spread
from workloads import draw_factors

# How many of the 50 participants have each rank: 576 in all, below d_out, so that nothing is cut.
PARTICIPANTS = {4: 24, 8: 12, 16: 8, 32: 4, 64: 2}
COUNTS = (5, 50, 500, 1000)
REPEATS = 5


def two_rounds(server: Server, modules: int, d: int) -> tuple[Any, dict[str, list[Client]]]:
    """The state, and its clients by what it knows of them."""
    ranks = tuple(r for r, count in PARTICIPANTS.items() for _ in range(count))
    rows = draw_factors(d, d, (max(ranks),), 0)[0].factors[1]
    state = server.init(Adapter({f"m{k:02}": LoRA(torch.zeros(d, len(rows)), rows) for k in range(modules)}))
    known: dict[str, list[Client]] = {}
    for at, group in enumerate(("of an older round", "of the last round")):
        loras = [draw_factors(d, d, ranks, modules * at + k) for k in range(modules)]
        known[group] = [Client(f"{group} {i:02}", r) for i, r in enumerate(ranks)]
        uploads = [
            Upload(client, i + 2, Adapter({f"m{k:02}": loras[k][i] for k in range(modules)}))
            for i, client in enumerate(known[group])
        ]
        state = server.aggregate(state, uploads)
    known["unknown"] = [Client(f"unknown {i:02}", r) for i, r in enumerate(ranks)]
    return state, known


def asking(clients: Sequence[Client], count: int) -> list[Client]:
    """`count` of them, the ranks in turn."""
    by_rank = [itertools.cycle([c for c in clients if c.rank == r]) for r in PARTICIPANTS]
    return [next(turn) for turn in itertools.islice(itertools.cycle(by_rank), count)]


def measured(server: Server, state: Any, groups: Mapping[str, Sequence[Client]], count: int) -> dict[str, list[float]]:
    """Group -> seconds of `count` downloads; and of copies of such adapters. Long ones are run once."""
    copied = [server.download(state, client).adapter for client in asking(groups["of the last round"], 5)]

    def read(clients: Sequence[Client]) -> None:
        for client in clients:
            server.download(state, client)

    def copy() -> None:
        for adapter in itertools.islice(itertools.cycle(copied), count):
            adapter.map(torch.clone)

    most = 1 if count >= 500 else REPEATS
    runs = {name: Contestant([(1.0, partial(read, asking(group, count)))], most) for name, group in groups.items()}
    runs["copying"] = Contestant([(1.0, copy)])
    return contest(runs, REPEATS, progress=lambda what: on_stderr(f"{count} clients: {what}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="4 modules of 4096 x 4096")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    modules, d = (4, 4096) if args.large else (24, 768)
    server = Server(build("glora"))
    on_stderr("two rounds of 50 participants")
    state, groups = two_rounds(server, modules, d)
    stored = sum(len(s.alignment) for s in state.modules.values())
    kept = sum(t.basis.nbytes for s in state.modules.values() for traces in s.history.values() for t in traces)
    sent = [server.download(state, client).adapter for client in asking(groups["unknown"], 5)]
    size = sum(t.nbytes for a in sent for lora in a.modules.values() for t in lora.tensors().values()) / 5

    rows = []
    lines = ["| clients | | ms each | spread | x copying |", "|---:|---|---:|---:|---:|"]
    for count in COUNTS:
        times = measured(server, state, groups, count)
        for group, t in times.items():
            ms, ratio = 1e3 * median(t) / count, median(t) / median(times["copying"])
            scatter = f"{spread(t):.0%}" if len(t) > 3 else "-"
            lines.append(f"| {count} | {group} | {ms:.2f} | {scatter} | {ratio:.2f} |")
            rows.append({"clients": count, "group": group, "ms_each": ms, "x_copying": ratio, "repeats": len(t)})
    on_stderr("")
    total = sum(r * n for r, n in PARTICIPANTS.items())
    print(f"{modules} modules of {d} x {d}; {sum(PARTICIPANTS.values())} participants a round, sum r_i = {total};")
    print(
        f"{size / 2**20:.2f} MB a client on average; histories of {kept / 2**20:.0f} MB; {stored} alignments stored\n"
    )
    print("\n".join(lines))
    if args.json:
        what = {"modules": modules, "d": d, "mb_each": size / 2**20, "history_mb": kept / 2**20, "alignments": stored}
        args.json.write_text(as_json({"machine": machine(), "state": what, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
