"""`fedlora validate | export`: check an adapter, alone or against a base model; write what a program serves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.options import Adapters, AsJson, BaseModel, DType, Force, MaxBytes, OneAdapter
from fedlora.cli.screen import complain, console, notes, print_json, tell_remarks, tracked
from fedlora.core.text import escaped, quoted, shown
from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.adapters.reader import AdapterFile

_NOTICEABLE = 0.01


def validate(
    adapters: Adapters,
    base: BaseModel = None,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Check adapters without using them. Exit code 0: all are sound; 2: at least one is refused."""
    from fedlora.adapters.reader import AdapterFile
    from fedlora.adapters.uploads import labels_of, read_facts

    judged: dict[str, dict[str, Any]] = {}
    model = _base_folder(base) if base is not None else None
    if model is not None:
        from fedlora.export.attached import check, other_base
    for directory in tracked(adapters, "checking"):
        facts: dict[str, Any] = {"sound": True, "reason": None, "notes": []}
        judged[str(directory)] = facts
        try:
            file = AdapterFile(directory, max_bytes=max_bytes, dora=model is not None)
            if not file.check():
                facts["notes"].append("its update is zero: in a mean it only shrinks the others'")
            labels_of(file.directory), read_facts(file.directory)
            if model is not None:
                facts["changed"] = list(check(file, model[1]).changed)
                facts["notes"] += other_base(file, *model)
        except FedLoRAError as error:
            facts.update(sound=False, reason=str(error))
    if json:
        print_json(judged)
    for name, facts in judged.items():
        if not facts["sound"]:
            complain(f"{name}: refused: {shown(facts['reason'].removeprefix(f'{escaped(name)}: '), 700)}")
        elif not json:
            console.print(f"{name}: sound")
            tell_remarks(facts["notes"])
    if not all(facts["sound"] for facts in judged.values()):
        raise typer.Exit(2)


def export(
    adapter: OneAdapter,
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    format: Annotated[
        str,
        typer.Option(
            help="merged: the full model with the adapter in it; gguf: an adapter for llama.cpp", show_default=False
        ),
    ],
    base: BaseModel,
    dtype: DType = None,
    force: Force = False,
    max_bytes: MaxBytes = None,
    json: AsJson = False,
) -> None:
    """Write what a program serves: the merged model, or an adapter for llama.cpp (GGUF).

    What the program would refuse or leave out is named before anything is written."""
    if format not in ("merged", "gguf"):
        raise ConfigError(f"--format must be one of merged, gguf; got {format[:40]!r}.")
    from fedlora.adapters.reader import AdapterFile
    from fedlora.export.attached import other_base

    file = AdapterFile(adapter, max_bytes=max_bytes, dora=format == "merged")
    name, place = _base_folder(str(base))
    tell_remarks(other_base(file, name, place))
    facts, lines = (_merged if format == "merged" else _gguf)(file, place, out, dtype, force)
    if json:
        print_json(plain({"out": str(out), **facts}))
    else:
        console.print("\n".join(lines))


# ------------------------------------------------------------------------------------------------------------ writers


def _merged(
    file: AdapterFile, base: Path, out: Path, dtype: str | None, force: bool
) -> tuple[dict[str, Any], list[str]]:
    from fedlora.adapters.truncation import parse_type
    from fedlora.export.merged import export_merged

    done = export_merged(file, base, out, parse_type(dtype) if dtype else None, force=force)
    cost = done.cost
    if cost.vanished:
        notes.warn(
            f"rounding loses all of the update in {counted(len(cost.vanished), 'layer')}, such as "
            f"{shown(cost.vanished[0])}: it is smaller than the precision of their type"
        )
    if cost.loss > _NOTICEABLE:
        notes.warn(f"rounding loses {cost.loss:.1%} of the update; a wider --dtype keeps more")
    line = (
        f"{out}: {counted(len(done.attached.changed), 'tensor')} changed; rounding loses {cost.loss:.1e} of the "
        f"update; answers to random tokens are {done.apart:.1e} of the adapter's effect off "
        f"those of peft"
    )
    return {"changed": list(done.attached.changed), "rounding": asdict(cost), "apart": done.apart}, [line]


def _gguf(file: AdapterFile, base: Path, out: Path, dtype: str | None, force: bool) -> tuple[dict[str, Any], list[str]]:
    from fedlora.export.gguf import NAME, write_gguf

    done = write_gguf(file, base, out, dtype, force=force)
    lines = [f"the scale of {counted(len(done.folded), 'module')} went into lora_b"] if done.folded else []
    lines.append(
        f"{out / NAME}: {counted(len(done.names), 'module')} for architecture {done.arch}, alpha {done.alpha:g}, "
        f"{done.dtype}; rounding changes the updates by {done.rounding:.1e}"
    )
    return asdict(done), lines


# ------------------------------------------------------------------------------------------------------------- inside


def _base_folder(base: str) -> tuple[str, Path]:
    """The base model named by `--model`, a directory or a packaged model: its name on the hub, or as typed; its place.

    Raises:
        ConfigError: there is no directory of safetensors weights. DataError: the package is not installed.
    """
    from fedlora.data.demo import HUB_NAMES, model_location

    place = Path(model_location(base))
    if not place.exists():
        raise ConfigError(
            f"there is no directory {quoted(base)}: --model names the base model's directory, demo, or a repository of "
            f"the hub with a revision, as owner/name@main."
        )
    if place.is_file():
        original = f" Fetch the original, {HUB_NAMES[base]}, from the hub." if base in HUB_NAMES else ""
        raise ConfigError(
            f"the base model {quoted(base)} is one file, {place.name}, but this needs a directory of safetensors "
            f"weights.{original}"
        )
    return HUB_NAMES.get(base, base), place
