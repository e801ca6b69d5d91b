"""The place of defences: what they refuse does not count, is named, and can cost the quorum. Kind: contract.

Expected values are those of the same server on the uploads that a defence leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from fedlora import Server, ServerState, Upload, build
from fedlora.errors import HyperparameterError, QuorumNotMet
from fedlora.server.defences import Verdict
from fedlora.server.sketched_round import Sketch
from support.federations import EQUAL, FULL, SHAPES, rounds


def without(*names: str):  # type: ignore[no-untyped-def]
    def defence(state: ServerState, uploads: Sequence[Upload], counts: Mapping[str, float]) -> Verdict:
        left = [u for u in uploads if u.client.id not in names]
        gone = {c: "too far" for c in counts if c in names}
        return Verdict(left, {u.client.id: counts[u.client.id] for u in left}, gone)

    return defence


def test_what_a_defence_refuses_does_not_count_and_is_named() -> None:
    plain = Server(build("glora"))
    played = next(rounds(plain, EQUAL, FULL))
    kept = [u for u in played.uploads if u.client.id not in ("b", "d")]
    want = plain.aggregate(played.before, kept)
    server = Server(build("glora"), quorum=2, defences=(without("b"), without("d")))
    got = server.aggregate(played.before, played.uploads)
    assert got.tally is not None and want.tally is not None
    assert dict(got.tally.weights) == dict(want.tally.weights)
    assert got.tally.refused == {"b": "too far", "d": "too far"}
    for module in SHAPES:
        assert torch.equal(server.global_update(got)[module].delta(), plain.global_update(want)[module].delta())
    for name, head in want.heads.items():
        assert torch.equal(got.heads[name], head)


def test_it_can_change_what_an_upload_counts_for() -> None:
    def alike(state: ServerState, uploads: Sequence[Upload], counts: Mapping[str, float]) -> Verdict:
        return Verdict(uploads, dict.fromkeys(counts, 1.0))

    played = next(rounds(Server(build("glora")), EQUAL, FULL))
    got = Server(build("glora"), defences=(alike,)).aggregate(played.before, played.uploads)
    want = Server(build("glora"), weighting="uniform").aggregate(played.before, played.uploads)
    assert got.tally is not None and want.tally is not None and got.tally.weights == want.tally.weights
    for name, head in want.heads.items():
        torch.testing.assert_close(got.heads[name], head)


def test_the_quorum_is_of_those_who_are_left() -> None:
    server = Server(build("glora"), quorum=3, defences=(without("a", "b"),))
    played = next(rounds(Server(build("glora")), EQUAL, FULL))
    with pytest.raises(QuorumNotMet, match=r"2 usable uploads, .*quorum .*3.*a: too far"):
        server.aggregate(played.before, played.uploads)


def test_a_client_that_a_defence_forgets_is_no_silence() -> None:
    def forgetful(state: ServerState, uploads: Sequence[Upload], counts: Mapping[str, float]) -> Verdict:
        return Verdict(uploads[1:], {u.client.id: 1.0 for u in uploads[1:]})

    played = next(rounds(Server(build("glora")), EQUAL, FULL))
    with pytest.raises(HyperparameterError, match="every client once"):
        Server(build("glora"), defences=(forgetful,)).aggregate(played.before, played.uploads)


@pytest.mark.parametrize("options", [{"memory": 10.0}, {"sketch": Sketch(4)}], ids=str)
def test_where_uploads_are_not_there_together_there_is_no_defence(options: dict) -> None:
    with pytest.raises(HyperparameterError, match="leave out one of"):
        Server(build("glora"), defences=(without("a"),), **options)
