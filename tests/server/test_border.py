"""What an upload must be before any of it is used. Kind of evidence: contract; each reason is part of the message."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, Kept, LoRA, Server, Streamed, Upload, build
from fedlora.errors import RankMismatch, UploadRefused
from fedlora.server.checks import terms_and_sizes
from fedlora.testing.federations import rounds
from support.federations import EQUAL, SHAPES, seed_adapter
from support.private_servers import private
from support.states import content

F64 = torch.float64
PLAYED = next(rounds(Server(build("glora")), EQUAL, (tuple(EQUAL),)))
A, B, C, D = PLAYED.uploads


def swapped(upload: Upload, change: Callable[[LoRA], LoRA | None], module: str = "attn.q") -> Upload:
    """`upload` with one module changed; None removes it."""
    modules = dict(upload.adapter.modules)
    changed = change(modules.pop(module))
    if changed is not None:
        modules[module] = changed
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def factor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Upload], Upload]:
    def change_one(lora: LoRA) -> LoRA:
        return LoRA(**{**lora.tensors(), name: change(lora.tensors()[name])})

    return lambda upload: swapped(upload, change_one)


def both(change_B: Callable[[Tensor], Tensor], change_A: Callable[[Tensor], Tensor]) -> Callable[[Upload], Upload]:
    return lambda upload: swapped(upload, lambda lora: LoRA(change_B(lora.factors[0]), change_A(lora.factors[1])))


def head(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Callable[[Upload], Upload]:
    return lambda u: replace(u, adapter=Adapter(u.adapter.modules, change(u.adapter.heads)))


def poked(value: float) -> Callable[[Tensor], Tensor]:
    """A copy with one entry replaced."""

    def poke(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[3] = value
        return t

    return poke


def examples(n: object) -> Callable[[Upload], Upload]:
    return lambda upload: replace(upload, num_examples=n)  # type: ignore[arg-type]


def added(upload: Upload) -> Upload:
    modules = {**upload.adapter.modules, "attn.k": upload.adapter.modules["attn.q"]}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def declared(rank: int | Mapping[str, int]) -> Callable[[Upload], Upload]:
    return lambda upload: replace(upload, client=Client(upload.client.id, rank))


def same(t: Tensor) -> Tensor:
    return t


# attn.q is (30, 22), the client's rank is 4: B (30, 4), A (4, 22).
BAD: dict[str, tuple[Callable[[Upload], Any], str]] = {
    "NaN": (factor("B", poked(math.nan)), r"factor B .*'attn.q' .*NaN or Inf in 1 of 120 "),
    "Inf": (factor("A", poked(-math.inf)), r"factor A .*'attn.q' .*NaN or Inf in 1 of 88"),
    "1e30": (factor("B", poked(1e30)), r"factor B of module 'attn.q' holds 1\.0e\+30; the server sums up to 1e\+15"),
    "B too short": (factor("B", lambda t: t[:-1]), r"'attn.q' has factors .*\(29, 4\).* shares .*\(30, 4\)"),
    "rank 0": (both(lambda B: B[:, :0], lambda A: A[:0]), r"\(30, 0\)"),
    "a rank for no module": (declared({"attn.q": 4, "attn.v": 4, "k": 4}), r"a rank for 'k', .*not an adapted module"),
    "a module not declared": (declared({"attn.q": 4}), r"0 are missing \[\], 1 are unexpected \['attn.v'\]"),
    "module missing": (lambda u: swapped(u, lambda _: None), r"1 are missing \['attn.q'\], 0 are unexpected"),
    "module extra": (added, r"0 are missing \[\], 1 are unexpected \['attn.k'\]"),
    "B absent": (lambda u: swapped(u, lambda x: LoRA(None, x.A)), r"has factors {'A': .*shares {'B': "),
    "base weights": (lambda u: replace(u, adapter=replace(u.adapter, base=u.adapter.modules)), "contains base weights"),
    "heads missing": (head(lambda h: {}), r"heads {} were sent; this round shares {'classifier.bias': \(3,\)"),
    "head a scalar (would broadcast)": (
        head(lambda h: {**h, "classifier.bias": h["classifier.bias"][0]}),
        r"heads {'classifier.bias': \(\), .* shares {'classifier.bias': \(3,\)",
    ),
    "head Inf": (head(lambda h: {k: t / 0 for k, t in h.items()}), r"head 'classifier.bias' .*NaN or Inf in 3 of 3 "),
    "sparse": (lambda u: replace(u, adapter=u.adapter.map(lambda t: t.to_sparse())), "torch.sparse_coo on cpu; "),
    "no numbers at all": (lambda u: replace(u, adapter=u.adapter.map(lambda t: t.to("meta"))), "on meta"),
    "numpy": (lambda u: replace(u, adapter=u.adapter.map(lambda t: t.numpy())), "cannot be read: "),
    "no adapter": (lambda u: replace(u, adapter=None), "cannot be read: AttributeError"),
    "negative": (examples(-1), r"num_examples must be a finite number >= 0; got -1\."),
    "True examples": (examples(True), r"num_examples .* got True"),
    "examples beyond every float": (examples(10**400), r"num_examples .*10000"),
    "5e-324 examples": (examples(5e-324), r"num_examples = 4\.94066e-324; sums"),  # its weight would be 0
    "1e300 examples": (examples(1e300), r"num_examples = 1e\+300; sums"),
}
KINDS = {"kept": Kept(quorum=3), "streamed": Streamed(quorum=3)}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_upload_is_refused_by_client_and_reason_and_the_state_stays(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Strict: raised at once. With a quorum: named in the tally, and the rest is as if it had never come."""
    spoil, reason = BAD[what]
    bad, before = spoil(B), content(PLAYED.before)
    with pytest.raises(UploadRefused, match=reason):
        Server(build("glora")).aggregate(PLAYED.before, [A, bad, C, D])
    for round in KINDS.values():
        server = Server(build("glora"), round=round)
        after, without = server.aggregate(PLAYED.before, [bad, A, C, D]), server.aggregate(PLAYED.before, [A, C, D])
        assert after.tally is not None and without.tally is not None
        assert list(after.tally.refused) == ["b"]
        assert after.tally.weights == without.tally.weights
        assert content(after.modules) == content(without.modules) and content(after.heads) == content(without.heads)
    hidden = private("flexlora")
    begun = hidden.init(seed_adapter(4))
    sums = [hidden.open(begun) for _ in range(2)]
    for upload in (A, C, D):
        sums[0].add(upload)
        sums[1].add(upload)
    with pytest.raises(UploadRefused):
        sums[0].add(bad)
    assert sum("does not count" in line.getMessage() for line in caplog.records) == 1  # for the operator alone
    assert content(sums[0].close().modules) == content(sums[1].close().modules)
    assert content(PLAYED.before) == before


def test_a_factor_that_the_roles_keep_local_is_refused() -> None:
    """FedSA-LoRA: B never travels, and the heads stay home."""
    played = next(rounds(Server(build("fedsa-lora")), EQUAL, (tuple(EQUAL),)))
    first, *rest = played.uploads
    modules = first.adapter.modules
    leaky = Adapter({m: LoRA(torch.ones(d, 4), modules[m].A) for m, (d, _) in SHAPES.items()})
    for adapter, reason in ((leaky, r"has factors .*'B'.* shares {'A'"), (Adapter(modules, B.adapter.heads), "heads")):
        with pytest.raises(UploadRefused, match=reason):
            Server(build("fedsa-lora")).aggregate(played.before, [replace(first, adapter=adapter), *rest])


def test_a_rank_that_the_method_cannot_serve_is_named_at_the_border_and_before() -> None:
    for name, start, rank in (("fedit", 4, 1), ("ffa-lora", 4, 5)):
        server = Server(build(name), round=Kept(quorum=1))
        state = server.init(seed_adapter(start))
        pairs = {m: LoRA(torch.ones(d, rank), torch.ones(rank, k)) for m, (d, k) in SHAPES.items()}
        sent = {m: LoRA(x.B, x.A if name == "fedit" else None) for m, x in pairs.items()}
        with pytest.raises(UploadRefused, match=rf"'n' refused: .*start's rank 4, .*{rank}"):
            server.open(state).add(Upload(Client("n", rank), 1, Adapter(sent, seed_adapter(4).heads)))
        with pytest.raises(RankMismatch, match=rf"n, .*start's rank 4, .*{rank}"):
            server.download(state, Client("n", rank))


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e300), (torch.float16, 1e6)])
def test_a_head_too_large_for_the_state_leaves_no_inf_in_it(dtype: torch.dtype, value: float) -> None:
    """The upload is finite in its own dtype, and would be Inf in the state's."""
    server, start = Server(build("glora"), round=Kept(quorum=1)), seed_adapter(4)
    state = server.init(Adapter(start.modules, {k: h.to(dtype) for k, h in start.heads.items()}))
    bad = head(lambda h: {k: torch.full_like(t, value, dtype=F64) for k, t in h.items()})(B)
    after = server.aggregate(state, [A, bad])
    assert all(bool(h.isfinite().all()) for h in after.heads.values())
    assert after.tally is not None and list(after.tally.refused) == ["b"]


def cancelling(upload: Upload, size: float) -> Upload:
    """The same update with two more columns whose terms have that size and cancel, in place of its last two."""

    def change(lora: LoRA) -> LoRA:
        L, R = (t.clone() for t in lora.factors)
        L[:, 2:], R[2:] = size, 1.0
        L[:, 3], R[3] = -L[:, 2], R[2]
        return LoRA(L, R)

    return swapped(upload, change)


def test_terms_that_cancel_are_named_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Terms of 2 x 1e6 sqrt(30 x 22) beside a sum of size 10 are named; float64 resolves 1e6 of 1e16 no more."""
    lora = cancelling(B, 1e6).adapter.modules["attn.q"]
    ((terms, size),) = terms_and_sizes([lora])
    columns = [float(L.norm() * R.norm()) for L, R in zip(lora.factors[0].mT, lora.factors[1], strict=True)]
    assert terms == pytest.approx(sum(columns)) and size == pytest.approx(float(lora.delta().norm()), rel=1e-6)
    server = Server(build("flexlora"), round=Kept(quorum=1))
    with caplog.at_level(logging.WARNING, logger="fedlora.server"):
        after = server.aggregate(PLAYED.before, [A, cancelling(B, 1e6)])
    assert "terms of b's factors" in caplog.text and "attn.q" in caplog.text
    want = sum(n / 35 * u.adapter.modules["attn.q"].delta() for n, u in ((10, A), (25, cancelling(B, 0.0))))
    torch.testing.assert_close(server.global_update(after)["attn.q"].delta(), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(UploadRefused, match=r"'attn.q' cannot be measured: terms of size .* cancel to"):
        Server(build("flexlora")).aggregate(PLAYED.before, [A, cancelling(B, 1e14)])


def test_one_factor_beside_a_common_one_has_nothing_to_cancel_with() -> None:
    server = Server(build("ffa-lora"))
    state = server.init(seed_adapter(4))
    sent = {m: LoRA(torch.full((d, 4), 1e14, dtype=F64), None) for m, (d, _) in SHAPES.items()}
    server.open(state).add(Upload(Client("a", 4), 1, Adapter(sent, seed_adapter(4).heads)))
