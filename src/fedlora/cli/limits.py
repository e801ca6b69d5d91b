"""The options that say what an adapter's files may claim: the same on all commands that read adapters."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer

from fedlora.adapters.limits import Limits

MaxBytes = Annotated[
    int | None, typer.Option(help="largest weights file: as --limit total=N (default: 64 GiB)", show_default=False)
]
MaxTensors = Annotated[
    int | None, typer.Option(help="most tensors in one: as --limit tensors=N (default: 100,000)", show_default=False)
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        help=f"NAME=VALUE, what files may claim and work may take (repeatable): "
        f"{', '.join(field.name for field in fields(Limits))}; such as total=80GiB",
        show_default=False,
    ),
]


def limits_of(limit: list[str] | None, max_bytes: int | None = None, max_tensors: int | None = None) -> Limits:
    return Limits.parse(limit or (), max_bytes=max_bytes, max_tensors=max_tensors)
