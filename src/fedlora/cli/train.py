"""`fedlora train`: a site's half of a round without a network."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.cli.options import Force, Limit, limits_of, refuse_idle
from fedlora.cli.screen import console, tell_cut
from fedlora.core.folders import check_target
from fedlora.errors import ConfigError

if TYPE_CHECKING:
    from fedlora.data import TextData
    from fedlora.training.settings import ClassWeights

_OF_LANGUAGE_MODELS = ("template", "messages", "prompt", "response")
_OF_CLASSES = ("label", "labels", "text", "pair", "class_weights")


def train(
    context: typer.Context,
    base: Annotated[str, typer.Option(help="the base model: a directory, a hub id, demo, smollm2", show_default=False)],
    data: Annotated[Path, typer.Option(help="own examples: .jsonl, .csv, .tsv or .parquet", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    client: Annotated[str, typer.Option(help="this site's name, the same every round", show_default=False)],
    adapter: Annotated[Path | None, typer.Option(help="the received adapter (default: a fresh one)")] = None,
    rank: Annotated[int, typer.Option(min=1, help="of a fresh adapter")] = 8,
    targets: Annotated[str, typer.Option(help="of a fresh adapter: module names, or all-linear")] = "all-linear",
    start_seed: Annotated[int, typer.Option(help="of a fresh adapter or classifier: the same at every site")] = 0,
    labels: Annotated[str | None, typer.Option(help="class names in one order for all sites: a,b,c")] = None,
    text: Annotated[str, typer.Option(help="column of the sentence")] = "text",
    pair: Annotated[str | None, typer.Option(help="column of a second sentence")] = None,
    label: Annotated[str, typer.Option(help="column of the class")] = "label",
    prompt: Annotated[str, typer.Option(help="column of an instruction")] = "prompt",
    response: Annotated[str, typer.Option(help="column of its answer")] = "response",
    messages: Annotated[str | None, typer.Option(help="column of conversations (default: messages)")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="around prompts: chat (the model's own, the default), none, or a text with {prompt}"),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="optimiser steps; 0: train --epochs")] = 0,
    epochs: Annotated[float, typer.Option(help="passes over the data, where --steps is 0")] = 1.0,
    lr: Annotated[float, typer.Option(help="learning rate")] = 3e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="examples a step")] = 16,
    max_length: Annotated[int, typer.Option(min=8, help="tokens of an example")] = 128,
    class_weights: Annotated[
        str | None,
        typer.Option(metavar="balanced|NAME=WEIGHT,...", help="what an example counts in the loss, by its class"),
    ] = None,
    round: Annotated[int, typer.Option(min=1, help="which round this is, for the record and the data order")] = 1,
    seed: Annotated[int, typer.Option(help="of the data order and dropout")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    bf16: Annotated[bool, typer.Option("--bf16", help="mixed precision")] = False,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """A site's half of a round: train a received adapter on own data, and write the upload to hand back."""
    from fedlora.adapters.writer import TRAIN, upload_folder
    from fedlora.data import read_classification, read_instructions
    from fedlora.data.labels import given, shown
    from fedlora.data.readers import CHAT
    from fedlora.offline.site import Fresh, train_site
    from fedlora.runs.quiet import quiet_libraries
    from fedlora.training.settings import TrainSettings

    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", client):
        raise ConfigError(f"--client is letters, digits, '_', '-' and '.'; got {client!r}.")
    check_target(out, force=force, kind=upload_folder(TRAIN), inputs=[data, *([adapter] if adapter else [])])
    if steps:
        refuse_idle(context, {"epochs": f"counts where --steps is 0, and it is {steps}"})
    if adapter is not None:
        refuse_idle(context, dict.fromkeys(("rank", "targets"), f"is of a fresh adapter, and {adapter} has its own"))
    if not (0 < lr < 1e6 and 0 < epochs < 1e6):
        raise ConfigError(f"--lr and --epochs are positive numbers; got {lr:g} and {epochs:g}.")
    columns = read_columns(data)
    names = [name.strip() for name in labels.split(",")] if labels is not None else None
    examples: TextData
    if label in columns:
        examples = read_classification(data, text=text, label=label, pair=pair, label_names=names, key="--labels")
        found = examples.label_names
        if len(found) < 2:
            raise ConfigError(
                f"{data}: every example is of one class, {found[0]!r}, and a classifier needs two or more. Where other "
                f"sites have more of them, name all with --labels, the same at every site."
            )
        if names is None and found != tuple(str(k) for k in range(len(found))):
            raise ConfigError(
                f"{data} has the classes {shown(found)}, and another site may have others or number them otherwise, so "
                f"the classifiers would not add up. Give --labels, the same at every site, with the classes of all; "
                f"if there are no more, {given('--labels', found)}."
            )
    elif response in columns or (messages or CHAT) in columns:
        if messages is not None or not {prompt, response} <= set(columns):
            talks = f"is of instructions, and {data} holds conversations ({messages or CHAT!r})"
            refuse_idle(context, dict.fromkeys(("prompt", "response"), talks))
        examples = read_instructions(data, prompt=prompt, response=response, messages=messages)
    else:
        raise ConfigError(
            f"{data} has no column {label!r} (classes), {response!r} (answers) or {messages or CHAT!r} "
            f"(conversations): {columns}."
        )
    if examples.kind == "classification":
        of_models = dict.fromkeys(_OF_LANGUAGE_MODELS, f"is of language models, and {data} holds classes ({label!r})")
        refuse_idle(context, of_models)
    else:
        refuse_idle(context, dict.fromkeys(_OF_CLASSES, f"is of classes, and {data} has no column {label!r}"))
    weights = read_class_weights(class_weights, examples)
    settings = TrainSettings(
        lr=lr, steps=steps, epochs=epochs, batch_size=batch_size, max_length=max_length, bf16=bf16,
        rounds=max(round, 1), template=template, class_weights=weights,
    )  # fmt: skip
    quiet_libraries()
    wanted = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    done = train_site(
        base,
        "classification" if examples.kind == "classification" else "causal-lm",
        adapter if adapter is not None else Fresh(wanted, rank, seed=start_seed),
        examples, settings, out, client=client, round=round, seed=seed, start_seed=start_seed, device=device,
        data_file=data, limits=limits_of(limit), force=force,
    )  # fmt: skip
    played = done.played
    tell_cut({client: asdict(done.cut)} if done.cut.cut else {}, done.max_length, "--max-length")
    console.print(
        f"{out}: rank {done.ranks}, {played.upload.num_examples} examples, {played.memory.position} seen, mean loss "
        f"{played.loss:.4f}. Hand it to whoever runs fedlora merge --weights-from num_examples."
    )


def read_class_weights(text: str | None, examples: TextData) -> ClassWeights | None:
    """Weights of classes from "balanced" or "NAME=WEIGHT,...". Raises `ConfigError`, also for what is no class."""
    if text is None:
        return None
    from fedlora.training.class_weights import weigh_classes

    weights: ClassWeights = "balanced"
    if text != "balanced":
        pairs = [part.rpartition("=") for part in text.split(",")]
        try:
            weights = {name.strip(): float(weight) for name, _, weight in pairs}
        except ValueError as error:
            raise ConfigError(f"--class-weights is balanced or NAME=WEIGHT,NAME=WEIGHT; got {text!r}.") from error
        if not all(0 < weight < float("inf") for weight in weights.values()):
            raise ConfigError(f"--class-weights: each weight is a finite number > 0; got {text!r}.")
    try:
        weigh_classes(examples, weights)
    except ConfigError as error:
        raise ConfigError(str(error).replace("train.class_weights", "--class-weights")) from error
    return weights


def read_columns(data: Path) -> list[str]:
    """The columns of a file."""
    from fedlora.data.readers import open_table

    return list(open_table(data, []).columns)
