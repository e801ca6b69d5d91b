"""FedSVD: the next round starts from the SVD of the mean, and a frozen A that is new each round reaches everyone.

Kind of evidence: oracle (dense float64 means and numpy's SVD), contract (what a client is sent).
"""

from __future__ import annotations

import pytest
import torch

from fedlora import Client, LoRA, Server, build
from fedlora.core.messages import Held
from fedlora.core.parcels import held_after, pack, remember, unpack
from fedlora.methods.fedsvd import reparameterised
from support.federations import EQUAL, FULL, rounds


def test_a_client_holds_the_new_a_of_every_round() -> None:
    """A is frozen at the clients and replaced by the server: what was unpacked is what was sent, bit for bit."""
    server, cache, held = Server(build("fedsvd")), None, None
    seen = []
    for played in rounds(server, EQUAL, FULL):
        for state in (played.before, played.before):  # asked again, nothing of it travels twice
            download = server.download(state, Client("a", EQUAL["a"]))
            parcel = pack(download, held)
            got = unpack(parcel, cache)
            for module, lora in download.adapter.modules.items():
                assert all(map(torch.equal, got.adapter.modules[module].factors, lora.factors))
            cache, held = remember(got), held_after(got)
            assert isinstance(held, Held)
            seen.append("A" in parcel.left_out)
    assert seen == [False, True] * 3


@pytest.mark.parametrize("shape", [(5, 9, 7), (4, 3, 6), (30, 22, 4)])
def test_any_shape_keeps_the_update(shape: tuple[int, int, int]) -> None:
    """Also where the rank exceeds d_out or d_in, and where B is zero; and no row of A is zero, so that each slot
    trains."""
    d_out, d_in, rank = shape
    generator = torch.Generator().manual_seed(0)
    B, A = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((d_out, rank), (rank, d_in)))
    for left in (B, torch.zeros_like(B)):
        made = reparameterised(LoRA(left, A))
        assert made.rank == rank and bool(made.factors[1].any(dim=1).all())
        torch.testing.assert_close(made.delta(), left @ A, rtol=0, atol=1e-11)
        rows = made.factors[1][:d_in]
        torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows)).double(), rtol=0, atol=1e-12)
