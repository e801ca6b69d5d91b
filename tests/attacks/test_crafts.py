"""Each attack against what it must be: dense float64 matrices, entry by entry. Kind: oracle, property.

A round of four clients of ranks 2, 3, 5 and 6 with readouts that are not zero; "b" and "d" lie. R_i is what a client
was sent, D_i what it trained, c_i = D_i - R_i. An upload of rank r can only be the best approximation of that rank of
what is wanted, which numpy's SVD of the dense matrix gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Upload
from fedlora.attacks import KINDS, Adversary, Attack, largest_z
from fedlora.core.sent import Attacked, Sent, Tampered
from fedlora.errors import HyperparameterError
from support.federations import EQUAL, MIXED, SHAPES
from support.toy_trainer import run

BYZANTINE, HONEST = ("b", "d"), ("a", "c")


class Watching:
    """An adversary that changes nothing and remembers the round that it saw last."""

    def __init__(self) -> None:
        self.sent: Sequence[Sent] = ()

    def __call__(self, sent: Sequence[Sent], round: int) -> Tampered:
        self.sent = sent
        return Tampered([s.upload for s in sent], Attacked("nothing", {}))


def seen(method: str = "glora", rounds: int = 3, ranks: dict[str, int] = MIXED, **options: Any) -> dict[str, Sent]:
    """Client -> what it sent in the last of these rounds, beside what it began from."""
    watching = Watching()
    list(run(method, ranks, rounds=rounds, adversary=watching, **{"dtype": torch.float64, **options}))
    return {s.upload.client.id: s for s in watching.sent}


def dense(adapter: Adapter, module: str) -> Tensor:
    return adapter.modules[module].map(lambda t: t.double()).delta()


def change(sent: Sent, module: str) -> Tensor:
    return dense(sent.upload.adapter, module) - dense(sent.begun, module)


def cut(wanted: Tensor, rank: int) -> tuple[Tensor, float]:
    """The best approximation of that rank, and what it leaves out."""
    U, s, Vh = np.linalg.svd(wanted.numpy(), full_matrices=False)
    return torch.from_numpy((U[:, :rank] * s[:rank]) @ Vh[:rank]), float(np.linalg.norm(s[rank:]))


def wanted(kind: str, honest: Sequence[Tensor], own: Tensor, strength: float) -> Tensor:
    """The change that the attack claims, by its formula, of what the honest and the client itself moved by."""
    others = torch.stack([*honest])
    return {
        "sign-flip": -strength * own,
        "scale": strength * own,
        "alie": others.mean(0) - strength * others.std(0, correction=0),
        "inner-product": -strength * others.mean(0),
    }[kind]


FORMULAS = [("sign-flip", 1.0), ("sign-flip", 2.5), ("scale", 10.0), ("alie", 1.5), ("inner-product", 0.5)]


@pytest.mark.parametrize(("kind", "strength"), FORMULAS)
def test_an_attack_on_products_is_its_formula_cut_to_the_rank(kind: Any, strength: float) -> None:
    """And the number `left_out` is what that cut left out of the change, over all modules and heads together."""
    sent = seen()
    tampered = Adversary(Attack(kind, strength), BYZANTINE)(list(sent.values()), 2)
    for upload in tampered.uploads:
        name = upload.client.id
        if name in HONEST:
            assert upload is sent[name].upload
            continue
        left, whole = [], []
        for module in SHAPES:
            asked = wanted(kind, [change(sent[h], module) for h in HONEST], change(sent[name], module), strength)
            best, rest = cut(dense(sent[name].begun, module) + asked, MIXED[name])
            assert upload.adapter.modules[module].rank == MIXED[name]
            torch.testing.assert_close(dense(upload.adapter, module), best, rtol=1e-9, atol=1e-9)
            left.append(rest)
            whole.append(float(asked.norm()))
        for head, value in upload.adapter.heads.items():
            moved = {c: s.upload.adapter.heads[head] - s.begun.heads[head] for c, s in sent.items()}
            asked = wanted(kind, [moved[h] for h in HONEST], moved[name], strength)
            torch.testing.assert_close(value, sent[name].begun.heads[head] + asked, rtol=1e-12, atol=1e-12)
            whole.append(float(asked.norm()))
        told = tampered.attacked.clients[name]
        assert told["left_out"] == pytest.approx(math.hypot(*left) / math.hypot(*whole), rel=1e-8, abs=1e-8)
        assert math.hypot(*left) > 0  # or this case asks nothing


@pytest.mark.parametrize("method", ["rolora", "fedsa-lora"])
def test_in_a_round_of_a_it_is_on_the_rows_of_a(method: str) -> None:
    """RoLoRA's second round freezes B; FedSA-LoRA never sends it. Rows that a client lacks are zeros in the mean."""
    ranks = MIXED if method == "rolora" else EQUAL
    sent = seen(method, rounds=2, ranks=ranks)

    def rows(adapter: Adapter, module: str) -> Tensor:
        A = adapter.modules[module].tensors()["A"]
        return torch.nn.functional.pad(A, (0, 0, 0, max(ranks.values()) - len(A)))

    for upload in Adversary(Attack("inner-product", 3.0), BYZANTINE)(list(sent.values()), 1).uploads:
        for module, lora in upload.adapter.modules.items():
            assert list(lora.tensors()) == ["A"]
            moved = [rows(sent[h].upload.adapter, module) - rows(sent[h].begun, module) for h in HONEST]
            if (name := upload.client.id) in BYZANTINE:
                want = rows(sent[name].begun, module) - 3.0 * torch.stack(moved).mean(0)
                torch.testing.assert_close(lora.A, want[: ranks[name]], rtol=1e-12, atol=1e-12)


# ---- ALIE's z --------------------------------------------------------------------------------------------------------


def test_the_largest_z_is_the_papers() -> None:
    """Shares (n - m - s) / (n - m) worked out by hand; phi is the standard normal's distribution."""
    for n, m, share in ((50, 24, 24 / 26), (50, 12, 24 / 38), (15, 3, 7 / 12), (25, 5, 12 / 20)):
        assert NormalDist().cdf(largest_z(n, m)) == pytest.approx(share, abs=1e-12)
    for n, m in ((4, 1), (3, 1), (2, 1), (5, 4), (3, 3)):  # else negative, or infinite with a byzantine majority
        assert 0 <= largest_z(n, m) < 3


# ---- free riders -----------------------------------------------------------------------------------------------------


def test_a_free_rider_sends_its_readout_bit_for_bit() -> None:
    sent = seen(dtype=torch.float32)
    tampered = Adversary(Attack("free-rider"), BYZANTINE)(list(sent.values()), 2)
    for upload in tampered.uploads:
        if upload.client.id in BYZANTINE:
            begun = sent[upload.client.id].begun
            for module, lora in upload.adapter.modules.items():
                assert all(torch.equal(a, b) for a, b in zip(lora.factors, begun.modules[module].factors, strict=True))
            assert all(torch.equal(head, begun.heads[name]) for name, head in upload.adapter.heads.items())
    assert all(told["change"] < 1e-6 < told["honest"] for told in tampered.attacked.clients.values())


def test_a_free_riders_noise_is_as_large_as_an_honest_change() -> None:
    """Module by module and head by head: the median of the honest norms. Two byzantine clients and two rounds have
    other noise."""
    sent = seen()
    attack = Adversary(Attack("free-rider", noise=True), BYZANTINE)
    made = {u.client.id: u for u in attack(list(sent.values()), 2).uploads}
    for module in SHAPES:
        size = median(float(change(sent[h], module).norm()) for h in HONEST)
        for name in BYZANTINE:
            noise = dense(made[name].adapter, module) - dense(sent[name].begun, module)
            assert float(noise.norm()) == pytest.approx(size, rel=1e-9)
            cosine = float((noise * change(sent[name], module)).sum()) / size / float(change(sent[name], module).norm())
            assert abs(cosine) < 0.5
    again = {u.client.id: u for u in attack(list(sent.values()), 3).uploads}
    assert not torch.equal(dense(again["b"].adapter, "attn.q"), dense(made["b"].adapter, "attn.q"))


# ---- directions and coordinates --------------------------------------------------------------------------------------


def spanned(sent: dict[str, Sent], module: str) -> Tensor:
    return torch.cat([x.modules[module].factors[0] for s in sent.values() for x in (s.upload.adapter, s.begun)], dim=1)


def test_inserted_directions_are_new_tiny_and_the_same_for_all_liars() -> None:
    """In the first round all slots are free: the change is strength x the median honest norm / sqrt 2, orthogonal to
    every column of every upload."""
    sent = seen(rounds=1)
    made = {
        u.client.id: u for u in Adversary(Attack("subspace-insertion", 0.01), BYZANTINE)(list(sent.values()), 0).uploads
    }
    for module in SHAPES:
        size = 0.01 * median(float(change(sent[h], module).norm()) for h in HONEST)
        new = {name: dense(made[name].adapter, module) - dense(sent[name].begun, module) for name in BYZANTINE}
        for name in BYZANTINE:
            got = float(new[name].norm())
            assert 0.2 * size < got <= size
            assert float((spanned(sent, module).T @ new[name]).norm()) < 1e-9 * got * float(
                spanned(sent, module).norm()
            )
        U_b, U_d = (torch.linalg.svd(new[name]).U[:, : min(MIXED[name], _room(module, sent))] for name in BYZANTINE)
        assert float((U_b - U_d @ (U_d.T @ U_b)).norm()) < 1e-6, "what b inserts is among what d inserts"


def _room(module: str, sent: dict[str, Sent]) -> int:
    return SHAPES[module][0] - int(torch.linalg.matrix_rank(spanned(sent, module)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_a_gauge_attack_changes_the_factors_and_not_the_product(dtype: torch.dtype, tolerance: float) -> None:
    """Condition 1e6 would cost float32 six of its seven digits, were Q not an orthogonal matrix and powers of two."""
    sent = seen("padded-average", dtype=dtype)
    for upload in Adversary(Attack("gauge", 1e6), BYZANTINE)(list(sent.values()), 2).uploads:
        if upload.client.id not in BYZANTINE:
            continue
        before = sent[upload.client.id].upload.adapter
        for module, lora in upload.adapter.modules.items():
            was = before.modules[module]
            gap = float((dense(upload.adapter, module) - dense(before, module)).norm()) / was.norm()
            assert gap < tolerance and lora.B is not None and was.B is not None and lora.B.dtype == dtype
            Q = torch.linalg.lstsq(was.B.double(), lora.B.double()).solution
            assert 2.0**18 < float(torch.linalg.cond(Q)) < 2.0**22
            assert float((lora.B - was.B).norm()) > 10 * float(was.B.norm())


# ---- what is no attack -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_diverged_or_abstains_teaches_nobody_and_stays_as_it_is(kind: Any) -> None:
    """NaN of an honest client reaches no byzantine client; a byzantine client's own NaN and its abstention arrive as
    they were."""
    sent = seen()
    broken = replace(
        sent["c"], upload=replace(sent["c"].upload, adapter=sent["c"].upload.adapter.map(lambda t: t * math.nan))
    )
    silent = replace(sent["d"], upload=replace(sent["d"].upload, num_examples=0))
    tampered = Adversary(Attack(kind), BYZANTINE)([sent["a"], sent["b"], broken, silent], 2)
    assert tampered.uploads[2] is broken.upload and tampered.uploads[3] is silent.upload
    assert list(tampered.attacked.clients) == ["b"]
    assert all(bool(torch.isfinite(t).all()) for x in tampered.uploads[1].adapter.modules.values() for t in x.factors)
    alone = Adversary(Attack(kind), BYZANTINE)([replace(sent["b"], upload=broken_of(sent["b"].upload))], 2)
    assert alone.attacked.clients == {}


def broken_of(upload: Upload) -> Upload:
    return replace(upload, adapter=upload.adapter.map(lambda t: t * math.inf))


def test_an_honest_client_that_lacks_a_module_has_no_say_in_it() -> None:
    """The mean of a module is over those who hold it; what no honest client holds stays as it was trained."""
    sent = seen()

    def without(s: Sent, module: str) -> Sent:
        kept = {name: lora for name, lora in s.upload.adapter.modules.items() if name != module}
        return replace(s, upload=replace(s.upload, adapter=Adapter(kept, s.upload.adapter.heads)))

    only_a = [sent["a"], sent["d"], without(sent["c"], "attn.q")]
    made = {u.client.id: u for u in Adversary(Attack("inner-product", 1.0), ("d",))(only_a, 2).uploads}
    expected, _ = cut(dense(sent["d"].begun, "attn.q") - change(sent["a"], "attn.q"), MIXED["d"])
    torch.testing.assert_close(dense(made["d"].adapter, "attn.q"), expected, rtol=1e-9, atol=1e-9)
    nobody = [without(sent["a"], "attn.q"), sent["d"], without(sent["c"], "attn.q")]
    made = {u.client.id: u for u in Adversary(Attack("inner-product", 1.0), ("d",))(nobody, 2).uploads}
    torch.testing.assert_close(dense(made["d"].adapter, "attn.q"), dense(sent["d"].upload.adapter, "attn.q"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "nonsense"}, "must be one of"),
        ({"kind": "label-flip", "strength": 2.0}, "has no strength"),
        ({"kind": "scale", "strength": math.inf}, "finite number > 0"),
        ({"kind": "scale", "strength": math.nan}, "finite number > 0"),
        ({"kind": "gauge", "strength": 0.5}, ">= 1"),
        ({"kind": "scale", "noise": True}, "noise is for a free-rider"),
    ],
)
def test_what_is_no_attack_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HyperparameterError, match=words):
        Attack(**options)


def test_attacks_on_pairs_refuse_rounds_of_one_factor() -> None:
    sent = list(seen("ffa-lora", rounds=1).values())
    for kind in ("gauge", "subspace-insertion"):
        with pytest.raises(HyperparameterError, match="only one factor travels"):
            Adversary(Attack(kind), BYZANTINE)(sent, 0)
    with pytest.raises(HyperparameterError, match="without clients"):
        Adversary(Attack("gauge"), ())
