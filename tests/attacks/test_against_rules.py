"""Attacks beside robust rules: both together in a round, on clients who agree on where to go. Kind: property.

The bound is no guarantee of a rule: it says that attack and rule meet in the same space, so that what a rule can see it
does see.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlora import Adapter, Client, LoRA, Server, build
from fedlora.analysis.audit import relative_difference
from fedlora.attacks import Adversary, Attack
from fedlora.core.trainer import Trained
from fedlora.seeds import derive_seed
from fedlora.server.kept import Kept
from fedlora.server.rules import GeometricMedian, MultiKrum
from fedlora.simulation import simulate, start

CLIENTS = [Client(f"site-{k}", 3) for k in range(9)]
BYZANTINE = ("site-1", "site-4")
SEED = Adapter({"q": LoRA(torch.zeros(20, 3, dtype=torch.float64),
                          torch.linalg.qr(torch.eye(14, 3, dtype=torch.float64)).Q.mT.contiguous())})  # fmt: skip


class Agreeing:
    """B moves by a common matrix and a tenth of noise: honest changes are near one another."""

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        def moved(t: torch.Tensor, *seed: str) -> torch.Tensor:
            def draw(*words: str) -> torch.Tensor:
                generator = torch.Generator().manual_seed(derive_seed("agreeing", *words))
                return torch.randn(t.shape, generator=generator, dtype=t.dtype)

            return t + draw("common") + 0.1 * draw("own", download.client.id, *seed)

        B, A = adapter.modules["q"].factors
        return Trained(Adapter({"q": LoRA(moved(B), A)}), 10, 0.5, position + 1)


def model(rule: Any, adversary: Adversary | None, clients: list[Client] = CLIENTS) -> Any:
    server = Server(build("glora"), round=Kept(rule, weighting="uniform"))
    record = next(simulate(server, clients, Agreeing(), start(server, SEED), rounds=1, adversary=adversary))
    return server.global_update(record.state.server)


@pytest.mark.parametrize("rule", [GeometricMedian(), MultiKrum(2)], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "attack", [Attack("sign-flip"), Attack("scale", 20.0), Attack("inner-product", 4.0)], ids=lambda a: a.kind
)
def test_a_rule_undoes_what_stands_out(rule: Any, attack: Attack) -> None:
    """Distance to the mean of the honest alone, against the plain mean's under the same attack."""
    honest = model(None, None, [c for c in CLIENTS if c.id not in BYZANTINE])
    plain, robust = (relative_difference(model(r, Adversary(attack, BYZANTINE)), honest) for r in (None, rule))
    assert plain > 0.3 and robust < plain / 4


@pytest.mark.parametrize("rule", [GeometricMedian(), MultiKrum(2)], ids=lambda rule: rule.name)
def test_a_gauge_attack_is_nothing_to_a_rule_of_products(rule: Any) -> None:
    """Each byzantine client's update is what it would have been, so that weights and model are too."""
    assert relative_difference(model(rule, Adversary(Attack("gauge"), BYZANTINE)), model(rule, None)) < 1e-8
