"""The dtype of a result, and the measured error of writing in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from fedlora.adapters.untrusted_files import type_name
from fedlora.core.lora import LoRA
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_STORED = {type_name(dtype): dtype for dtype in TYPES.values()}  # as safetensors calls them


def common_type(stored: Iterable[str]) -> tuple[torch.dtype, str | None]:
    """The type that holds all of these (safetensors names), and a remark if they differ."""
    found = sorted(set(stored))
    if not found:
        return torch.float32, None
    dtype = reduce(torch.promote_types, (_STORED.get(name, torch.float32) for name in found))
    remark = None if len(found) == 1 else f"the factors are stored as {', '.join(found)}; written as {name_of(dtype)}"
    return dtype, remark


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_type(text: str) -> torch.dtype:
    """Raises `ConfigError` for a name that is not an output dtype."""
    if text not in TYPES:
        raise ConfigError(f"the dtype of a result must be one of {', '.join(TYPES)}; got {text[:80]!r}.")
    return TYPES[text]


def narrowed(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """The tensor in `dtype`; integers stay. Raises `AdapterFormatError` if `dtype` cannot hold a value."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    found = tensor.to(dtype)
    if not bool(torch.isfinite(found).all()) and bool(torch.isfinite(tensor).all()):
        raise AdapterFormatError(
            f"{what} has values up to {float(tensor.abs().max()):.3g}, but {name_of(dtype)} holds up to "
            f"{torch.finfo(dtype).max:.3g}: choose another type with --dtype (bfloat16 or float32)."
        )
    return found


def narrowed_pair(lora: LoRA, dtype: torch.dtype, module: str) -> tuple[LoRA, float]:
    """A pair in `dtype`, and the norm of the resulting change in its update.

    B' A' - B A = dB A' + B dA with the roundings dB, dA; its norm comes from Gram matrices, in float32 or wider.
    """
    B, A = lora.factors
    stored = LoRA(narrowed(B, dtype, f"module {quoted(module)}"), narrowed(A, dtype, f"module {quoted(module)}"))
    if torch.promote_types(dtype, B.dtype) == dtype:
        return stored, 0.0
    return stored, _moved(lora, stored, torch.promote_types(B.dtype, torch.float32))


def _moved(before: LoRA, after: LoRA, wide: torch.dtype) -> float:
    """Each slot is first scaled near 1 by powers of two, which rounds nothing, because squares of tiny numbers
    underflow and those of huge ones overflow. `share` puts the scale back."""
    (B, A), (new_B, new_A) = (lora.map(lambda t: t.to(wide)).factors for lora in (before, after))
    of_B, of_A = (torch.frexp(t).exponent for t in (B.abs().amax(dim=0), A.abs().amax(dim=1)))
    B, new_B = torch.ldexp(B, -of_B), torch.ldexp(new_B, -of_B)
    A, new_A = torch.ldexp(A, -of_A[:, None]), torch.ldexp(new_A, -of_A[:, None])
    used = (B.abs().amax(dim=0) > 0) & (A.abs().amax(dim=1) > 0)
    if not bool(used.any()):
        return 0.0
    largest = int((of_B + of_A)[used].max())
    share = torch.where(used, torch.ldexp(torch.ones(len(used), dtype=torch.float64), of_B + of_A - largest), 0.0)
    dB, dA = new_B - B, new_A - A
    parts = [
        (dB.mT @ dB).double() * (new_A @ new_A.mT),
        2 * (dB.mT @ B).double() * (new_A @ dA.mT),
        (B.mT @ B).double() * (dA @ dA.mT),
    ]
    total = math.fsum(float(share @ part @ share) for part in parts)
    return math.ldexp(math.sqrt(max(total, 0.0)), largest)
