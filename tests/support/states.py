"""Whole states as plain data, for comparing bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor


def content(value: object) -> object:
    """All of a value as plain data, tensors as their bytes: equal exactly if the values are bitwise equal."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if is_dataclass(value):
        return type(value).__name__, {f.name: content(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return "mapping", [(key, content(item)) for key, item in value.items()]  # in its order
    if isinstance(value, list | tuple):
        return type(value).__name__, [content(item) for item in value]
    return type(value).__name__, repr(value)


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor within a value."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [t for f in fields(value) for t in tensors_in(getattr(value, f.name))]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []
