"""Uploads folded in and dropped (`Server(memory=...)`).

Kind of evidence: oracle (dense float64 means of the stored factors; the same server without a limit), property (order
of arrival, what was left out against what is reported), and the uploads' own life time.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.errors import HyperparameterError, QuorumNotMet, RankMismatch, UploadRefused
from fedlora.linalg.incremental import Folded, fold
from support.federations import noise

D_OUT, D_IN, RANK = 64, 48, 4
COLUMN = 4 * 2 * (D_OUT + D_IN)  # bytes of one column of two modules
MODULES = ("a", "b")


def lora(k: int, module: str, common: int | None, tail: float, rank: int = RANK) -> LoRA:
    """common: the dimension of the column space that all clients share, up to `tail`; None: each has its own."""
    A = noise((rank, D_IN), module, k, "A", dtype=torch.float32)
    if common is None:
        return LoRA(noise((D_OUT, rank), module, k, "B", dtype=torch.float32), A)
    space = torch.linalg.qr(noise((D_OUT, common), module, "space", dtype=torch.float32))[0]
    B = space @ noise((common, rank), module, k, "mix", dtype=torch.float32)
    return LoRA(B + tail * noise((D_OUT, rank), module, k, "tail", dtype=torch.float32), A)


def uploads(count: int, *, common: int | None = 6, tail: float = 0.0, heads: bool = True) -> list[Upload]:
    return [
        Upload(
            Client(f"c{k:03}", RANK),
            3 + k % 5,
            Adapter(
                {name: lora(k, name, common, tail) for name in MODULES},
                {"head": noise((3, 7), k, dtype=torch.float32)} if heads else {},
            ),
        )
        for k in range(count)
    ]


def server(columns: float | None, **options: object) -> Server:
    """A server whose memory is room for so many columns, half of it for what came before."""
    memory = None if columns is None else 2 * columns * COLUMN / 2**20
    hparams = options.pop("hparams", {"gamma": 0.5})
    return Server(build("glora", **hparams), memory=memory, **options)  # type: ignore[arg-type]


def start(s: Server) -> ServerState:
    seed = {name: LoRA(torch.zeros(D_OUT, RANK), torch.ones(RANK, D_IN)) for name in MODULES}
    return s.init(Adapter(seed, {"head": torch.zeros(3, 7)}))


def mean(us: Iterable[Upload], module: str) -> Tensor:
    us = list(us)
    total = sum(u.num_examples for u in us)
    return sum(
        (u.num_examples / total * u.adapter.modules[module].map(Tensor.double).delta() for u in us), torch.zeros(())
    )


def apart(got: Tensor, want: Tensor) -> float:
    return float(torch.linalg.matrix_norm(got.double() - want) / torch.linalg.matrix_norm(want))


def update(s: Server, state: ServerState, module: str) -> Tensor:
    return s.global_update(state)[module].map(Tensor.double).delta()


# ------------------------------------------------------------------------------------------------------- the server


def test_while_they_fit_the_bits_are_the_same() -> None:
    """Twelve columns a half, eight of them used: the round is the ordinary one."""
    us = uploads(2)
    limited, free = server(13), server(None)
    a, b = (s.aggregate(start(s), us) for s in (limited, free))
    for module in MODULES:
        assert torch.equal(update(limited, a, module), update(free, b, module))
        assert limited.diagnostics(a)[module] == free.diagnostics(b)[module]
    assert torch.equal(a.heads["head"], b.heads["head"])


def test_what_is_folded_and_fits_in_its_columns_is_exact() -> None:
    """30 clients of rank 4 in a shared space of dimension 6, 12 columns: folded many times, and still the mean."""
    us = uploads(30)
    s = server(12)
    after = s.aggregate(start(s), us)
    for module in MODULES:
        assert apart(update(s, after, module), mean(us, module)) < 1e-6
        facts = s.diagnostics(after)[module]
        assert facts["approximation"] == "incremental"
        assert facts["kept"] == pytest.approx(1.0, abs=1e-9)
        assert facts["error"] < 1e-6  # type: ignore[operator]
    total = sum(u.num_examples for u in us)
    want = sum(u.num_examples * u.adapter.heads["head"].double() for u in us) / total
    assert torch.allclose(after.heads["head"].double(), want, atol=1e-7)
    assert after.tally is not None
    assert sum(after.tally.weights.values()) == pytest.approx(1.0)
    assert len(after.tally.weights) == 30
    assert s.download(after, us[0].client).adapter.modules["a"].rank == RANK


def test_what_is_left_out_is_what_is_reported() -> None:
    """A shared space and a tail outside it: the error is no larger than the bound, and the bound is no fable."""
    us = uploads(40, tail=1e-2)
    s = server(12)
    after = s.aggregate(start(s), us)
    for module in MODULES:
        facts = s.diagnostics(after)[module]
        error = apart(update(s, after, module), mean(us, module))
        assert 1e-4 < error < 1.05 * float(facts["error"]) < 0.2  # type: ignore[arg-type]
        assert 0.99 < facts["kept"] < 1  # type: ignore[operator]


def test_a_flat_spectrum_is_refused_and_a_half_flat_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    s = server(12)
    with pytest.raises(RankMismatch, match="flat spectrum"):
        s.aggregate(start(s), uploads(30, common=None))
    roomy = server(16)  # for 24 directions
    after = roomy.aggregate(start(roomy), uploads(6, common=None))
    assert 0.5 < roomy.diagnostics(after)["a"]["kept"] < 0.9  # type: ignore[operator]
    assert "of the clients' subspaces" in caplog.text


def test_any_order_of_arrival_gives_the_same_to_rounding() -> None:
    """The stated tolerance: 1e-5 of the update where the clients share a subspace."""
    us, s = uploads(25), server(12)
    one, other = (s.aggregate(start(s), some) for some in (us, us[::-1]))
    for module in MODULES:
        assert apart(update(s, one, module), update(s, other, module)) < 1e-5


def test_uploads_are_dropped_before_the_round_is_over() -> None:
    s = server(12)
    opened = s.open(start(s))
    alive = []
    for k in range(20):
        (upload,) = itertools.islice(uploads(20)[k:], 1)
        opened.add(upload)
        alive.append(weakref.ref(upload))
        assert opened.nbytes <= 2 * 12 * COLUMN + len(MODULES) * 16 * 4 * D_OUT  # and what watches the loss
        del upload
    gc.collect()
    held = sum(ref() is not None for ref in alive)
    assert held * RANK * COLUMN <= 12 * COLUMN + RANK * COLUMN
    opened.close()


def test_folded_uploads_still_count_once_and_towards_the_quorum() -> None:
    s = server(12, quorum=12)
    opened = s.open(start(s))
    us = uploads(11)
    for upload in us:
        opened.add(upload)
    with pytest.raises(UploadRefused, match="second upload"):
        opened.add(us[0])
    with pytest.raises(QuorumNotMet, match="11 usable uploads"):
        opened.close()


@pytest.mark.parametrize("missing", ["renormalise", "zero"])
def test_a_module_that_some_lack(missing: str) -> None:
    """Weights over its holders, or over everybody; by a dense mean."""
    s = server(12, missing=missing)
    us = uploads(20)
    lacking = []
    for k, u in enumerate(us):
        modules = {"a": u.adapter.modules["a"]} if k % 3 == 0 else dict(u.adapter.modules)
        lacking.append(
            Upload(Client(u.client.id, dict.fromkeys(modules, RANK)), u.num_examples, Adapter(modules, u.adapter.heads))
        )
    after = s.aggregate(start(s), lacking)
    holders = [u for u in lacking if "b" in u.adapter.modules]
    share = sum(u.num_examples for u in holders) / sum(u.num_examples for u in lacking)
    want = mean(holders, "b") * (1.0 if missing == "renormalise" else share)
    assert apart(update(s, after, "b"), want) < 1e-6
    assert apart(update(s, after, "a"), mean(lacking, "a")) < 1e-6


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_weightings(weighting: str) -> None:
    """The server's, and glora's own uniform one on top of it."""
    us = uploads(20)
    equal = [Upload(u.client, 1, u.adapter) for u in us]
    want = mean(equal if weighting == "uniform" else us, "a")
    for s in (server(12, weighting=weighting), server(12, hparams={"weighting": weighting})):
        assert apart(update(s, s.aggregate(start(s), us), "a"), want) < 1e-6


def test_the_next_round_goes_on_from_it() -> None:
    """History stays what it was; a later round with few uploads is the ordinary one again."""
    s = server(12)
    first = s.aggregate(start(s), uploads(2))
    folded = s.aggregate(first, uploads(20))
    assert folded.modules["a"].history.keys() == first.modules["a"].history.keys()
    again = s.aggregate(folded, uploads(2))
    assert s.diagnostics(again)["a"]["approximation"] is None


def test_impossible_limits_say_what_would_do() -> None:
    with pytest.raises(HyperparameterError, match="fedit cannot"):
        Server(build("fedit"), memory=10)
    with pytest.raises(HyperparameterError, match="positive number of megabytes"):
        Server(build("glora"), memory=0)
    tight = server(3)
    with pytest.raises(HyperparameterError, match=r"room for 3 columns .* rank 4 needs 4. Give at least 0.00684 MB"):
        tight.open(start(tight))
    with pytest.raises(HyperparameterError, match="all uploads at once"):
        server(12, hparams={"weighting": "rank-partition"})


def test_many_folds_make_no_directions() -> None:
    """400 clients in 6 dimensions, folded 130 times: rounding adds up, and stays below what counts as a direction."""
    us = uploads(400, heads=False)
    s = server(12, heads="frozen")
    state = s.init(Adapter({name: LoRA(torch.zeros(D_OUT, RANK), torch.ones(RANK, D_IN)) for name in MODULES}))
    after = s.aggregate(state, us)
    for module in MODULES:
        assert s.diagnostics(after)[module]["rank"] == 6
        assert apart(update(s, after, module), mean(us, module)) < 1e-5


def test_float64_uploads_stay_within_the_memory() -> None:
    """Half as many columns: what is held after a fold is no more than the half of the memory that is meant for it."""
    s = server(16)
    opened = s.open(start(s))
    for u in uploads(20):
        opened.add(Upload(u.client, u.num_examples, u.adapter.map(Tensor.double)))
    pairs = [sums.folded for sums in opened._sums.values()]  # type: ignore[attr-defined]
    assert {pair.M.dtype for pair in pairs} == {torch.float64}
    assert sum(t.nbytes for pair in pairs for t in (pair.M, pair.N)) <= 16 * COLUMN
    opened.close()


@pytest.mark.parametrize("n", [1e300, 1e-100, 10**300])
def test_counts_that_sums_cannot_carry_are_refused(n: float) -> None:
    s = server(12)
    with pytest.raises(UploadRefused, match="sums over clients carry"):
        s.open(start(s)).add(Upload(Client("x", RANK), n, uploads(1)[0].adapter))


# ------------------------------------------------------------------------------------------------------- the fold


def test_fold_keeps_both_products_until_columns_run_out() -> None:
    """M N and M M^T, by dense sums; then the share of the trace and the norm of what is gone, exactly."""
    pieces = [(noise((20, 5), k, "M"), noise((5, 15), k, "N")) for k in range(3)]
    M, N = torch.cat([m for m, _ in pieces], dim=1), torch.cat([n for _, n in pieces], dim=0)
    whole: Folded | None = None
    for m, n in pieces:
        whole = fold(whole, m, n, 15)
    assert whole is not None
    assert torch.allclose(whole.M @ whole.N, M @ N)
    assert torch.allclose(whole.M @ whole.M.mT, M @ M.mT)
    assert whole.kept == 1.0 and whole.lost < 1e-10 * float(torch.linalg.matrix_norm(M @ N)), "float64's own rounding"

    cut = fold(None, M, N, 6)
    U, s, _ = torch.linalg.svd(M)
    P = U[:, :6] @ U[:, :6].mT
    assert torch.allclose(cut.M @ cut.N, P @ M @ N)
    assert cut.kept == pytest.approx(float(s[:6].square().sum() / s.square().sum()))
    assert cut.lost == pytest.approx(float(torch.linalg.matrix_norm(M @ N - P @ M @ N)))
