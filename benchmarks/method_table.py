"""The table of properties in docs/explanation/methods.md, measured: what each method does on one small federation.

    python benchmarks/method_table.py            print it
    python benchmarks/method_table.py --write    put it into docs/explanation/methods.md
    python benchmarks/method_table.py --check    exit code 1 where docs/explanation/methods.md says something else

Four clients of rank 4 with 10, 25, 40 and 15 examples, two modules (60 x 44 and 36 x 44), float64. "Training" moves
every factor that is not frozen by a random amount, so nothing depends on a model. All of it is a function of fixed
seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedlora import METHODS, Adapter, Client, Download, LoRA, Server, Upload, build
from fedlora.analysis.audit import audit
from fedlora.core.method import Method
from fedlora.core.trainer import Trained
from fedlora.errors import RankMismatch
from fedlora.seeds import derive_seed
from fedlora.server.server import start
from fedlora.simulation import RoundRecord, simulate

SHAPES = {"attn.q": (60, 44), "mlp.up": (36, 44)}
EXAMPLES = {"a": 10, "b": 25, "c": 40, "d": 15}
RANK, ROUNDS = 4, 6
VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("glora", {"rho": 0.5}),
    ("svd", {"energy": 1.0}),
    ("padded-average", {"coordinates": "subspace"}),
)
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "methods.md"
BEGIN, END = "<!-- benchmarks/method_table.py -->\n", "<!-- end of the table -->\n"
NEGLIGIBLE = 1e-9


def noise(shape: tuple[int, ...], *seed: str | int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derive_seed("method-table", *seed))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Pushing:
    """A trainer without a model: what is not frozen moves by a draw of its client and round."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        roles, client = download.roles, download.client.id
        modules = {}
        for name, lora in adapter.modules.items():
            B, A = lora.factors
            if roles.B != "frozen":
                B = B + 0.3 * noise(tuple(B.shape), client, download.round, name, "B")
            if roles.A != "frozen":
                A = A + 0.3 * noise(tuple(A.shape), client, download.round, name, "A")
            modules[name] = LoRA(B, A)
        return Trained(replace(adapter, modules=modules), EXAMPLES[client], 0.0, position + 1)


def play(method: Method, ranks: Mapping[str, int]) -> list[RoundRecord]:
    rank = max(ranks.values())
    seed = {
        name: LoRA(torch.zeros(d_out, rank, dtype=torch.float64), noise((rank, d_in), "A", name) / d_in**0.5)
        for name, (d_out, d_in) in SHAPES.items()
    }
    server = Server(method)
    clients = [Client(name, r) for name, r in ranks.items()]
    return list(simulate(server, clients, Pushing(), start(server, Adapter(seed)), rounds=ROUNDS))


def row(name: str, hparams: dict[str, object]) -> str:
    method = build(name, **hparams)  # type: ignore[arg-type]
    records = play(method, dict.fromkeys(EXAMPLES, RANK))
    try:
        play(method, {"a": 2, "b": 3, "c": 5, "d": 6})
        ranks = "any"
    except RankMismatch:
        ranks = "one"
    # In units of r (d_out + d_in) over all clients and modules, which is what FedIT sends.
    unit = len(EXAMPLES) * RANK * sum(d_out + d_in for d_out, d_in in SHAPES.values()) * 8
    up = [r.bytes.up_adapter / unit for r in records]
    down = [(r.bytes.down_adapter + r.bytes.down_base) / unit for r in records]
    complete = common_uploads(method)
    found = audit(name, method, complete, conditions=(10.0,), draws=2)
    label = " ".join([name, *(f"{k}={v}" for k, v in hparams.items())])
    if found.refused is not None:
        return f"| {label} | {ranks} | {up[-1]:.2f} | {down[0]:.2f} | {down[-1]:.2f} | no global model | | |"
    error = shown(found.error or 0.0, "exact")
    if found.drift is None or found.readout_drift is None:
        return f"| {label} | {ranks} | {up[-1]:.2f} | {down[0]:.2f} | {down[-1]:.2f} | {error} | one factor travels | |"
    moves, readouts = shown(found.drift[10.0], "no"), shown(found.readout_drift[10.0], "no")
    return f"| {label} | {ranks} | {up[-1]:.2f} | {down[0]:.2f} | {down[-1]:.2f} | {error} | {moves} | {readouts} |"


def common_uploads(method: Method) -> list[Upload]:
    """Complete adapters to audit; for a method that freezes A, with one A for all."""
    frozen = method.roles(0).A == "frozen"
    uploads = []
    for client, n in EXAMPLES.items():
        modules = {}
        for name, (d_out, d_in) in SHAPES.items():
            common_B, common_A = noise((d_out, RANK), "common B", name), noise((RANK, d_in), "common A", name)
            own = 0.0 if frozen else 0.5
            modules[name] = LoRA(
                common_B + 0.5 * noise((d_out, RANK), client, name, "own B"),
                common_A + own * noise((RANK, d_in), client, name, "own A"),
            )
        uploads.append(Upload(Client(client, RANK), n, Adapter(modules)))
    return uploads


def shown(x: float, negligible: str) -> str:
    return negligible if x < NEGLIGIBLE else f"{x:.0%}" if x >= 0.01 else f"{x:.0e}"


def table() -> str:
    lines = [
        "| method | ranks | up | down, first | down, later "
        "| off the true mean | model moves | what clients get moves |",
        "|---|---|---|---|---|---|---|---|",
    ]
    entries: list[tuple[str, dict[str, object]]] = [(name, {}) for name in METHODS]
    for name, hparams in VARIANTS:
        entries.insert(1 + max(k for k, (other, _) in enumerate(entries) if other == name), (name, hparams))
    return "\n".join([*lines, *(row(name, hparams) for name, hparams in entries)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    made = table()
    print(made)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    current, after = rest.split(END)
    if options.write:
        PAGE.write_text(before + BEGIN + made + END + after, encoding="utf-8")
    if options.check and current != made:
        print("docs/explanation/methods.md says something else: run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
