"""Prints the bytes that two steps of training take at the peak, above the imports, and the estimate of them.

Arguments: demo or smollm2, examples a batch, tokens, 1 for bfloat16. Needs /proc, and is a process of its own.
"""

from __future__ import annotations

import sys

import peft  # noqa: F401 - before the measuring begins
import torch
import transformers  # noqa: F401

from fedlora.client import begin_round
from fedlora.core.messages import Client, ClientMemory
from fedlora.data import TextData
from fedlora.data.demo import PACKAGED
from fedlora.methods import build
from fedlora.server.server import Server, start
from fedlora.training.local import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from fedlora.training.skeleton import Skeleton


def of_process(key: str) -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(key)).split()[1]) * 1024


def main(name: str, batch: int, length: int, bf16: bool) -> None:
    torch.set_num_threads(1)
    task, targets = ("classification", ["query", "value"]) if name == "demo" else ("causal-lm", ["q_proj", "v_proj"])
    classes, path, lora = ("a", "b") if name == "demo" else (), PACKAGED[name](), LoRASettings(targets=targets)
    train = TrainSettings(steps=2, batch_size=batch, accumulation=1, max_length=length, bf16=bf16, template="none")
    bare = Skeleton(path, task, lora, len(classes))
    ranks = [dict.fromkeys(bare.shapes.modules, 8)]
    planned = bare.memory(ranks, train, length, device="cpu", dtype="float32", bf16=bf16, four_bit=False, scored=1)
    text = tuple("word " * length + str(k) for k in range(2 * batch))
    data = TextData("instruction", text, responses=("yes",) * len(text))
    if classes:
        data = TextData("classification", text, labels=tuple(k % 2 for k in range(2 * batch)), label_names=classes)
    before = of_process("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak begins anew
    model = AdaptedModel.load(path, task, lora, labels=classes)
    trainer, server = LocalTrainer(model, {"a": data}, train, seed=0), Server(build("glora"))
    begun = start(server, model.seed_adapter(8, seed=0)[0])
    job = begin_round(server.download(begun.server, Client("a", 8)), ClientMemory())
    trainer.train(job.download, job.adapter, job.position)
    print(of_process("VmHWM") - before, planned.total)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
