"""`fedlora train`: a site's half of a round without a network."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.cli.options import Force, Limit, fetched, limits_of, refuse_idle, split_names
from fedlora.cli.run_words import tell_cut
from fedlora.cli.screen import console
from fedlora.core.folders import check_target
from fedlora.errors import ConfigError

if TYPE_CHECKING:
    from fedlora.offline.examples import Columns, Kind

_OF_LANGUAGE_MODELS = ("template", "messages", "prompt", "response")
_OF_OWN_LOOP = ("steps", "epochs", "lr", "batch_size", "max_length", "class_weights", "seed", "bf16", "template")
_OF_CLASSES = ("label", "labels", "text", "pair", "class_weights")


def train(
    context: typer.Context,
    base: Annotated[
        str,
        typer.Option(
            help="the base model: a directory, a hub id (also owner/name@revision), demo, smollm2", show_default=False
        ),
    ],
    data: Annotated[Path, typer.Option(help="your examples: .jsonl, .csv, .tsv or .parquet", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    client: Annotated[str, typer.Option(help="this site's name, the same every round", show_default=False)],
    adapter: Annotated[
        Path | None,
        typer.Option(help="the received adapter, or owner/name@revision (default: a fresh one)", callback=fetched),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="rank of a fresh adapter")] = 8,
    targets: Annotated[str, typer.Option(help="modules of a fresh adapter, or all-linear")] = "all-linear",
    start_seed: Annotated[int, typer.Option(help="seed of a fresh adapter or classifier, one for all sites")] = 0,
    labels: Annotated[str | None, typer.Option(help="class names in one order for all sites: a,b,c")] = None,
    text: Annotated[str, typer.Option(help="column of the sentence")] = "text",
    pair: Annotated[str | None, typer.Option(help="column of a second sentence")] = None,
    label: Annotated[str, typer.Option(help="column of the class")] = "label",
    prompt: Annotated[str, typer.Option(help="column of an instruction")] = "prompt",
    response: Annotated[str, typer.Option(help="column of its answer")] = "response",
    messages: Annotated[str | None, typer.Option(help="column of conversations (default: messages)")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="template of prompts: chat (the model's own, the default), none, or a text with {prompt}"),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="optimiser steps; 0: train --epochs")] = 0,
    epochs: Annotated[float, typer.Option(help="passes over the data if --steps is 0")] = 1.0,
    lr: Annotated[float, typer.Option(help="learning rate")] = 3e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="examples a step")] = 16,
    max_length: Annotated[int, typer.Option(min=8, help="most tokens of an example")] = 128,
    class_weights: Annotated[
        str | None,
        typer.Option(metavar="balanced|NAME=WEIGHT,...", help="weight of an example in the loss, by its class"),
    ] = None,
    round: Annotated[int, typer.Option(min=1, help="number of the round, for the record and the data order")] = 1,
    seed: Annotated[int, typer.Option(help="seed of the data order and dropout")] = 0,
    command: Annotated[
        str | None, typer.Option(help="a program that trains, as in a run's train.command: 'python my.py {data}'")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(min=1, help="seconds for --command")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    bf16: Annotated[bool, typer.Option("--bf16", help="mixed precision")] = False,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """A site's part of a round without a network: train the adapter it received on its data, and write the upload."""
    from fedlora.adapters.labels import labels_of
    from fedlora.adapters.writer import TRAIN, upload_folder
    from fedlora.offline.examples import Columns, kind_of, parse_class_weights, read_examples
    from fedlora.offline.site import Fresh, train_site
    from fedlora.runs.config import located_command
    from fedlora.runs.quiet import quiet_libraries
    from fedlora.training.programs import Program
    from fedlora.training.settings import TrainSettings

    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", client):
        raise ConfigError(
            f"--client may have letters, digits, '_', '-' and '.', and may not begin with '-' or '.'; got {client!r}."
        )
    check_target(out, force=force, kind=upload_folder(TRAIN), inputs=[data, *([adapter] if adapter else [])])
    if command is not None:
        refuse_idle(context, dict.fromkeys(_OF_OWN_LOOP, "is for fedlora's own loop, and --command trains"))
    else:
        refuse_idle(context, {"time_limit": "is for --command"})
    if steps:
        refuse_idle(context, {"epochs": f"counts only if --steps is 0, and it is {steps}"})
    if adapter is not None:
        refuse_idle(context, dict.fromkeys(("rank", "targets"), f"is for a fresh adapter, and {adapter} has its own"))
    if not (0 < lr < 1e6 and 0 < epochs < 1e6):
        raise ConfigError(f"--lr and --epochs must be positive; got {lr:g} and {epochs:g}.")
    columns = Columns(text=text, pair=pair, label=label, prompt=prompt, response=response, messages=messages)
    kind = kind_of(data, columns)
    refuse_idle(context, _of_other_kinds(data, columns, kind))
    limits = limits_of(limit)
    names = None if labels is None else split_names(labels)
    if names is None and kind == "classes" and adapter is not None:
        names = list(labels_of(adapter, limits)) or None  # in the adapter's order
    examples = read_examples(data, columns, kind, names)
    weights = parse_class_weights(class_weights, examples) if class_weights is not None else None
    settings = TrainSettings(
        lr=lr, steps=steps, epochs=epochs, batch_size=batch_size, max_length=max_length, bf16=bf16,
        rounds=max(round, 1), template=template, class_weights=weights,
    )  # fmt: skip
    quiet_libraries()
    wanted = targets if targets == "all-linear" else split_names(targets)
    done = train_site(
        base,
        "classification" if kind == "classes" else "causal-lm",
        adapter if adapter is not None else Fresh(wanted, rank, seed=start_seed),
        examples, settings, out, client=client, round=round, seed=seed, start_seed=start_seed, device=device,
        data_file=data, limits=limits, force=force,
        program=None if command is None else Program(located_command(shlex.split(command), Path.cwd()), time_limit),
    )  # fmt: skip
    played = done.played
    tell_cut({client: asdict(done.cut)} if done.cut.cut else {}, done.max_length, "--max-length")
    console.print(
        f"{out}: rank {done.ranks}, {played.upload.num_examples} examples, {played.memory.position} seen, mean loss "
        f"{played.loss:.4f}. Hand it to whoever runs fedlora merge --weights-from num_examples."
    )


def _of_other_kinds(data: Path, columns: Columns, kind: Kind) -> dict[str, str]:
    """Option for other kinds of data -> why it does nothing here."""
    if kind == "classes":
        return dict.fromkeys(
            _OF_LANGUAGE_MODELS, f"is for language models, and {data} holds classes ({columns.label!r})"
        )
    others = dict.fromkeys(_OF_CLASSES, f"is for classes, and {data} has no column {columns.label!r}")
    if kind == "conversations":
        talks = f"is for instructions, and {data} holds conversations ({columns.talks!r})"
        others |= dict.fromkeys(("prompt", "response"), talks)
    return others
