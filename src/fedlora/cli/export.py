"""`fedlora validate | export`: check an adapter, alone or against a base model; write what a program serves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.options import (
    Adapters,
    AsJson,
    BaseModel,
    DType,
    Force,
    MaxBytes,
    OneAdapter,
)
from fedlora.cli.screen import complain, console, notes, print_json, tell_remarks, tracked
from fedlora.core.text import quoted, shown
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.adapters.reader import AdapterFile
    from fedlora.export.attached import Attached
    from fedlora.export.merged import Cost

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

    found: dict[str, str | None] = {}
    fits: dict[str, Attached] = {}
    remarks: dict[str, list[str]] = {}
    model = _base_folder(base) if base is not None else None
    if model is not None:
        from fedlora.export.attached import check
    for directory in tracked(adapters, "checking"):
        try:
            file = AdapterFile(directory, max_bytes=max_bytes, dora=model is not None)
            if not file.check():
                remarks[str(directory)] = ["its update is zero: in a mean it only shrinks the others'"]
            labels_of(file.directory), read_facts(file.directory)
            if model is not None:
                fits[str(directory)] = check(file, model)
            found[str(directory)] = None
        except FedLoRAError as error:
            found[str(directory)] = str(error)
    if json:
        judged = {
            name: {"sound": reason is None, "reason": reason, "notes": list(remarks.get(name, ()))}
            for name, reason in found.items()
        }
        print_json({name: facts | (_as_json(fits[name]) if name in fits else {}) for name, facts in judged.items()})
    else:
        for name, reason in found.items():
            console.print(f"{name}: {'sound' if reason is None else 'refused'}")
            if reason is None:
                tell_remarks(remarks.get(name, ()))
    refused = [reason for reason in found.values() if reason is not None]
    if refused:
        more = f" And {len(refused) - 3} more, with their reasons in --json." if len(refused) > 3 else ""
        raise typer.Exit(complain(" ".join(shown(reason, 700) for reason in refused[:3]) + more))


def export(
    adapter: OneAdapter,
    out: Annotated[Path, typer.Option("-o", "--out", help="directory to write", show_default=False)],
    serve: Annotated[
        str,
        typer.Option(
            "--for",
            help="merged: the full model with the adapter in it; gguf: an adapter for llama.cpp",
            show_default=False,
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
    if serve not in ("merged", "gguf"):
        raise ConfigError(f"--for must be one of merged, gguf; got {serve[:40]!r}.")
    from fedlora.adapters.reader import AdapterFile

    file = AdapterFile(adapter, max_bytes=max_bytes, dora=serve == "merged")
    if serve == "merged":
        _merged(file, str(base), out, dtype, force=force, json=json)
    else:
        _gguf(file, str(base), out, dtype, force=force, json=json)


# ------------------------------------------------------------------------------------------------------------ writers


def _merged(file: AdapterFile, base: str, out: Path, dtype: str | None, *, force: bool, json: bool) -> None:
    from fedlora.adapters.truncation import parse_type
    from fedlora.export.merged import export_merged

    done = export_merged(
        file, _base_folder(base), out, parse_type(dtype) if dtype else None,
        progress=lambda steps: tracked(steps, "merging"), force=force,
    )  # fmt: skip
    if json:
        print_json(
            plain({"out": str(out), **_as_json(done.attached), "rounding": asdict(done.cost), "apart": done.apart})
        )
        return
    notes.warn(*_costs(done.cost))
    console.print(
        f"{out}: {len(done.attached.changed)} tensors changed, {len(done.attached.added)} added; rounding loses "
        f"{done.cost.loss:.1e} of the update; answers to random tokens are {done.apart:.1e} of the adapter's effect "
        f"off those of peft"
    )


def _gguf(file: AdapterFile, base: str, out: Path, dtype: str | None, *, force: bool, json: bool) -> None:
    from fedlora.export.gguf import NAME, write_gguf

    done = write_gguf(file, _base_folder(base), out, dtype, force=force)
    if json:
        print_json(plain({"out": str(out)} | asdict(done)))
        return
    if done.folded:
        console.print(
            f"{len(done.folded)} modules have another scale than the file's alpha gives, such as "
            f"{shown(done.folded[0])}: it went into their lora_b"
        )
    console.print(
        f"{out / NAME}: {len(done.names)} modules for architecture {done.arch}, alpha {done.alpha:g}, {done.dtype}; "
        f"rounding changes the updates by {done.rounding:.1e}"
    )


# ------------------------------------------------------------------------------------------------------------- inside


def _base_folder(base: str) -> Path:
    """The base model named by `--base`: a directory or a packaged model.

    Raises:
        ConfigError: there is no directory of safetensors weights. DataError: the package is not installed.
    """
    from fedlora.data.demo import HUB_NAMES, model_location

    place = Path(model_location(base))
    if not place.exists():
        raise ConfigError(
            f"there is no directory {quoted(base)}: --base names the base model's directory, demo, or a repository of "
            f"the hub with a revision, as owner/name@main."
        )
    if place.is_file():
        original = f" Fetch the original, {HUB_NAMES[base]}, from the hub." if base in HUB_NAMES else ""
        raise ConfigError(
            f"the base model {quoted(base)} is one file, {place.name}, but this needs a directory of safetensors "
            f"weights.{original}"
        )
    return place


def _as_json(done: Attached) -> dict[str, Any]:
    return {"changed": list(done.changed), "added": list(done.added)}


def _costs(cost: Cost) -> list[str]:
    keeps = "; --dtype float32 keeps it" if cost.loss > _NOTICEABLE else ""
    if cost.vanished:
        return [
            f"rounding loses all of the update in {len(cost.vanished)} layers (such as {shown(cost.vanished[0])}): "
            f"it is smaller than the precision of their type{keeps}"
        ]
    if cost.loss > _NOTICEABLE:
        return [f"rounding loses {cost.loss:.1%} of the update, and {cost.most:.1%} of {shown(cost.where)}{keeps}"]
    return []
