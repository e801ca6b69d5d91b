"""What attackers get to know about one client, without and with differential privacy: an attack, no bound.

    nice python benchmarks/what_leaks.py [--draws 400] [--json FILE] [--quick]

15 clients of the demo (MiniLM, rank 8, Dirichlet 0.5) train one round of eight steps. Two attackers ask two questions
about each of them.

* *Which class has the client more of?* The classifier's bias rises for the class that is seen more often. The attacker
  reads the sign of its change. Asked of clients that have at least 60 % of one class.
* *Did the client take part?* The attacker knows what the client would have sent, and looks along that direction.

The **server** reads the client's upload. A **recipient** of the model knows what all others sent (the worst case, which
differential privacy is about), and subtracts it from the released sum. With privacy the released sum is clipped and
noised by `fedlora.privacy.Mechanism`, for one round of epsilon at delta 1e-3. Chance is 50 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from fedlora.privacy import Mechanism, noise_multiplier_for
from fedlora.privacy.geometry import Layout, bases_of
from fedlora.runs.config import RunConfig
from fedlora.runs.preparation import Prepared, prepare
from fedlora.simulation import RoundRecord, simulate, start
from measure import machine

DELTA, EPSILONS, CLIP = 1e-3, (100.0, 30.0, 8.0, 3.0, 1.0), 0.25
CONFIG = {
    "model": {"name": "demo", "dropout": 0.0},
    "lora": {"target_modules": [f"layer.{k}.attention.self.{part}" for k in (4, 5) for part in ("query", "value")]},
    "clients": {"count": 15, "ranks": [8], "dirichlet_alpha": 0.5},
    "data": {"train": "demo", "max_length": 32, "validation": 0.02, "test": 0.02},
    "method": {"name": "glora"},
    "train": {"learning_rate": 1e-2, "max_steps": 8, "batch_size": 16},
    "run": {"rounds": 1, "threads": 1, "seed": 0},
}


def one_round(quick: bool) -> tuple[Prepared, RoundRecord]:
    """The federation, and its first round with every upload."""
    train = {**CONFIG["train"], "max_steps": 1} if quick else CONFIG["train"]
    prepared = prepare(RunConfig.model_validate({**CONFIG, "train": train}))
    begun = start(prepared.server, prepared.seed_adapter)
    return prepared, next(simulate(prepared.server, prepared.clients, prepared.workers, begun, rounds=1))


def vectors(prepared: Prepared, record: RoundRecord) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Client -> its change in two-sided coordinates (d,), float64; and a mask of the classifier's bias."""
    first = prepared.seed_adapter
    zero = {name: type(lora)(torch.zeros_like(lora.B), lora.A) for name, lora in first.modules.items()}
    layout = Layout(
        {name: bases_of(lora, 4, name, 0, 0) for name, lora in zero.items()},
        {name: tuple(head.shape) for name, head in first.heads.items()},
    )
    found = {
        upload.client.id: layout.vector(
            dict(upload.adapter.modules),  # the first round starts from zero updates
            {name: upload.adapter.heads[name].double() - first.heads[name].double() for name in first.heads},
        )
        for upload in record.uploads
    }
    bias = next(name for name in first.heads if name.endswith("bias"))
    return found, layout.vector({}, {bias: torch.ones_like(first.heads[bias])}) > 0


def guessed(seen: torch.Tensor, bias: torch.Tensor) -> int:
    """The class that the client has more of, by what is seen of its change."""
    return int(seen[bias].argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=400, help="of noise, for each client and epsilon")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one step, three draws: whether it runs")
    arguments = parser.parse_args()
    draws = 3 if arguments.quick else arguments.draws
    prepared, record = one_round(arguments.quick)
    changes, bias = vectors(prepared, record)
    labels = {
        client: torch.bincount(torch.as_tensor(part.labels), minlength=2) for client, part in prepared.parts.items()
    }
    skewed = {c: int(n.argmax()) for c, n in labels.items() if n.max() >= 0.6 * n.sum()}
    size = next(iter(changes.values())).numel()

    server = sum(guessed(changes[c], bias) == k for c, k in skewed.items()) / len(skewed)
    total = sum(changes.values())
    others = {c: total - change for c, change in changes.items()}
    recipient = sum(guessed(total - others[c], bias) == k for c, k in skewed.items()) / len(skewed)
    rows = [
        {"who": "server", "epsilon": None, "class": server, "took_part": 1.0},
        {"who": "recipient", "epsilon": None, "class": recipient, "took_part": 1.0},
    ]
    for epsilon in EPSILONS:
        mechanism = Mechanism.of(CLIP, noise_multiplier_for(epsilon, rounds=1, delta=DELTA), size)
        right, told, asked = 0, 0.0, 0
        for client, change in changes.items():
            clipped = mechanism.mean(mechanism.contribution(change), denominator=1)
            for _ in range(draws):
                noise = mechanism.mean(mechanism.noised(torch.zeros(size, dtype=torch.int64)), denominator=1)
                half = clipped.square().sum() / 2
                told += (float((clipped + noise) @ clipped > half) + float(noise @ clipped <= half)) / 2
                asked += 1
                right += client in skewed and guessed(clipped + noise, bias) == skewed[client]
        rows.append({
            "who": "recipient", "epsilon": epsilon, "z": mechanism.noise_multiplier,
            "class": right / (draws * len(skewed)), "took_part": told / asked,
        })  # fmt: skip
    norms = sorted(float(change.norm()) for change in changes.values())
    print(
        f"{len(skewed)} of {len(changes)} clients have 60 % of one class; norms {norms[0]:.2f} to {norms[-1]:.2f}, "
        f"clip {CLIP}"
    )
    print(f"{'who':10} {'epsilon':>8} {'class right':>12} {'took part':>10}")
    for row in rows:
        print(f"{row['who']:10} {row['epsilon'] or 'none':>8} {row['class']:12.0%} {row['took_part']:10.0%}")
    if arguments.json:
        report = {"machine": machine(), "clip": CLIP, "delta": DELTA, "draws": draws, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
