"""Keeps the server's arithmetic independent of the torch modes that its caller has switched on.

Autocast turns a float32 product into a bfloat16 one, which moves the mean by 4e-3. Tensors made in inference mode
cannot be trained. Both are thread-wide switches that the caller set for a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_modes() -> Iterator[None]:
    """Switches autocast and inference mode off; also works as a decorator."""
    with ExitStack() as off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            off.enter_context(torch.inference_mode(False))
            off.enter_context(torch.no_grad())
        yield
