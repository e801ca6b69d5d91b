"""What one client can do to a private sum, on the hard input families: never above what the ledger is charged for.

Kind of evidence: property, in exact integers. Neighbours are made by construction: the same round with a client and
without it, everything else alike. K, and K gamma, is what an event of the ledger names; the grid is in it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload
from fedlora.server.private_round import PrivateRound
from fedlora.server.state import ServerState
from support.families import FAMILIES, Case, family, regauge
from support.private_servers import InMemory, private

KINDS = [("glora", "full"), ("glora", "two-sided"), ("flexlora", "full"), ("svd", "full"), ("ffa-lora", "full")]
OUT, IN, CLIP = 48, 40, 0.5


def uploads_of(case: Case, server: Server, state: ServerState) -> list[Upload]:
    """A family as a round: every second client lacks the second module, and all send a head."""
    found = []
    for k, (name, (B, A)) in enumerate(sorted(case.uploads.items())):
        lora = LoRA(torch.tensor(B), torch.tensor(A))
        roles = server.roles(state)
        sent = LoRA(lora.B, None) if roles.A == "frozen" else lora
        modules = {"first": sent} | ({} if k % 2 else {"second": sent.map(lambda t: 3 * t)})
        client = Client(name, dict.fromkeys(modules, B.shape[1]))
        heads = {"head": state.heads["head"] + torch.full((5,), 1e3 if k == 1 else 1e-3)}
        found.append(Upload(client, 10, Adapter(modules, heads)))
    return found


def sums(server: Server, state: ServerState, uploads: list[Upload]) -> Tensor:
    """What is released without noise."""
    assert server.privacy is not None
    memory = InMemory()
    replace(server, round=replace(server.privacy, releases=memory)).aggregate(state, uploads)
    return memory.kept[state.round + 1]


@pytest.mark.quick(12)
@pytest.mark.parametrize(("method", "shape"), KINDS, ids=["-".join(kind) for kind in KINDS])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_client_moves_the_sum_beyond_the_ledger_s_bound(name: str, method: str, shape: str) -> None:
    """From a state with a model in it, in float32 as families are stored, and in coordinates of condition 1e6."""
    case = family(name, d_out=OUT, d_in=IN)
    largest = max(B.shape[1] for B, _ in case.uploads.values())
    dims = None if shape == "full" else 6
    server = private(method, clipping_norm=CLIP, dims=dims, clients=tuple(case.uploads), rank=largest)
    start = {m: LoRA(torch.zeros(OUT, largest), torch.ones(largest, IN).tril(3) / IN) for m in ("first", "second")}
    state = server.init(Adapter(start, {"head": torch.zeros(5)}))
    state = server.aggregate(state, uploads_of(family("generic", seed=1, d_out=OUT, d_in=IN), server, state))
    opened = server.open(state)
    assert isinstance(opened, PrivateRound)
    bound, size = opened.mechanism.bound(opened.layout.size), opened.layout.size
    assert bound * opened.mechanism.grid == opened.mechanism.sensitivity(size)
    moved = 0
    for played in (case, regauge(case, 1e6, seed=2)):
        uploads = uploads_of(played, server, state)
        whole = sums(server, state, uploads)
        for k in range(len(uploads)):
            apart = whole - sums(server, state, uploads[:k] + uploads[k + 1 :])
            squares = sum(int(x) ** 2 for x in apart.tolist())  # Python's integers: exact
            assert squares <= bound**2, (uploads[k].client.id, played.name)
            moved += squares > (0.98 * bound) ** 2
    assert moved, "nobody was clipped, so that nothing was tried"
