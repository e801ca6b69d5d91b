"""How changes are added up: as products B A, whatever their coordinates, or as entries where one factor travels.

A change is what a client's round adds to its readout. Both spaces do the same algebra on it, in float64, and end in an
upload that passes the server's checks: with the client's own rank, shapes and dtypes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import Adapter, LoRA, change_of, stack
from fedlora.core.messages import Upload
from fedlora.core.sent import Sent
from fedlora.linalg import svd_of_product
from fedlora.seeds import derive_seed

Key = tuple[str, str]  # ("head", name), ("B", module), ("A", module) or ("module", name)


@dataclass(frozen=True, eq=False)
class Change:
    """A change by its parts. parts: key -> a `LoRA` in float64 whose product is that module's, or a float64 tensor."""

    parts: Mapping[Key, Any] = field(default_factory=dict)


class ChangeSpace(ABC):
    """The algebra of changes. A client without a part does not affect it."""

    @abstractmethod
    def change(self, sent: Sent) -> Change:
        """What the client's training added."""

    @abstractmethod
    def weighted(self, parts: Sequence[Any], weights: Sequence[float]) -> Any:
        """sum_k w_k part_k for one key."""

    @abstractmethod
    def deviation(self, parts: Sequence[Any]) -> Any:
        """The entrywise (population) standard deviation, for one key."""

    @abstractmethod
    def size(self, part: Any) -> float:
        """The Frobenius norm of one part."""

    @abstractmethod
    def noise(self, sent: Sent, *seed: str | int) -> Change:
        """A random admissible change; its sizes mean nothing."""

    @abstractmethod
    def upload(self, sent: Sent, change: Change) -> tuple[Upload, float]:
        """(readout + change as this client's upload, ||what did not fit its rank|| / ||change||)."""

    def times(self, change: Change, factor: float) -> Change:
        return Change({key: self.weighted([part], [factor]) for key, part in change.parts.items()})

    def plus(self, one: Change, other: Change, factor: float) -> Change:
        """one + factor other where both have a part; `one` elsewhere."""
        return Change({
            key: self.weighted([part, other.parts[key]], [1.0, factor]) if key in other.parts else part
            for key, part in one.parts.items()
        })  # fmt: skip

    def mean(self, changes: Sequence[Change]) -> Change:
        """Each part's mean over the changes that have it."""
        return Change({key: self.weighted(parts, [1 / len(parts)] * len(parts)) for key, parts in _by_key(changes)})

    def spread(self, changes: Sequence[Change]) -> Change:
        """Each part's deviation over the changes that have it."""
        return Change({key: self.deviation(parts) for key, parts in _by_key(changes)})

    def sizes(self, change: Change) -> dict[Key, float]:
        return {key: self.size(part) for key, part in change.parts.items()}

    def norm(self, change: Change) -> float:
        """||change||_F over all parts."""
        return math.hypot(*self.sizes(change).values())


class Entries(ChangeSpace):
    """Entries of the factor that travels, and of the heads. Slot k of one client is slot k of another, and a client of
    smaller rank has zeros in the later ones, as in zero-padded averages. A part is (d, slots), for A transposed.
    """

    def change(self, sent: Sent) -> Change:
        parts = {}
        for name, lora in sent.upload.adapter.modules.items():
            begun = sent.begun.modules[name].tensors()
            for factor, tensor in lora.tensors().items():
                both = [_by_slots(factor, tensor), _by_slots(factor, begun[factor])]
                parts[factor, name] = self.weighted(both, [1.0, -1.0])
        return Change({**parts, **_heads(sent)})

    def weighted(self, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return torch.stack([w * part for w, part in zip(weights, _padded(parts), strict=True)]).sum(0)

    def deviation(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(_padded(parts)).std(0, correction=0)

    def size(self, part: Tensor) -> float:
        return float(torch.linalg.vector_norm(part))

    def noise(self, sent: Sent, *seed: str | int) -> Change:
        return Change({key: _normal(part.shape, *seed, *key) for key, part in self.change(sent).parts.items()})

    def upload(self, sent: Sent, change: Change) -> tuple[Upload, float]:
        modules, left = {}, []
        for name, lora in sent.upload.adapter.modules.items():
            begun, made = sent.begun.modules[name].tensors(), {}
            for factor, tensor in lora.tensors().items():
                wanted = self.weighted([_by_slots(factor, begun[factor]), change.parts[factor, name]], [1.0, 1.0])
                left.append(self.size(wanted[:, lora.rank :]))
                kept = wanted[:, : lora.rank]
                made[factor] = (kept if factor == "B" else kept.mT).to(tensor.dtype).contiguous()
            modules[name] = LoRA(made.get("B"), made.get("A"))
        return _made(sent, modules, change), _share(left, list(self.sizes(change).values()))


class Products(ChangeSpace):
    """Each module's product B A, as a factor pair, and the entries of the heads. Coordinates play no role.

    Anything of larger rank than the client's is cut to the best approximation of that rank, with balanced factors.
    """

    def change(self, sent: Sent) -> Change:
        parts = {
            ("module", name): change_of(lora, sent.begun.modules[name])
            for name, lora in sent.upload.adapter.modules.items()
        }
        return Change({**parts, **_heads(sent)})

    def weighted(self, parts: Sequence[Any], weights: Sequence[float]) -> Any:
        if isinstance(parts[0], LoRA):
            return stack(list(parts), list(weights))
        return torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0)

    def deviation(self, parts: Sequence[Any]) -> Any:
        """Dense, module by module: entries of the weight's change have no meaning in factors."""
        if not isinstance(parts[0], LoRA):
            return torch.stack(list(parts)).std(0, correction=0)
        first: Tensor = parts[0].delta()  # one dense matrix at a time, plus the two sums
        mean = sum((part.delta() for part in parts[1:]), first) / len(parts)
        squares = sum(((part.delta() - mean).square() for part in parts), torch.zeros_like(first))
        return LoRA((squares / len(parts)).sqrt(), torch.eye(first.shape[1], dtype=torch.float64))

    def size(self, part: Any) -> float:
        return float(part.norm()) if isinstance(part, LoRA) else float(torch.linalg.vector_norm(part))

    def noise(self, sent: Sent, *seed: str | int) -> Change:
        """dB A_0 with a random dB: it has the client's rank, so nothing is cut."""
        parts: dict[Key, Any] = {}
        for name in sent.upload.adapter.modules:
            B, A = sent.begun.modules[name].factors
            parts["module", name] = LoRA(_normal(B.shape, *seed, name), A.double())
        return Change({**parts, **{key: _normal(head.shape, *seed, *key) for key, head in _heads(sent).items()}})

    def upload(self, sent: Sent, change: Change) -> tuple[Upload, float]:
        modules, left = {}, []
        for name, lora in sent.upload.adapter.modules.items():
            wanted = stack([sent.begun.modules[name].map(_double), change.parts["module", name]], [1.0, 1.0])
            fitting, rest = cut(wanted, sent.upload.client.ranks({name: None})[name])
            modules[name] = LoRA(*(t.to(s) for t, s in zip(fitting.factors, lora.factors, strict=True)))
            left.append(rest)
        return _made(sent, modules, change), _share(left, list(self.sizes(change).values()))


def cut(wanted: LoRA, rank: int) -> tuple[LoRA, float]:
    """(the best approximation with exactly `rank` slots, balanced, zero-padded if needed; ||the rest||).

    wanted: a pair in float64. Source: Eckart and Young 1936. A pair with many slots is multiplied out first.
    """
    B, A = wanted.factors
    if wanted.rank >= min(B.shape[0], A.shape[1]):
        U, s, Vh = torch.linalg.svd(B @ A, full_matrices=False)
    else:
        spectrum = svd_of_product(B, A, tolerance=0.0)
        U, s, Vh = spectrum.U, spectrum.s, spectrum.Vh
    root, empty = s[:rank].sqrt(), max(0, rank - len(s))
    fitting = LoRA(pad(U[:, :rank] * root, (0, empty)), pad(root[:, None] * Vh[:rank], (0, 0, 0, empty)))
    return fitting, float(torch.linalg.vector_norm(s[rank:]))


def _made(sent: Sent, modules: Mapping[str, LoRA], change: Change) -> Upload:
    heads = {
        name: (sent.begun.heads[name].double() + change.parts["head", name]).to(head.dtype)
        for name, head in sent.upload.adapter.heads.items()
    }
    return replace(sent.upload, adapter=Adapter(modules, heads))


def _heads(sent: Sent) -> dict[Key, Tensor]:
    return {
        ("head", name): head.double() - sent.begun.heads[name].double()
        for name, head in sent.upload.adapter.heads.items()
    }


def _by_key(changes: Sequence[Change]) -> list[tuple[Key, list[Any]]]:
    keys = dict.fromkeys(key for change in changes for key in change.parts)
    return [(key, [change.parts[key] for change in changes if key in change.parts]) for key in keys]


def _share(left: Sequence[float], whole: Sequence[float]) -> float:
    size = math.hypot(*whole)
    return math.hypot(*left) / size if size else 0.0


def _by_slots(factor: str, tensor: Tensor) -> Tensor:
    """(d, slots) in float64."""
    return _double(tensor if factor == "B" else tensor.mT)


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad with zeros in slots that only others have."""
    widest = max(part.shape[-1] for part in parts)
    return [pad(part, (0, widest - part.shape[-1])) for part in parts]


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double()


def _normal(shape: Sequence[int], *seed: str | int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("attack-noise", *seed))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
