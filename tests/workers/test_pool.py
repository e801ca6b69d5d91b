"""A trainer in several processes gives the bits of the trainer itself; deaths and failures are each client's own.

The expected value is the same federation played by the trainer in this process (`OneByOne`).
"""

from __future__ import annotations

from typing import Any

import pytest

from fedlora import Kept
from fedlora.errors import ClientFailed
from fedlora.simulation import RoundRecord
from fedlora.workers import Pool
from support.federations import EQUAL, MIXED
from support.in_processes import Deadly, Raising
from support.toy_trainer import Toy, run


def digits(records: list[RoundRecord]) -> list[Any]:
    """Everything of the rounds that must agree, tensors as their bits."""
    found: list[Any] = []
    for record in records:
        uploads = {u.client.id: u.adapter for u in record.uploads}
        found.append((record.round, record.losses, record.weights, record.refused, record.bytes))
        found += [
            (client, name, kind, tensor.numpy().tobytes())
            for client, adapter in uploads.items()
            for name, lora in adapter.modules.items()
            for kind, tensor in lora.tensors().items()
        ]
    return found


@pytest.mark.quick(3)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("method", ["glora", "fedsa-lora"])
def test_any_number_of_processes_gives_the_same_bits(method: str, size: int) -> None:
    want = digits(list(run(method, EQUAL, Toy(), rounds=3)))
    with Pool(Toy(), size) as pool:
        got = digits(list(run(method, EQUAL, pool, rounds=3)))
        assert got == want
        assert digits(list(run(method, EQUAL, pool, rounds=3))) == want, "a pool is used again"


def test_who_kills_its_process_has_failed_and_the_rounds_go_on() -> None:
    with Pool(Deadly(), 2) as pool:
        for record in run("glora", MIXED, pool, rounds=2, round=Kept(quorum=1)):
            assert list(record.refused) == ["b"] and "WorkerDied" in record.refused["b"]
            assert set(record.weights) == set(MIXED) - {"b"}
        with pytest.raises(ClientFailed, match="client 'b' failed in round 1: WorkerDied"):
            list(run("glora", MIXED, pool, rounds=1))


def test_a_client_that_raises_has_failed_as_it_would_here() -> None:
    want = [record.refused for record in run("glora", MIXED, Raising(), rounds=2, round=Kept(quorum=1))]
    with Pool(Raising(), 2) as pool:
        got = [record.refused for record in run("glora", MIXED, pool, rounds=2, round=Kept(quorum=1))]
    assert want == [{"b": "ZeroDivisionError: b divides by zero"}, {"b": "Unpicklable: odd x"}]
    assert got == [want[0], {"b": "RuntimeError: Unpicklable: odd x"}]
