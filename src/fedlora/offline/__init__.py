"""Rounds without a network: a site trains on a received folder (`site`), a server combines folders (`server`)."""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.offline.server import ByHand
    from fedlora.offline.site import train_site

__getattr__ = face("fedlora.offline", {"server": ("ByHand",), "site": ("train_site",)}, extra="train")

__all__ = ["ByHand", "train_site"]
