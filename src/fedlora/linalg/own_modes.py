"""The arithmetic of a server is its own, whatever torch modes its caller has on.

Under autocast a float32 product is one of bfloat16, and the mean moves by 4e-3; what inference mode makes cannot be
trained. Both are switches of a thread that somebody set for a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_modes() -> Iterator[None]:
    """Autocast and inference mode are off inside, also as a decorator."""
    with ExitStack() as off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            off.enter_context(torch.inference_mode(False))
            off.enter_context(torch.no_grad())
        yield


__all__ = ["own_modes"]
