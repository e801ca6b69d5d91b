"""The values that travel: one factor pair `LoRA`, and an `Adapter` of many pairs and heads.

This module knows nothing of alpha, r or PEFT: one matrix's update is Delta W = B @ A, scaled as `adapters.io` chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.read_only import ReadOnly
from fedlora.errors import FactorNotShared, ShapeError
from fedlora.linalg import norm_of_product
from fedlora.seeds import derive_seed


@dataclass(frozen=True, eq=False)
class LoRA:
    """One update Delta W = B @ A of a weight W (d_out, d_in), kept as its factors.

    Args:
        B: (d_out, r), or None if this factor does not travel.
        A: (r, d_in), or None if this factor does not travel.

    Raises:
        ShapeError: the factors are not matrices, or do not share r.

    Source: paper section 3.1. (B Q, Q^-1 A) is the same update for every invertible Q: the *gauge*.

    Example:
        >>> lora = LoRA(B=torch.ones(6, 2), A=torch.ones(2, 5))
        >>> lora
        LoRA(B=(6, 2) float32, A=(2, 5) float32)
        >>> lora.rank, tuple(lora.delta().shape)
        (2, (6, 5))
    """

    B: Tensor | None
    A: Tensor | None

    def __post_init__(self) -> None:
        shapes = {name: tuple(t.shape) for name, t in self.tensors().items()}
        if not shapes:
            raise ShapeError("a LoRA needs at least one of its factors B (d_out, r) and A (r, d_in); got neither.")
        if any(len(shape) != 2 for shape in shapes.values()):
            raise ShapeError(f"LoRA factors are matrices, B (d_out, r) and A (r, d_in); got shapes {shapes}.")
        if len(shapes) == 2 and shapes["B"][1] != shapes["A"][0]:
            raise ShapeError(
                f"B (d_out, r) and A (r, d_in) must share the rank r; got B {shapes['B']} and A {shapes['A']}. "
                f"In PEFT's layout lora_B.weight is B and lora_A.weight is A, neither transposed."
            )

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(B, A), both present.

        Raises:
            FactorNotShared: one of them did not travel.
        """
        if self.B is None or self.A is None:
            missing = "B" if self.B is None else "A"
            raise FactorNotShared(
                f"factor {missing} of this update is absent: its role keeps it from travelling. "
                f"`fedlora.client.receive(download, kept)` completes an adapter before you need its product."
            )
        return self.B, self.A

    @property
    def rank(self) -> int:
        """r, the columns of B and rows of A (not the numerical rank)."""
        if self.B is not None:
            return self.B.shape[1]
        assert self.A is not None  # __post_init__ guarantees one factor
        return self.A.shape[0]

    def delta(self) -> Tensor:
        """The dense update B @ A, (d_out, d_in). A server forms it in streamed and private rounds only."""
        B, A = self.factors
        return B @ A

    def norm(self) -> float:
        """||B @ A||_F in float64, without forming B @ A."""
        return norm_of_product(*self.factors)

    def first(self, rank: int) -> LoRA:
        """The first `rank` slots."""
        return LoRA(None if self.B is None else self.B[:, :rank], None if self.A is None else self.A[:rank])

    def map(self, change: Callable[[Tensor], Tensor]) -> LoRA:
        """The same pair with `change` (a cast, a move, a clone) applied to each factor present."""
        return LoRA(None if self.B is None else change(self.B), None if self.A is None else change(self.A))

    def tensors(self) -> dict[str, Tensor]:
        """The factors present, by name."""
        return {name: t for name, t in (("B", self.B), ("A", self.A)) if t is not None}

    def __repr__(self) -> str:
        def side(t: Tensor | None) -> str:
            return "absent" if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"

        return f"LoRA(B={side(self.B)}, A={side(self.A)})"


@dataclass(frozen=True, eq=False)
class Adapter:
    """Everything one client trains: a `LoRA` per adapted module, and fully trained heads such as a classifier.

    Args:
        modules: path of the adapted module in the base model -> its factor pair.
        heads: path of a fully trained tensor (PEFT modules_to_save) -> its value, any shape.
        base: module -> how its base weight has moved since pre-training; {} if none has; None if unknown. It is not
            trained: it says which base weights the factors belong to. `receive` sets it, and code that puts the
            adapter into a network must apply it too.

    The mappings are copied, sorted by name and made read-only.

    Example:
        >>> Adapter({"layer.q": LoRA(torch.zeros(6, 4), torch.ones(4, 5))}, heads={"head.weight": torch.zeros(3, 6)})
        Adapter(1 modules of rank [4], heads=['head.weight'])
    """

    modules: Mapping[str, LoRA]
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    base: Mapping[str, LoRA] | None = None

    def __post_init__(self) -> None:
        for name in ("modules", "heads", "base"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, ReadOnly({key: given[key] for key in sorted(given)}))

    @property
    def ranks(self) -> dict[str, int]:
        """Module -> rank r."""
        return {name: lora.rank for name, lora in self.modules.items()}

    def tensors(self) -> Iterator[Tensor]:
        """Every factor and head."""
        return (tensor for _, tensor in named_tensors(self))

    def only(self, parts: Collection[str]) -> Adapter:
        """What it has of these parts ("B", "A", "heads"), without `base`."""
        modules = {}
        for name, lora in self.modules.items():
            B, A = (lora.tensors().get(factor) if factor in parts else None for factor in ("B", "A"))
            if B is not None or A is not None:
                modules[name] = LoRA(B, A)
        return Adapter(modules, self.heads if "heads" in parts else {})

    def map(self, change: Callable[[Tensor], Tensor]) -> Adapter:
        """The same adapter with `change` applied to every tensor of its modules and heads; its base is unchanged."""
        return Adapter(
            {name: lora.map(change) for name, lora in self.modules.items()},
            {name: change(head) for name, head in self.heads.items()},
            self.base,
        )

    def folded(self) -> Adapter:
        """The same model as an adapter of the pre-trained base: the factors include the base's movement."""
        base = self.base or {}
        modules = {
            name: stack([base[name], lora], [1.0, 1.0]) if name in base else lora for name, lora in self.modules.items()
        }
        return Adapter(modules, self.heads)

    def __repr__(self) -> str:
        ranks = sorted(set(self.ranks.values()))
        moved = f", base moved in {len(self.base)}" if self.base else ""
        return f"Adapter({len(self.modules)} modules of rank {ranks}, heads={list(self.heads)}{moved})"


def stack(loras: list[LoRA], weights: list[float]) -> LoRA:
    """sum_i w_i B_i A_i as one factor pair of rank sum r_i: [w_1 B_1 | w_2 B_2 | ...] and [A_1; A_2; ...].

    Exact except for rounding each w_i B_i in the factors' dtype, which shows where huge columns cancel; pass float64
    there.
    """
    pairs = [lora.factors for lora in loras]
    return LoRA(
        torch.cat([B * w for (B, _), w in zip(pairs, weights, strict=True)], dim=1),
        torch.cat([A for _, A in pairs], dim=0),
    )


def change_of(sent: LoRA, begun: LoRA) -> LoRA:
    """The change B A - B_0 A_0 from `begun` (both factors present) to `sent`, as one float64 pair. A factor that did
    not travel equals its starting value."""
    B_0, A_0 = (t.detach().double() for t in begun.factors)
    B, A = (old if t is None else t.detach().to(old) for t, old in ((sent.B, B_0), (sent.A, A_0)))
    if sent.A is None:
        return LoRA(B - B_0, A_0)
    if sent.B is None:
        return LoRA(B_0, A - A_0)
    return LoRA(torch.cat([B, -B_0], dim=1), torch.cat([A, A_0]))


def fresh_rows(count: int, d_in: int, *seed: str | int, like: Tensor) -> Tensor:
    """(count, d_in) rows of A as LoRA initialises them: uniform on +-1/sqrt(d_in) (PEFT's kaiming_uniform, a = sqrt 5).

    A deterministic function of `seed`: drawn on the CPU in float64, then cast to `like`'s dtype and device, so that
    neither affects the draw.
    """
    generator = torch.Generator().manual_seed(derive_seed("fresh-rows", *seed))
    rows = torch.rand(count, d_in, generator=generator, dtype=torch.float64)
    return rows.mul_(2).sub_(1).div_(math.sqrt(d_in)).to(like)


def filled(lora: LoRA, rank: int, rows: Callable[[], Tensor]) -> LoRA:
    """The same update with exactly `rank` slots that a client can train.

    A slot that is missing or dead (B[:, k] = 0 and A[k] = 0) gets B[:, k] = 0, A[k] = rows[k], as LoRA itself starts: a
    dead slot has a zero gradient in both factors, under every optimizer, for ever.

    Args:
        rows: gives (rank, d_in) rows; called only if a slot needs one.
    """
    B, A = lora.factors
    if lora.rank < rank:
        B, A = pad(B, (0, rank - lora.rank)), pad(A, (0, 0, 0, rank - lora.rank))
    # Usually one of these holds, and then no other entry needs a look.
    if bool(B[0].all()) or not bool(((B[0] == 0) & (A[:, 0] == 0)).any()):
        return LoRA(B, A)
    alive = B.any(dim=0) | A.any(dim=1)
    return LoRA(B, torch.where(alive[:, None], A, rows().to(A)))


def named_tensors(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an adapter, with a name for messages."""
    for name, lora in adapter.modules.items():
        for factor, tensor in lora.tensors().items():
            yield f"factor {factor} of module {name!r}", tensor
    for name, head in adapter.heads.items():
        yield f"head {name!r}", head


def compute_dtype(loras: Iterable[LoRA]) -> torch.dtype:
    """What the server and methods compute with: float64 if a factor has it, otherwise float32."""
    wide = any(t.dtype == torch.float64 for lora in loras for t in lora.tensors().values())
    return torch.float64 if wide else torch.float32
