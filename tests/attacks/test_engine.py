"""Byzantine clients in the in-process engine: who sees what, the same bits again, what is refused. Kind: property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from fedlora import Adapter
from fedlora.attacks import KINDS, Adversary, Attack, choose_attackers
from fedlora.core.sent import Attacked, Sent, Tampered
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError
from fedlora.server.kept import Kept
from fedlora.simulation import RoundRecord
from support.federations import EQUAL, MIXED
from support.toy_trainer import Toy, diverging, run

BYZANTINE = Adversary(Attack("sign-flip"), ("b", "d"))


def same(one: RoundRecord, other: RoundRecord) -> bool:
    """Uploads, weights and server to the bit."""

    def tensors(record: RoundRecord) -> list[torch.Tensor]:
        return [t for u in record.uploads for x in u.adapter.modules.values() for t in x.factors]

    return one.weights == other.weights and all(
        torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True)
    )


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_attacked_federation_is_the_same_bits_again_and_after_a_stop(kind: Any) -> None:
    """All is a function of the round's uploads, the round and the seed."""
    attack = Adversary(Attack(kind), ("b", "d"), seed=4)
    whole, again = (list(run("glora", MIXED, adversary=attack)) for _ in range(2))
    assert all(same(a, b) for a, b in zip(whole, again, strict=True))
    rest = list(run("glora", MIXED, adversary=attack, state=whole[0].state))
    assert all(same(a, b) for a, b in zip(whole[1:], rest, strict=True))
    assert [r.attacked for r in whole[1:]] == [r.attacked for r in rest]


def test_the_liars_know_all_uploads_and_what_everybody_began_from() -> None:
    """Also where a trainer trains what it is given in place."""

    class InPlace(Toy):
        def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
            made = super().train(download, adapter, position)
            for name, lora in adapter.modules.items():
                for t, new in zip(lora.factors, made.adapter.modules[name].factors, strict=True):
                    t.copy_(new)
            return replace(made, adapter=adapter)

    seen: list[tuple[int, Sequence[Sent]]] = []

    def spy(sent: Sequence[Sent], round: int) -> Tampered:
        seen.append((round, sent))
        return Tampered([s.upload for s in sent], Attacked("nothing", {}))

    records = list(run("glora", EQUAL, InPlace(), adversary=spy, rounds=2))
    assert [round for round, _ in seen] == [0, 1]
    assert [[s.upload.client.id for s in sent] for _, sent in seen] == [["a", "b", "c", "d"]] * 2
    first = seen[0][1]
    assert all(not bool(lora.factors[0].any()) for s in first for lora in s.begun.modules.values()), "B = 0 at first"
    assert all(bool(lora.factors[0].any()) for s in first for lora in s.upload.adapter.modules.values())
    assert records[0].attacked == Attacked("nothing", {})


def test_a_diverged_liar_is_refused_as_anybody() -> None:
    records = list(
        run("glora", EQUAL, diverging("b", 1), adversary=BYZANTINE, round=Kept(quorum=2), dtype=torch.float64)
    )
    assert [list(r.refused) for r in records] == [[], ["b"], []]
    assert [sorted(r.attacked.clients) for r in records if r.attacked] == [["b", "d"], ["d"], ["b", "d"]]


# ---- who -------------------------------------------------------------------------------------------------------------


def test_the_chosen_are_a_function_of_names_and_seed_and_nested_in_the_share() -> None:
    names = [f"site-{k:02d}" for k in range(1, 16)]
    sets = [choose_attackers(names, share, seed=7) for share in (0.07, 0.2, 0.34, 0.4)]
    assert [len(s) for s in sets] == [1, 3, 5, 6]
    assert all(set(a) < set(b) for a, b in pairwise(sets))
    assert choose_attackers(names, 0.2, seed=7) == sets[1] == tuple(n for n in names if n in sets[1])
    assert set(choose_attackers(names[::-1], 0.2, seed=7)) == set(sets[1])
    drawn = [choose_attackers(names, 0.2, seed=seed) for seed in range(40)]
    assert len(set(drawn)) > 30
    assert len({name for chosen in drawn for name in chosen}) == 15
    assert len(choose_attackers([str(k) for k in range(100)], 0.29, seed=0)) == 29, "28.999999999999996 in binary"


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "above 0 and below 1"), (1.0, "above 0 and below 1"), (0.1, "less than one client")]
)
def test_a_share_of_nobody_is_refused(share: float, words: str) -> None:
    with pytest.raises(HyperparameterError, match=words):
        choose_attackers(["a", "b", "c"], share, seed=0)
