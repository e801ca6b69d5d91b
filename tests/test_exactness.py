"""Exact means exact: the mean of what was stored, whatever the dtypes, clients, weights and families; and reports that
are true. Kind of evidence: oracle (dense float64 means of the stored factors).

The hard rounds are those of `benchmarks/exactness.py`, which runs all of them, larger; here a part of every kind.
"""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import Tensor

import exactness
from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.core.base_change import BaseChange, moved
from fedlora.linalg import svd_of_product
from support.federations import noise

F64 = torch.float64
SHAPE = exactness.Shape(40, 32, 4, 12)  # the sum of ranks is 12, 48 and 48: below both sides, and above


@pytest.mark.quick(6)
@pytest.mark.parametrize("budget", exactness.BUDGETS)
@pytest.mark.parametrize("dtype", exactness.DTYPES)
def test_the_mean_is_exact_and_the_report_is_true(dtype: str, budget: str) -> None:
    """Every seventh combination of clients, weights and updates: the verdict of `exactness.judge`."""
    every = itertools.product((3, 12, 48), exactness.WEIGHTS, exactness.UPDATES)
    rows = [exactness.Row(dtype, n, w, updates, budget) for n, w, updates in itertools.islice(every, 0, None, 7)]
    found = [exactness.judge(row, SHAPE, seed=k) for k, row in enumerate(rows)]
    assert [v for v in found if v.failed] == []
    if budget in ("whole", "cut"):
        assert not any(v.refused for v in found)
    assert any(not v.refused for v in found)


@pytest.mark.parametrize("name", ["glora", "flexlora", "svd", "flora", "fedex-lora"])
def test_bfloat16_uploads_of_many_clients_lose_nothing(name: str) -> None:
    """64 clients of rank 8 lost 31 % of their mean once: a tolerance of the stored dtype cut the mean itself."""
    n, r, d_out, d_in = 64, 8, 256, 192
    pairs = [LoRA(noise((d_out, r), k, "B"), noise((r, d_in), k, "A")).map(lambda t: t.bfloat16()) for k in range(n)]
    mean = sum((x.map(Tensor.double).delta() / n for x in pairs), torch.zeros(d_out, d_in, dtype=F64))
    server = Server(build(name, **({"energy": 1.0} if name == "svd" else {})))
    state = server.init(Adapter({"m": LoRA(torch.zeros(d_out, r), torch.ones(r, d_in))}))
    uploads = [Upload(Client(f"c{k:02}", r), 1, Adapter({"m": x})) for k, x in enumerate(pairs)]
    got = server.global_update(server.aggregate(state, uploads))["m"].map(Tensor.double).delta()
    assert float(torch.linalg.matrix_norm(got - mean) / torch.linalg.matrix_norm(mean)) < 1e-6


# ------------------------------------------------------------------------------------------------ nothing in silence


def start(server: Server, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    return server.init(Adapter({"m": LoRA(torch.zeros(48, 4, dtype=dtype), torch.ones(4, 40, dtype=dtype))}))


def test_bad_coordinates_in_bfloat16_are_loud_and_right(caplog: pytest.LogCaptureFixture) -> None:
    """Condition 1e3: every component could be rounding of the stored factors. The update of what was stored comes back,
    in the server's model and in readouts, and a warning says what it is worth."""
    shape = exactness.Shape(96, 80, 8, 99)
    uploads = exactness.uploads_of(exactness.Row("bfloat16", 4, "equal", "bad gauge", "whole"), shape)
    server = Server(build("glora"))
    with caplog.at_level(logging.WARNING):
        state = server.aggregate(server.init(Adapter({"m": LoRA(torch.zeros(96, 8), torch.ones(8, 80))})), uploads)
    mean = sum(u.adapter.modules["m"].map(Tensor.double).delta() / 4 for u in uploads)
    got = server.global_update(state)["m"].map(Tensor.double).delta()
    assert float(torch.linalg.matrix_norm(got - mean) / torch.linalg.matrix_norm(mean)) < 1e-6  # type: ignore[arg-type]
    readout = server.download(state, Client("new", 32)).adapter.modules["m"].map(Tensor.double).delta()
    lost = float(torch.linalg.matrix_norm(readout - mean) / torch.linalg.matrix_norm(mean))  # type: ignore[arg-type]
    assert lost**2 <= 1.1e-3, "readouts leave out a thousandth of the energy at most"
    assert "storing these" in caplog.text


# ------------------------------------------------------------------------------------------- base changes, residuals


def test_hundreds_of_steps_do_not_drift() -> None:
    """Against the float64 sum of the steps as they were given: within what dense float32 accumulation has (6e-7)."""
    base: BaseChange | None = None
    total = torch.zeros(24, 20, dtype=F64)
    for k in range(300):
        step = LoRA(noise((24, 3), k, "B").float(), noise((3, 20), k, "A").float())
        total += step.map(Tensor.double).delta()
        base = moved(base, svd_of_product(*step.map(Tensor.double).factors), torch.float32)
    assert base is not None
    off = torch.linalg.matrix_norm(base.total.delta() - total) / torch.linalg.matrix_norm(total)
    assert float(off) < 1e-7


def test_a_base_keeps_each_column_that_its_type_can_hold_beside_the_largest() -> None:
    """By hand: of float32's spacing 1.2e-7 beside 1, components of 3e-8 are kept, and of 3e-9 are not."""
    sides = torch.linalg.qr(noise((20, 3), "B"))[0], torch.linalg.qr(noise((16, 3), "A"))[0].T
    base = moved(None, svd_of_product(sides[0] * torch.tensor([1.0, 3e-8, 3e-9]), sides[1]), torch.float32)
    assert base is not None and base.total.rank == 3
    assert [(kept.rank, kept.factors[0].dtype) for kept in base.steps] == [(2, torch.float32)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fedex_s_residual_holds_what_storing_the_averaged_pair_costs(dtype: torch.dtype) -> None:
    """Dense float64. In opposite coordinates the averaged pair's product is 16 times the clients' updates, so its
    rounding, on either side, exceeds rounding of the update."""
    server, (B, A) = Server(build("fedex-lora")), (noise((20, 3), "B"), noise((3, 16), "A"))
    pairs = [x.map(lambda t: t.to(dtype)) for x in (LoRA(8 * B, A / 8), LoRA(B / 8, 8 * A))]
    state = server.init(Adapter({"m": pairs[0].map(Tensor.float)}))
    after = server.aggregate(state, [Upload(Client(f"c{k}", 3), 1, Adapter({"m": x})) for k, x in enumerate(pairs)])
    download = server.download(after, Client("c0", 3))
    mean = sum(x.map(Tensor.double).delta() / 2 for x in pairs)
    base = download.base["m"].total.delta()
    off = mean - download.adapter.modules["m"].map(Tensor.double).delta() - base
    assert float(torch.linalg.matrix_norm(off) / torch.linalg.matrix_norm(mean)) < 1e-10  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- what reviewers broke once


@pytest.mark.parametrize("name", ["glora", "flexlora", "svd", "flora", "fedex-lora"])
def test_float64_uploads_stay_float64_whatever_the_start_is(name: str) -> None:
    """A start in float32 and uploads in float64: the float64 mean, not its float32 copy."""
    x = LoRA(noise((48, 4), "B"), noise((4, 40), "A"))
    server = Server(build(name, **({"energy": 1.0} if name == "svd" else {})))
    state = server.aggregate(start(server), [Upload(Client("a", 4), 1, Adapter({"m": x}))])
    got, want = server.global_update(state)["m"].delta(), x.delta()
    assert float(torch.linalg.matrix_norm(got - want) / torch.linalg.matrix_norm(want)) < 1e-13
