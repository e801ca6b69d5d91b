"""`fedlora merge`: several PEFT adapters into one, with or without a federated method, and a round of one by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.table import Table

from fedlora.adapters.merge import Collection, for_vllm, modules_of
from fedlora.adapters.merge_card import merge_card
from fedlora.adapters.reader import WEIGHTS_FILE
from fedlora.adapters.truncation import (
    ModuleReport,
    RankRule,
    against_mean,
    budgeted,
    merge_module,
    total_error,
)
from fedlora.adapters.uploads import read_facts, read_round
from fedlora.adapters.writer import AdapterWriter, pad_rank
from fedlora.cli.adapters import Adapters, AllowUnknown, AsJson, MaxBytes, MaxTensors, opened
from fedlora.cli.measures import byte_size
from fedlora.cli.method_names import parse_methods
from fedlora.cli.screen import can_write, complain, console, print_json, tracked
from fedlora.core.lora import LoRA
from fedlora.core.messages import Missing
from fedlora.errors import ConfigError
from fedlora.offline.readouts import hand_out, readout_ranks
from fedlora.offline.server import ByHand
from fedlora.runs.folder import plain


def merge(
    adapters: Adapters,
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    weights: Annotated[str | None, typer.Option(help="one for each, separated by commas (default: alike)")] = None,
    weights_from: Annotated[str | None, typer.Option(help="num_examples: from each upload.json")] = None,
    method: Annotated[str, typer.Option(help="svd, or a federated method, as 'glora rho=0.5'")] = "svd",
    rank: Annotated[str, typer.Option(help="a number, exact, energy=0.99, or budget=8 (mean rank)")] = "exact",
    missing: Annotated[str, typer.Option(help="a module that one lacks: zero or renormalise")] = "zero",
    heads: Annotated[str, typer.Option(help="fully trained modules: average, holders, first or drop")] = "average",
    max_error: Annotated[
        float | None, typer.Option(help="refuse to write beyond this relative truncation error")
    ] = None,
    serve: Annotated[str | None, typer.Option("--for", help="vllm: one rank that it takes, no saved modules")] = None,
    state: Annotated[Path | None, typer.Option(help="folder that keeps the server's state between merges")] = None,
    readout: Annotated[
        str | None, typer.Option(help="also one adapter a client: 'same', or a TOML file of client = rank")
    ] = None,
    allow_unknown: AllowUnknown = None,
    max_bytes: MaxBytes = None,
    max_tensors: MaxTensors = None,
    json: AsJson = False,
) -> None:
    """Merge adapters into one: the exact weighted mean of their updates, then the best adapter of the asked rank."""
    if missing not in get_args(Missing):
        raise ConfigError(f"--missing is one of {', '.join(get_args(Missing))}; got {missing!r}.")
    absent = cast("Missing", missing)
    if serve not in (None, "vllm"):
        raise ConfigError(f"--for is vllm; got {serve!r}.")
    can_write(out)
    rule = RankRule.parse(rank)
    files = opened(adapters, allow_unknown, max_bytes, max_tensors)
    facts = [read_facts(file.directory) for file in files]
    given = Collection.of(files, _weights(len(files), weights, weights_from, [count for _, count in facts]))
    clients = [name for name, _ in facts]
    ranks = readout_ranks(readout, clients, files) if readout is not None else {}
    extras = given.extras("drop" if serve == "vllm" and heads == "average" else heads)  # type: ignore[arg-type]
    hand: ByHand | None = None
    spec = given.spec()
    with AdapterWriter(out, spec) as writer:
        if method == "svd" and state is None and readout is None:
            merged: Iterator[tuple[LoRA, ModuleReport]] = (
                given.merged(m, rule, absent) for m in tracked(given.modules, "merging")
            )
        else:
            hand = _by_hand(method, state, given, absent)
            hand.aggregate(given, clients, given.weights, [read_round(file.directory) for file in files])
            updates = hand.whole()
            merged = (merge_module(m, [updates[m]], [1.0], rule) for m in tracked(modules_of(updates), "reading out"))
        if rule.kind == "budget":  # needs all spectra before the first cut
            merged = iter(budgeted(list(merged), rule.value))
        if hand is not None and state is None:  # with a state the update is of more than these adapters
            merged = (against_mean(lora, r, given.merged(r.module, RankRule("exact"), absent)) for lora, r in merged)
        if serve == "vllm":
            merged, extras = iter(for_vllm(list(merged), given)), {}
        reports = []
        for lora, report in merged:
            writer.add(report.module, pad_rank(lora, 1))
            reports.append(report)
        error = total_error(reports)
        if max_error is not None and error > max_error:
            raise typer.Exit(
                complain(
                    f"{method} at rank {rank} loses {error:.2%} of the mean, more than --max-error {max_error:g}; "
                    f"nothing was written. A higher rank or energy=... loses less; exact loses nothing."
                )
            )
        writer.finish(extras, merge_card(given, method, rank, reports))
    if hand is not None:
        hand_out(hand, ranks, out, spec, extras)
        hand.save()
    if json:
        print_json(plain({"out": str(out), "error": error, "modules": [asdict(r) for r in reports]}))
        return
    _show(
        given,
        reports,
        out,
        "off the mean of the adapters by"
        if hand is not None and state is None
        else "truncation error over all modules:",
    )
    if hand is not None and hand.state is not None:
        console.print(f"round {hand.state.round} of {method}", markup=False)


# -------------------------------------------------------------------------------------------------------- inside


def _weights(count: int, weights: str | None, weights_from: str | None, examples: Sequence[float]) -> list[float]:
    if weights is not None and weights_from is not None:
        raise ConfigError("give --weights or --weights-from, not both.")
    if weights_from not in (None, "num_examples"):
        raise ConfigError(f"--weights-from is num_examples; got {weights_from!r}.")
    if weights_from is not None:
        return list(examples)
    try:
        return [float(w) for w in weights.split(",")] if weights is not None else [1.0] * count
    except ValueError as error:
        raise ConfigError(f"--weights takes numbers separated by commas; got {weights!r}.") from error


def _by_hand(text: str, state: Path | None, given: Collection, missing: Missing) -> ByHand:
    sections = parse_methods("svd energy=1.0" if text == "svd" else text)
    if len(sections) != 1:
        raise ConfigError(f"--method is one method; got {text!r}.")
    label, section = next(iter(sections.items()))
    chosen = section.build()
    return ByHand(chosen, label, state, base=given.files[0].base, missing=missing)


def _show(given: Collection, reports: Sequence[ModuleReport], out: Path, off: str) -> None:
    """The modules, and how far off the result is; off: of what."""
    if len(reports) <= 60:
        table = Table("module", "stacked rank", "rank of the mean", "kept", "error", "spectrum", title="Merged")
        for r in reports:
            values = " ".join(f"{s:.2g}" for s in r.singular_values[:4]) + (" ..." if r.full > 4 else "")
            table.add_row(r.module, str(r.stacked), str(r.full), str(r.kept), f"{r.error:.1e}", values)
        console.print(table)
    size, before = (out / WEIGHTS_FILE).stat().st_size, sum(file.size() for file in given.files)
    console.print(f"{len(given.files)} adapters, weights {', '.join(f'{w:.4g}' for w in given.weights)}", markup=False)
    lacking = [m for m in given.modules if any(m not in file.ranks for file in given.files)]
    if lacking:
        console.print(f"{len(lacking)} modules are not in every adapter, such as {lacking[0]}", markup=False)
    console.print(f"{off} {total_error(reports):.2e}", markup=False)
    if not any(r.norm for r in reports):
        console.print("the updates cancel: the merged adapter is zero", style="yellow")
    console.print(f"{out}: {byte_size(size)}, from {byte_size(before)}", markup=False)
