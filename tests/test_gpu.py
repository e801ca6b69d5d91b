"""The server on a GPU gives what it gives on the CPU. Kind of evidence: parity; skipped where there is no GPU.

Nothing here was ever run by this project's CI, which has none.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from support import families

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


DEVICES = ("cpu", "cuda")


def pair(device: str, B: Tensor, A: Tensor) -> LoRA:
    return LoRA(B.to(device), A.to(device))


@pytest.mark.parametrize("hparams", [{}, {"rho": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["generic", "zero_B", "gauge_1e3", "wide"])
def test_rounds_on_a_gpu_are_those_on_the_cpu(name: str, hparams: dict[str, object]) -> None:
    case = families.family(name, d_out=64, d_in=56)
    sent = {c: tuple(torch.from_numpy(x) for x in pair) for c, pair in sorted(case.uploads.items())}
    rank = max(B.shape[1] for B, _ in sent.values())
    found = []
    for device in DEVICES:
        server = Server(build("glora", **hparams))
        state = server.init(Adapter({"m": pair(device, torch.zeros(64, rank), torch.ones(rank, 56))}))
        uploads = [
            Upload(Client(c, B.shape[1]), int(1000 * case.weights[c]), Adapter({"m": pair(device, B, A)}))
            for c, (B, A) in sent.items()
        ]
        for _ in range(2):  # the second round reads a history
            state = server.aggregate(state, uploads)
        downs = [server.download(state, u.client).adapter.modules["m"] for u in uploads]
        assert {t.device.type for lora in downs for t in lora.tensors().values()} == {device}
        found.append([server.global_update(state)["m"], *downs])
    for ours, theirs in zip(*found, strict=True):
        a, b = (lora.map(Tensor.cpu).map(Tensor.double).delta() for lora in (ours, theirs))
        assert float(torch.linalg.matrix_norm(a - b) / torch.linalg.matrix_norm(a)) < 1e-5
