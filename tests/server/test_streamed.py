"""Rounds that add uploads up and forget them. Kind of evidence: oracle (dense float64 sums; the kept round)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Server, ServerState, Streamed, Upload, build
from fedlora.errors import HyperparameterError
from fedlora.testing.federations import rounds
from support.federations import EQUAL, MIXED
from support.private_servers import SUMMED
from support.states import content, tensors_in

PARTIAL = (("a", "b", "c"), ("b", "d"), ("a", "c", "d"))


def products(server: Server, state: ServerState, client: str, rank: int) -> dict[str, Tensor]:
    """Module -> what the client starts from, as a product where it has both factors."""
    modules = server.download(state, Client(client, rank)).adapter.modules
    return {n: x.delta() if len(x.tensors()) == 2 else next(iter(x.tensors().values())) for n, x in modules.items()}


@pytest.mark.parametrize("name", SUMMED)
def test_the_result_is_that_of_uploads_that_are_kept(name: str) -> None:
    """Three rounds, clients missing, mixed ranks where the method takes them: the model, the heads, and what a stranger
    starts from. Known clients of glora have a history in the kept round only."""
    ranks = EQUAL if METHODS[name].one_rank else MIXED
    kept, streamed = Server(build(name)), Server(build(name), round=Streamed())
    for played in rounds(kept, ranks, PARTIAL):
        after = streamed.aggregate(played.before, played.uploads[::-1])
        if kept.has_global_model(after):
            for n, lora in kept.global_update(played.after).items():
                torch.testing.assert_close(streamed.global_update(after)[n].delta(), lora.delta(), rtol=0, atol=1e-12)
        for n, start in products(kept, played.after, "stranger", ranks["d"]).items():
            torch.testing.assert_close(products(streamed, after, "stranger", ranks["d"])[n], start, rtol=0, atol=1e-10)
        for n, head in played.after.heads.items():
            torch.testing.assert_close(after.heads[n], head, rtol=0, atol=1e-14)
        assert content(after.tally) == content(played.after.tally)


def many(count: int, d_out: int = 20, d_in: int = 16) -> Iterator[Upload]:
    generator = torch.Generator().manual_seed(0)
    for k in range(count):
        r = 1 + k % 3
        pair = LoRA(torch.randn(d_out, r, generator=generator), torch.randn(r, d_in, generator=generator))
        yield Upload(Client(f"c{k:05}", r), 1 + k % 7, Adapter({"m": pair}, {"h": torch.randn(3, generator=generator)}))


@pytest.mark.parametrize("clients", [2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_thousands_of_clients_are_the_exact_mean(clients: int) -> None:
    """Dense float64 sums; what is stored in float32 has its rounding only."""
    server = Server(build("flexlora"), round=Streamed())
    state = server.init(Adapter({"m": LoRA(torch.zeros(20, 3), torch.ones(3, 16))}, {"h": torch.zeros(3)}))
    after = server.aggregate(state, many(clients))
    total, mean, head = 0.0, torch.zeros(20, 16, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for upload in many(clients):
        n = upload.num_examples
        mean += n * upload.adapter.modules["m"].map(Tensor.double).delta()
        head += n * upload.adapter.heads["h"].double()
        total += n
    got = server.global_update(after)["m"].map(Tensor.double).delta()
    assert float((got - mean / total).norm() / (mean / total).norm()) < 5e-7
    torch.testing.assert_close(after.heads["h"].double(), head / total, rtol=0, atol=1e-8)
    assert after.tally is not None and len(after.tally.weights) == clients


def test_uploads_are_forgotten_as_they_come() -> None:
    server = Server(build("flexlora"), round=Streamed())
    round = server.open(server.init(Adapter({"m": LoRA(torch.zeros(20, 3), torch.ones(3, 16))}, {"h": torch.zeros(3)})))
    seen = []
    for upload in many(3):
        round.add(upload)
        seen += [weakref.ref(t) for t in tensors_in(upload.adapter)]
    del upload
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_a_module_that_some_lack_and_uniform_weights() -> None:
    server = Server(build("svd", energy=1.0), round=Streamed(weighting="uniform"))
    played = next(rounds(server, MIXED, (("a", "b", "c"),)))
    a, b, c = played.uploads
    lacks = replace(a, client=Client("a", {"attn.v": 2}), adapter=Adapter(
        {"attn.v": a.adapter.modules["attn.v"]}, a.adapter.heads))  # fmt: skip
    after = server.aggregate(played.before, [lacks, b, c])
    for name, held in (("attn.q", (b, c)), ("attn.v", (a, b, c))):
        want = sum(u.adapter.modules[name].delta() for u in held) / len(held)
        torch.testing.assert_close(server.global_update(after)[name].delta(), want, rtol=0, atol=1e-12)
    alone = server.aggregate(played.before, [lacks])
    assert content(alone.modules["attn.q"]) == content(played.before.modules["attn.q"])


def test_what_is_no_function_of_a_sum_is_refused_with_the_way_out() -> None:
    for name in METHODS:
        if name not in SUMMED:
            with pytest.raises(HyperparameterError, match=r"Streamed rounds have only a sum .*Kept\(\), or in a file"):
                Server(build(name), round=Streamed())
    for cut in ({"rho": 0.5}, {"rank": 4}):
        with pytest.raises(HyperparameterError, match=r"votes of its own.*svd with that rank"):
            Server(build("glora", **cut), round=Streamed())
    Server(build("glora"), round=Streamed())
