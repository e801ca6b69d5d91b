"""Local training: the engine against a bare PyTorch loop and against Hugging Face's Trainer, the same work in one run.

    python benchmarks/training.py [--steps 10] [--repeats 5] [--json FILE]

One client's round on the demo's model and data (MiniLM, rank 8 on query and value, 16 sentences a step), one thread:

* bare: the same peft model, the same batches already padded, forward, backward, Adam; nothing else;
* engine: `LocalTrainer.train`, as a run calls it: swaps the adapter in, draws and pads batches, reads the adapter out;
* engine, 4 micro-batches: the same gradient from examples of alike length (train.accumulation = 4);
* Trainer: a new `transformers.Trainer` for the client, as scripts do each round, on the same examples.

What is compared is seconds for the same optimiser steps on the same examples.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from fedlora.client import receive
from fedlora.runs.config import RunConfig, load_config
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.training.encoding import collate
from fedlora.training.local import LocalTrainer
from measure import as_json, interleaved, machine, median

DEMO = Path(__file__).parent.parent / "src" / "fedlora" / "demo.toml"


def configured(steps: int, *more: str) -> RunConfig:
    common = ["clients.ranks=[8]", "clients.count=3", "run.threads=1", "server.quorum=1", "data.test=0.02"]
    return load_config(DEMO, [*common, "data.validation=0.02", f"train.steps={steps}", *more])


def contestants(steps: int) -> dict[str, Any]:
    prepared, split = prepare(configured(steps)), prepare(configured(steps, "train.accumulation=4"))
    state = start(prepared.server, prepared.seed_adapter)
    client = prepared.clients[1]
    download = prepared.server.download(state.server, client)
    mine = receive(download, None)
    engine, micro = prepared.trainer, split.trainer
    assert isinstance(engine, LocalTrainer) and isinstance(micro, LocalTrainer)
    model, data = engine._model, engine._data[client.id]
    order = engine.order(client.id, 0)  # the examples that the engine takes
    batches = [[data[next(order)] for _ in range(16)] for _ in range(steps)]
    padded = [collate(batch, model.tokenizer, model.device) for batch in batches]

    def bare() -> None:
        model.activate(mine)
        parameters = model.trainable()
        network = model.network
        network.train()
        optimizer = torch.optim.Adam(parameters, lr=1e-3)
        for batch in padded:
            network(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def trainer() -> None:
        model.activate(mine)
        model.trainable()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=1e-3, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0.0,
                weight_decay=0.0,
            )  # fmt: skip
            Trainer(
                model.network,
                arguments,
                train_dataset=[example for batch in batches for example in batch],
                data_collator=lambda examples: collate(examples, model.tokenizer, model.device),
            ).train()

    return {
        "bare": bare,
        "engine": lambda: engine.train(download, mine, 0),
        "engine, 4 micro-batches": lambda: micro.train(download, mine, 0),
        "Trainer": trainer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    times = interleaved(contestants(options.steps), options.repeats)
    bare = median(times["bare"])
    examples = options.steps * 16
    print(f"{'':26}{'examples/s':>12}{'speed of bare':>15}{'spread':>20}")
    for name, seconds in times.items():
        spread = f"{examples / max(seconds):.0f} .. {examples / min(seconds):.0f}"
        print(f"{name:26}{examples / median(seconds):12.0f}{bare / median(seconds):15.2f}{spread:>20}")
    result = {
        "machine": machine(),
        "seconds": times,
        "relative": {n: bare / median(s) for n, s in times.items()},
    }
    if options.json:
        options.json.write_text(as_json(result) + "\n")


if __name__ == "__main__":
    main()
