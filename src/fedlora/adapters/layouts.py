"""How PEFT stores a LoRA pair for each kind of layer, and the matrix pair (B, A) it represents.

    kind        stored A                 stored B             update of
    linear      (r, d_in)                (d_out, r)           a weight (d_out, d_in), stored either way round
    embedding   (r, vocabulary)          (d, r)               its table, transposed: (d, vocabulary)
    conv        (r, c_in, k...)          (c_out, r, 1...)     a kernel, flattened to (c_out, c_in k...)
    parameter   (E r, d_in)              (d_out, r E)         E matrices of one tensor, such as a layer's experts
    adalora     (r, d_in), E (r, 1)      (d_out, r)           as linear, with A scaled by E

Expert e's A is rows e r .. (e + 1) r of the stored A; its B is columns e, e + E, e + 2 E, ... of the stored B, so the
two interleave differently (peft 0.21, lora.ParamWrapper). Here each expert is its own module, named PATH[e].
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlora.core.lora import LoRA

Kind = Literal["linear", "embedding", "conv", "parameter", "adalora"]


@dataclass(frozen=True)
class Layout:
    """One stored pair. kernel: a convolution's (k, ...). experts: the number of matrices in the tensor. pattern: the
    name to match with rank_pattern and alpha_pattern, if it is not the path."""

    kind: Kind = "linear"
    kernel: tuple[int, ...] = ()
    experts: int = 0
    pattern: str = ""

    def modules(self, path: str) -> list[str]:
        """The names of the matrices stored at `path`."""
        return [f"{path}[{e}]" for e in range(self.experts)] if self.kind == "parameter" else [path]

    def expert(self, path: str, module: str) -> int:
        """Which matrix stored at `path` has this name from `modules`. Raises `KeyError` for any other name."""
        text = module[len(path) + 1 : -1] if self.kind == "parameter" else ""
        number = int(text) if text.isdecimal() and len(text) < 10 else 0
        if module != (f"{path}[{number}]" if self.kind == "parameter" else path) or number >= max(self.experts, 1):
            raise KeyError(module)
        return number

    def keys(self, path: str) -> tuple[str, str]:
        """The names of the stored B and A."""
        if self.kind == "embedding":
            return f"{path}.lora_embedding_B", f"{path}.lora_embedding_A"
        return f"{path}.lora_B.weight", f"{path}.lora_A.weight"

    def rank(self, B: Sequence[int], A: Sequence[int]) -> int | None:
        """The rank given by the stored shapes; None if they are not such a pair."""
        if self.kind == "conv":
            fits = len(A) == len(B) == 2 + len(self.kernel) and tuple(A[2:]) == self.kernel and set(B[2:]) == {1}
        else:
            fits = len(A) == len(B) == 2
        if not fits or B[1] != A[0] or (self.experts and A[0] % self.experts):
            return None
        return A[0] // max(self.experts, 1)

    def unpacked(self, B: Tensor, A: Tensor, expert: int = 0) -> LoRA:
        """The pair that the stored tensors represent; for several experts, that of one."""
        if self.kind == "conv":
            return LoRA(B.flatten(1), A.flatten(1))
        if self.kind == "parameter":
            r = len(A) // self.experts
            return LoRA(B[:, expert :: self.experts], A[expert * r : (expert + 1) * r])
        return LoRA(B, A)

    def packed(self, pairs: Sequence[LoRA]) -> tuple[Tensor, Tensor]:
        """(B, A) as stored, from all of the tensor's pairs, which have equal rank."""
        if self.kind == "parameter":
            Bs, As = zip(*(pair.factors for pair in pairs), strict=True)
            return torch.stack(Bs, dim=2).flatten(1), torch.cat(As)
        B, A = pairs[0].factors
        if self.kind == "conv":
            width = A.shape[1] // math.prod(self.kernel)
            return B.reshape(*B.shape, *(1 for _ in self.kernel)), A.reshape(len(A), width, *self.kernel)
        return B, A


def stored_path(module: str) -> str:
    """Where a module's pair is stored: its name without the expert number."""
    return re.sub(r"\[\d+\]$", "", module)
