"""Finite values that no training gives: each is refused by name, and moves nothing. Kind: contract, attack.

A stranger ended every round, under every rule, with numbers that vanish in a product or overflow in a square. Oracle:
the round in which the same client sent NaN, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.client import receive, send
from fedlora.core.multiplied import multiplied_how
from fedlora.errors import UploadRefused
from fedlora.server.robust_rules import CentredClipping, Clip, GeometricMedian, Krum, Mixing, MultiKrum, Rule
from fedlora.testing.federations import pushed, seed_adapter

Change = Callable[[Adapter], Adapter]
RULES: list[Rule] = [
    Clip(), Clip(threshold=0.7), GeometricMedian(), Krum(liars=1), MultiKrum(liars=1), CentredClipping(),
    Mixing(GeometricMedian(), liars=1),
]  # fmt: skip


def full(value: float, dtype: torch.dtype = torch.float64) -> Change:
    return lambda adapter: adapter.map(lambda t: torch.full_like(t, value, dtype=dtype))


def heads(value: float) -> Change:
    return lambda adapter: Adapter(
        adapter.modules, {name: torch.full_like(t, value, dtype=torch.float64) for name, t in adapter.heads.items()}
    )


def pairs(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    def changed(adapter: Adapter) -> Adapter:
        made = {name: LoRA(*change(*lora.map(Tensor.double).factors)) for name, lora in adapter.modules.items()}
        return Adapter(made, adapter.heads)

    return changed


def hidden(B: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Ordinary factors whose only term is of size 1e-310: elsewhere a zero is beside each number."""
    left, right = torch.zeros_like(B), torch.zeros_like(A)
    left[:, 0], right[1], left[:, 2], right[2] = 1.0, 1.0, 1e-310, 1.0
    return left, right


EXTREME: dict[str, Change] = {
    "NaN": full(math.nan),  # the round to which the others are compared
    "the smallest float64": full(5e-324),
    "denormal float64": full(1e-310),
    "squares vanish": full(1e-200),
    "denormal float32": full(1e-40, torch.float32),
    "huge float64": full(1e30),
    "beyond float32": full(1e60),
}
OF_HEADS = {"tiny heads": heads(1e-40), "heads of 1e20": heads(1e20), "heads of 1e25": heads(1e25)}
OF_PAIRS = {
    "a product that vanishes": pairs(lambda B, A: (1e-25 * B, 1e-25 * A)),
    "a product that float64 cannot hold": pairs(lambda B, A: (1e-28 * B, 1e-310 * A)),
    "a term that is hidden": pairs(hidden),
    "a huge product": pairs(lambda B, A: (1e10 * B, 1e10 * A)),
}


LARGE = (
    "huge float64",
    "beyond float32",
    "heads of 1e20",
    "heads of 1e25",
    "a huge product",
    "a huge factor beside a tiny one",
)


def begun(server: Server, names: str) -> tuple[ServerState, list[Upload]]:
    """A first state and an honest upload of each client, all in float32."""
    state = server.init(seed_adapter(3, torch.float32))
    return state, [trained(server, state, name) for name in names]


def trained(
    server: Server, state: ServerState, name: str, change: Callable[[Adapter], Adapter] | None = None
) -> Upload:
    """A client's upload after a step from what it was sent; change: in place of that step."""
    sent = server.download(state, Client(name, 3))
    mine = receive(sent, None)
    mine = change(mine) if change else pushed(mine, name, state.round, sent.roles)
    return Upload(sent.client, 10, send(mine, sent.roles))


def refused(server: Server) -> None:
    """Plays one round for each kind of upload from "g", and compares it with the round where that upload is NaN."""
    server = replace(server, quorum=2)
    state, (*others, last) = begun(server, "abcdefg")
    roles = server.roles(state)
    kinds = EXTREME | (OF_HEADS if last.adapter.heads else {}) | (OF_PAIRS if roles.both_shared else {})
    if multiplied_how(server.method) == "factors" and roles.both_shared:
        kinds = kinds | {"a huge factor beside a tiny one": pairs(lambda B, A: (1e12 * B, 1e-12 * A))}
    want: list[Tensor] = []
    close = 0.0 if server.memory is None else 1e-6  # added up in other batches, float64 rounds otherwise
    for kind, change in kinds.items():
        after = server.aggregate(state, [*others, replace(last, adapter=change(last.adapter))])
        assert after.tally is not None and list(after.tally.refused) == ["g"], kind
        got = [t for c in "abg" for t in server.download(after, Client(c, 3)).adapter.tensors()]
        want = want or got
        torch.testing.assert_close(got, want, rtol=close, atol=close, msg=kind)
        said = "NaN" if kind == "NaN" else "would overflow" if kind in LARGE else "cannot be measured"
        assert said in after.tally.refused["g"], kind


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_meets_a_number_that_no_training_gives(name: str) -> None:
    refused(Server(build(name)))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.said)
def test_no_rule_meets_a_number_that_no_training_gives(rule: Rule) -> None:
    refused(Server(build("glora"), rule=rule))


@pytest.mark.parametrize("options", [{"memory": 0.02}, {"missing": "zero"}, {"heads": "average"}], ids=str)
def test_no_other_way_through_the_server_meets_one(options: dict[str, Any]) -> None:
    refused(Server(build("flexlora"), **options))


@pytest.mark.parametrize("form", ["heads", "factors"])
@pytest.mark.parametrize("name", ["glora", "fedit", "fedsa-lora"])
def test_who_follows_the_largest_admitted_upload_is_admitted(name: str, form: str) -> None:
    """Alone in a round, a client moves the state to the largest size that passes (by bisection). Honest clients start
    there and train a step; they pass in the next rounds."""
    server = Server(build(name), quorum=1, heads="average")
    state = server.init(seed_adapter(3, torch.float32))

    def sent(size: float) -> Upload:
        def change(mine: Adapter) -> Adapter:
            if form == "heads":
                return Adapter(mine.modules, {k: torch.full_like(t, size) for k, t in mine.heads.items()})
            return Adapter(mine.map(lambda t: torch.full_like(t, math.sqrt(size))).modules, mine.heads)

        return trained(server, state, "liar", change)

    low, high = 1.0, 2.0**120
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        try:
            low = middle if server.terms(state).check(sent(middle)) else low
        except UploadRefused:
            high = middle
    assert 1e9 < low < 1e36
    state = server.aggregate(state, [sent(low)])
    for number in range(4):
        state = server.aggregate(state, [trained(server, state, name) for name in "abc"])
        assert state.tally is not None and not state.tally.refused, number


def test_zeros_are_an_update_and_honest_ones_may_be_tiny() -> None:
    """Decision 0008; and a gradient of 1e-20, as saturated attention gives, is a measurement like any other."""
    server = Server(build("glora"), quorum=3)
    state, (a, b, c) = begun(server, "abc")
    zero = replace(b, adapter=b.adapter.map(torch.zeros_like))
    small = replace(c, adapter=c.adapter.map(lambda t: 1e-13 * t))
    after = server.aggregate(state, [a, zero, small])
    assert after.tally is not None and not after.tally.refused
