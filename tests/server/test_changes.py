"""Changes measured: norms and cosines against dense float64 matrices. Kinds of evidence: oracle, attack."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Upload
from fedlora.analysis.audit import random_gauge
from fedlora.linalg.parallel import workers
from fedlora.server.changes import Sent, changes
from support import families
from support.federations import noise

HEADS = {"head": noise((3, 4), "head")}


def a_federation(dtype: torch.dtype = torch.float64) -> tuple[list[list[Sent | None]], list[Upload], Tensor]:
    """Two modules, five clients of mixed ranks, one without the second module; readouts that share columns; heads. And
    the dense changes, one row a client."""
    shapes, ranks = ((20, 14), (9, 30)), (1, 2, 4, 4, 6)
    common = [LoRA(noise((d, 6), "B", d, dtype=dtype), noise((6, e), "A", d, dtype=dtype)) for d, e in shapes]
    modules: list[list[Sent | None]] = []
    rows = [[] for _ in ranks]  # type: ignore[var-annotated]
    for m, (d, e) in enumerate(shapes):
        modules.append([])
        for k, r in enumerate(ranks):
            if (m, k) == (1, 2):
                modules[-1].append(None)
                rows[k].append(torch.zeros(d * e, dtype=torch.float64))
                continue
            B, A = common[m].factors
            begun = LoRA(B[:, :r], A[:r])
            sent = LoRA(noise((d, r), "sent", m, k, dtype=dtype), noise((r, e), "sent", m, k, dtype=dtype))
            modules[-1].append(Sent(sent, begun))
            rows[k].append((sent.map(Tensor.double).delta() - begun.map(Tensor.double).delta()).flatten())
    uploads = []
    for k in range(len(ranks)):
        head = noise((3, 4), "head", k)
        rows[k].append((head - HEADS["head"]).flatten())
        uploads.append(Upload(Client(f"c{k}", ranks[k]), 1, Adapter({}, {"head": head})))
    return modules, uploads, torch.stack([torch.cat(row) for row in rows])


def expect(found: object, dense: Tensor, rel: float) -> None:
    norms = dense.norm(dim=1)
    torch.testing.assert_close(found.norms, norms, rtol=rel, atol=0)  # type: ignore[attr-defined]
    cosines = dense @ dense.T / norms[:, None] / norms
    torch.testing.assert_close(found.cosines, cosines, rtol=0, atol=rel)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norms_and_cosines_are_those_of_dense_changes(dtype: torch.dtype) -> None:
    modules, uploads, dense = a_federation(dtype)
    expect(changes(modules, uploads, HEADS), dense, 1e-12)


def test_small_changes_in_bad_coordinates() -> None:
    """Clients that move a little from what they were sent: rounding of their own factors is u x condition / change."""
    for small, condition in itertools.product((1.0, 1e-3, 1e-6), (1.0, 1e3, 1e6)):
        B, A = noise((30, 5), "B"), noise((5, 20), "A")
        rows, parts = [], []
        for k in range(4):
            moved = LoRA(B + small * noise((30, 5), k, "dB"), A + small * noise((5, 20), k, "dA"))
            rows.append((moved.delta() - B @ A).flatten())
            Q = random_gauge(5, condition, k)
            parts.append(Sent(LoRA(moved.factors[0] @ Q, torch.linalg.solve(Q, moved.factors[1])), LoRA(B, A)))
        uploads = [Upload(Client(f"c{k}", 5), 1, Adapter({})) for k in range(4)]
        expect(changes([parts], uploads, {}), torch.stack(rows), max(1e-7, 1e-13 * condition / small))


def test_hard_families() -> None:
    """Deficient, badly scaled and badly conditioned factors: the dense change in float64, to what it is known to."""
    for name in families.FAMILIES:
        case = families.family(name, d_out=48, d_in=40)
        sent = [LoRA(*map(torch.from_numpy, case.uploads[c])) for c in sorted(case.uploads)]
        begun = LoRA(noise((48, 3), "b"), noise((3, 40), "a"))
        uploads = [Upload(Client(f"c{k}", lora.rank), 1, Adapter({})) for k, lora in enumerate(sent)]
        found = changes([[Sent(lora, begun) for lora in sent]], uploads, {})
        dense = torch.stack([(lora.map(Tensor.double).delta() - begun.delta()).flatten() for lora in sent])
        torch.testing.assert_close(found.norms, dense.norm(dim=1), rtol=1e-7, atol=0)
        norms = dense.norm(dim=1)
        cosines = dense @ dense.T / (norms[:, None] * norms)
        torch.testing.assert_close(found.cosines, cosines, rtol=0, atol=1e-7)


def test_one_factor_that_travels_beside_a_common_one_and_beside_a_local_one() -> None:
    A, B = noise((3, 8), "A"), noise((6, 3), "B")
    sent = [LoRA(noise((6, 3), k, "s"), None) for k in range(3)]
    uploads = [Upload(Client(f"c{k}", 3), 1, Adapter({})) for k in range(3)]
    found = changes([[Sent(s, LoRA(B, A)) for s in sent]], uploads, {})
    expect(found, torch.stack([((s.B - B) @ A).flatten() for s in sent]), 1e-12)  # type: ignore[operator]
    rows = [LoRA(None, noise((3, 8), k, "r")) for k in range(3)]
    found = changes([[Sent(s, LoRA(None, A)) for s in rows]], uploads, {})
    expect(found, torch.stack([(s.A - A).flatten() for s in rows]), 1e-12)  # type: ignore[operator]


def test_a_client_that_sends_back_what_it_got_has_not_moved() -> None:
    """In whatever coordinates: what rounding leaves of it is no change, and has no direction."""
    begun = LoRA(noise((20, 4), "B"), noise((4, 15), "A"))
    Q = random_gauge(4, 1e5, 0)
    same = LoRA(begun.factors[0] @ Q, torch.linalg.solve(Q, begun.factors[1]))
    other = begun.map(lambda t: t + 1e-3)
    uploads = [Upload(Client(f"c{k}", 4), 1, Adapter({})) for k in range(3)]
    found = changes([[Sent(same, begun), Sent(begun, begun), Sent(other, begun)]], uploads, {})
    assert found.norms[:2].tolist() == [0.0, 0.0] and found.norms[2] > 1e-3
    assert torch.equal(found.cosines, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e150, 1e-150, 1e-300])
def test_sizes_whose_squares_are_no_numbers(size: float) -> None:
    """A client of any size leaves the others' norms and cosines as they are, and its own are right."""
    modules, uploads, dense = a_federation()
    (first, *rest), second = modules[0], modules[1]
    assert first is not None
    B, A = first.sent.factors
    modules = [[Sent(LoRA(B * size, A), first.begun.map(torch.zeros_like)), *rest], second]
    found = changes(modules, uploads, HEADS)
    row = torch.cat([size * (B @ A).flatten(), dense[0, B.shape[0] * A.shape[1] :]])
    scale = row.abs().max()
    assert float(found.norms[0]) == pytest.approx(float(scale * (row / scale).norm()), rel=1e-12)
    turned = torch.cat([row[None] / scale, dense[1:]])
    norms = turned.norm(dim=1)
    torch.testing.assert_close(found.norms[1:], dense[1:].norm(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.cosines, turned @ turned.T / norms[:, None] / norms, rtol=0, atol=1e-12)


def test_the_same_bits_for_any_number_of_workers() -> None:
    modules, uploads, _ = a_federation()
    found = []
    for count in (1, 2):
        with workers(count) as each:
            found.append(changes(modules, uploads, HEADS, each))
    assert torch.equal(found[0].norms, found[1].norms) and torch.equal(found[0].cosines, found[1].cosines)


def test_more_columns_than_a_strip_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 2048 columns E is made in strips: 300 clients of rank 8."""
    loras = [LoRA(noise((6, 8), k, "B"), noise((8, 5), k, "A")) for k in range(300)]
    uploads = [Upload(Client(f"c{k}", 8), 1, Adapter({})) for k in range(300)]
    found = changes([[Sent(lora, LoRA(torch.zeros(6, 1), torch.zeros(1, 5))) for lora in loras]], uploads, {})
    expect(found, torch.stack([lora.delta().flatten() for lora in loras]), 1e-11)
