"""A method that a user could have written, named in configurations as module:Class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedlora import LoRA
from fedlora.methods.fedit import FedIT


@dataclass(frozen=True)
class Halved(FedIT):
    """A user's own method: FedIT, but the server keeps only a share of B."""

    name: ClassVar[str] = "halved"

    share: float = 0.5

    def aggregate(self, state: Any, updates: Any) -> Any:
        after = super().aggregate(state, updates)
        return LoRA(after.factors[0] * self.share, after.factors[1])
