"""Laws that hold for every input, on drawn federations. Kind of evidence: property (hypothesis).

Each law is an equation between two ways of using the server, so no expected number is needed. float64 throughout; drawn
factors are Gaussian, so the federations are generic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build

EXACT = [("glora", {}), ("svd", {"energy": 1.0}), ("flexlora", {})]
exact_methods = pytest.mark.parametrize(("name", "hparams"), EXACT, ids=str)
quick = settings(max_examples=15, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Federation:
    """Drawn sizes and factors of one module `m`."""

    d_out: int
    d_in: int
    ranks: tuple[int, ...]
    examples: tuple[int, ...]
    seed: int

    @property
    def uploads(self) -> list[Upload]:
        generator = torch.Generator().manual_seed(self.seed)
        sent = []
        for k, (r, n) in enumerate(zip(self.ranks, self.examples, strict=True)):
            B = torch.randn(self.d_out, r, generator=generator, dtype=torch.float64)
            A = torch.randn(r, self.d_in, generator=generator, dtype=torch.float64)
            sent.append(Upload(Client(f"c{k}", r), n, Adapter({"m": LoRA(B, A)})))
        return sent

    def aggregate(self, server: Server, uploads: list[Upload]) -> ServerState:
        seed = LoRA(torch.zeros(self.d_out, 1, dtype=torch.float64), torch.ones(1, self.d_in, dtype=torch.float64))
        return server.aggregate(server.init(Adapter({"m": seed})), uploads)


@st.composite
def federations(draw: st.DrawFn) -> Federation:
    clients = draw(st.integers(1, 4))
    return Federation(
        d_out=draw(st.integers(6, 30)),
        d_in=draw(st.integers(6, 30)),
        ranks=tuple(draw(st.lists(st.integers(1, 6), min_size=clients, max_size=clients))),
        examples=tuple(draw(st.lists(st.integers(1, 50), min_size=clients, max_size=clients))),
        seed=draw(st.integers(0, 10**6)),
    )


def model(server: Server, state: ServerState) -> Tensor:
    return server.global_update(state)["m"].delta()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return float(torch.linalg.matrix_norm(a - b)) <= tolerance * max(float(torch.linalg.matrix_norm(b)), 1e-12)


@exact_methods
@quick
@given(f=federations(), factor=st.sampled_from([0.5, 3.0, 1e4]))
def test_only_the_proportions_of_the_examples_count(name: str, hparams: dict, f: Federation, factor: float) -> None:
    server = Server(build(name, **hparams))
    more = [replace(u, num_examples=factor * u.num_examples) for u in f.uploads]
    assert close(model(server, f.aggregate(server, more)), model(server, f.aggregate(server, f.uploads)))


@exact_methods
@quick
@given(f=federations(), extra=st.integers(1, 4))
def test_zero_padding_a_client_changes_nothing(name: str, hparams: dict, f: Federation, extra: int) -> None:
    """[B 0] [A; 0] is the same update at a larger nominal rank."""
    server, (first, *rest) = Server(build(name, **hparams)), f.uploads
    B, A = first.adapter.modules["m"].factors
    padded = Adapter({"m": LoRA(pad(B, (0, extra)), pad(A, (0, 0, 0, extra)))})
    wider = replace(first, client=Client("c0", f.ranks[0] + extra), adapter=padded)
    assert close(model(server, f.aggregate(server, [wider, *rest])), model(server, f.aggregate(server, f.uploads)))


@exact_methods
@quick
@given(f=federations())
def test_one_client_alone_gets_its_own_update_back(name: str, hparams: dict, f: Federation) -> None:
    server, first = Server(build(name, **hparams)), f.uploads[0]
    back = server.download(f.aggregate(server, [first]), first.client).adapter.modules["m"].delta()
    assert close(back, first.adapter.modules["m"].delta())


@exact_methods
@quick
@given(f=federations())
def test_returning_the_readout_untouched_keeps_the_model(name: str, hparams: dict, f: Federation) -> None:
    """Everybody reads out at full rank and sends it back: adapters replace, so the state stays."""
    server = Server(build(name, **hparams))
    state = f.aggregate(server, f.uploads)
    full = server.global_update(state)["m"].rank
    echoes = []
    for u in f.uploads:
        client = Client(u.client.id, full)
        echoes.append(Upload(client, u.num_examples, server.download(state, client).adapter))
    assert close(model(server, server.aggregate(state, echoes)), model(server, state))


@exact_methods
@quick
@given(f=federations(), factor=st.sampled_from([-2.0, 1e-3, 1e5]))
def test_the_model_scales_with_the_updates(name: str, hparams: dict, f: Federation, factor: float) -> None:
    server = Server(build(name, **hparams))

    def scaled(u: Upload) -> Upload:
        B, A = u.adapter.modules["m"].factors
        return replace(u, adapter=Adapter({"m": LoRA(B * factor, A)}))

    want = factor * model(server, f.aggregate(server, f.uploads))
    assert close(model(server, f.aggregate(server, [scaled(u) for u in f.uploads])), want)
