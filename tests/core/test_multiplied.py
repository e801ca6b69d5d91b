"""Updates with changes that count m times: the sum that a method gets, what is handed on as it is, what is nobody's.

Kinds of evidence: *oracle* (dense float64 sums), *attack* (weights that cancel, columns that only look alike).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.core.method import NOBODY, Update
from fedlora.core.multiplied import How, multiplied
from fedlora.linalg import distinct
from support.federations import noise

STATE = LoRA(noise((20, 9), "B"), noise((9, 15), "A"))  # the server's columns: every readout is some of them


def readout(*columns: int) -> LoRA:
    at = torch.tensor(columns)
    return LoRA(STATE.factors[0][:, at], STATE.factors[1][at])


def update(name: str, begun: LoRA, weight: float) -> Update:
    moved = begun.map(lambda t: t + 0.1 * noise(t.shape, name))
    return Update(name, weight, begun.rank, moved, torch.float64)


def dense(updates: list[Update]) -> Tensor:
    return torch.stack([u.weight * u.lora.delta() for u in updates]).sum(dim=0)


BEGUN = [readout(0, 1, 2), readout(0, 1, 4), readout(0, 1, 2, 7), readout(0, 8)]
UPDATES = [update(name, R, p) for name, R, p in zip("abcd", BEGUN, (0.1, 0.2, 0.3, 0.4), strict=True)]


@pytest.mark.parametrize("how", ["products", "terms"])
@pytest.mark.parametrize("m", [(0.0, 0.3, 1.0, 2.5), (0.0, 0.0, 0.0, 0.0), (2.0, 0.5, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0)])
def test_the_sum_is_exact(how: How, m: tuple[float, ...]) -> None:
    """sum p_i (R_i + m_i (D_i - R_i)) in float64, to rounding."""
    got = dense(multiplied(how, UPDATES, BEGUN, m))
    want = torch.stack([
        u.weight * (R.delta() + k * (u.lora.delta() - R.delta())) for u, R, k in zip(UPDATES, BEGUN, m, strict=True)
    ]).sum(dim=0)  # fmt: skip
    assert float((got - want).norm() / want.norm()) < 1e-14


def test_what_clients_were_sent_is_one_update_of_each_column_once() -> None:
    """Columns 0, 1, 4, 8 and 2 of a, b and d, whose m is not 1; c's column 7 is not among them."""
    *own, rest = multiplied("products", UPDATES, BEGUN, (0.0, 0.3, 1.0, 2.5))
    assert [u.client for u in own] == ["b", "c", "d"], "who counts for nothing sends nothing"
    assert [u.weight for u in own] == pytest.approx([0.06, 0.3, 1.0]) and own[1].lora is UPDATES[2].lora
    assert (rest.client, rest.weight, rest.rank) == (NOBODY, 1.0, 5)


def test_columns_whose_weights_cancel_are_none() -> None:
    """Column 0 went to all, and 0.1 (1 - 1.2) + 0.2 (1 - 0.9) is rounding."""
    begun, m = [readout(0, 1), readout(0, 2)], (1.2, 0.9)
    updates = [update("a", begun[0], 0.1), update("b", begun[1], 0.2)]
    *_, rest = multiplied("products", updates, begun, m)
    assert rest.rank == 2 and not any(torch.allclose(b, STATE.factors[0][:, 0]) for b in rest.B.T)
    fresh = [replace_B(R) for R in begun]
    assert [u.client for u in multiplied("products", updates, fresh, m)] == ["a", "b"], "B = 0 adds nothing"


def replace_B(lora: LoRA) -> LoRA:
    return LoRA(torch.zeros_like(lora.factors[0]), lora.factors[1])


def test_columns_that_only_look_alike_are_two() -> None:
    """Of 1000 rows some are looked at first: one that differs elsewhere stays, and so does one that is the same B
    beside another A. Some entries of both sides are looked at: columns that begin alike are still found when they come
    again."""
    left, right = noise((1000, 3), "l"), noise((3, 1000), "r")
    near, other = left.clone(), right.clone()
    near[7, 0] += 1e-15
    other[1, 11] += 1e-15
    at, place = distinct(torch.cat([left, near], dim=1), torch.cat([right, other]))
    assert at.tolist() == [0, 1, 2, 3, 4] and place.tolist() == [0, 1, 2, 3, 4, 2]
    assert [t.tolist() for t in distinct(left[:, :0], right[:0])] == [[], []]
    alike = torch.cat([right[:1, :1].expand(2, 1), right[:2, 1:]], dim=1)
    again = distinct(left[:, [0, 0, 0, 0]], torch.cat([alike, alike]))
    assert [t.tolist() for t in again] == [[0, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["glora", "svd", "flexlora", "flora"])
def test_a_method_takes_a_round_in_which_nothing_but_readouts_counts(name: str, dtype: torch.dtype) -> None:
    """Before the first round these are zero, and after it the server's own."""
    server = Server(build(name, **({"energy": 1.0} if name == "svd" else {})))
    state = server.init(Adapter({"q": LoRA(torch.zeros(20, 4, dtype=dtype), noise((4, 15), "A", dtype=dtype))}))
    for _ in range(2):
        down = [server.download(state, Client(c, 4)).adapter.modules["q"] for c in "ab"]
        updates = [replace(update(c, R, 0.5), stored=dtype) for c, R in zip("ab", down, strict=True)]
        updates = [replace(u, lora=u.lora.map(lambda t: t.to(dtype))) for u in updates]
        after = server.method.aggregate(state.modules["q"], multiplied("products", updates, down, (0.0, 0.0)))
        base = server.download(state, Client("a", 4)).base_delta
        want = torch.stack([R.delta() for R in down]).mean(dim=0) + (base["q"].delta() if "q" in base else 0)
        torch.testing.assert_close(server.method.effective(after).delta(), want, rtol=1e-5, atol=1e-6)
        state = server.aggregate(state, [Upload(Client(u.client, 4), 1, Adapter({"q": u.lora})) for u in updates])


def test_glora_remembers_of_who_counts_for_nothing_what_it_did_and_of_nobody_nothing() -> None:
    method = build("glora")
    before = method.aggregate(method.init(STATE, 0), UPDATES)
    after = method.aggregate(before, multiplied("products", UPDATES, BEGUN, (0.0, 0.3, 1.0, 2.5)))
    assert set(after.history) == set("abcd") and set(after.cut.client_ranks) == set(after.alignment) == set("bcd")
    assert after.history["a"] == before.history["a"] and after.history["b"][-1].round == 2
    assert after.cut.total_rank == 9 and after.cut.captured == pytest.approx(1.0, abs=1e-12)
