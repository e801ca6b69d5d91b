"""Counts the bytes sent in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.parcels import Parcel


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round's tensors over all clients, for adapter, heads and base separately.

    Refused uploads count too.

    Example:
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1))
        >>> record.bytes.up_adapter  # two modules, (6 + 5) numbers for each of 2 + 4 ranks, 4 bytes each
        528
    """

    up_adapter: int = 0
    up_heads: int = 0
    down_adapter: int = 0
    down_heads: int = 0
    down_base: int = 0

    @property
    def total(self) -> int:
        return self.up_adapter + self.up_heads + self.down_adapter + self.down_heads + self.down_base


def with_download(traffic: Traffic, parcel: Parcel) -> Traffic:
    sent = (parcel.adapter, parcel.start)
    return replace(
        traffic,
        down_adapter=traffic.down_adapter + sum(_size(a.modules) for a in sent),
        down_heads=traffic.down_heads + sum(_head_size(a) for a in sent),
        down_base=traffic.down_base + _size(parcel.base) + _size(parcel.steps),
    )


def _size(loras: Mapping[str, LoRA]) -> int:
    return sum(t.numel() * t.element_size() for lora in loras.values() for t in lora.tensors().values())


def _head_size(adapter: Adapter) -> int:
    return sum(t.numel() * t.element_size() for t in adapter.heads.values())
