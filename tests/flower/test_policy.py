"""How much a client may claim: shares of the weight, and policy files. Kinds of evidence: property, contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms.policy import Policy
from fedlora.server.closing import held_to_share


@pytest.mark.parametrize("share", [0.2, 0.34, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "claimed", [[1, 1, 1, 1, 1, 1], [1, 2, 3, 1000, 5, 6], [1e9, 1e9, 1, 2, 3, 4], [7, 7, 7, 7, 7, 1e12]]
)
def test_no_share_is_larger_than_allowed(share: float, claimed: list[float]) -> None:
    """Property; and counts that are within bounds are left alone, the order of counts is kept."""
    counts = held_to_share({str(k): n for k, n in enumerate(claimed)}, share)
    total = sum(counts.values())
    assert max(counts.values()) <= share * total * (1 + 1e-12)
    assert all(counts[str(k)] <= n for k, n in enumerate(claimed))
    assert all((counts[str(i)] <= counts[str(j)]) for i in range(6) for j in range(6) if claimed[i] <= claimed[j])
    if max(claimed) <= share * sum(claimed):
        assert counts == {str(k): n for k, n in enumerate(claimed)}


def test_a_share_that_so_few_cannot_keep_makes_all_alike() -> None:
    assert held_to_share({"a": 5, "b": 9, "c": 0}, 0.3) == {"a": 1, "b": 1, "c": 0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "clients: Field required"),
        ("[clients]\n", "nobody could take part"),
        ("[clients]\na = 0\n", "whole number from 1"),
        ("[clients]\na = {q = true}\n", "whole number from 1"),
        ("colour = 1\n[clients]\na = 8\n", "colour: Unexpected keyword argument"),
        ("max_weight_share = 0\n[clients]\na = 8\n", "max_weight_share: Input should be greater than 0"),
        ("[clients\n", "is not TOML"),
    ],
)
def test_a_bad_policy_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        Policy.read(tmp_path / "policy.toml")


@pytest.mark.parametrize(("sites", "share"), [(1, 1.0), (2, 1.0), (3, 2 / 3), (4, 0.5), (40, 0.5)])
def test_without_a_word_nobody_of_four_or_more_has_more_than_half(sites: int, share: float) -> None:
    """max(0.5, 2 / sites): two honest sites of three outweigh a third one, whatever it claims."""
    policy = Policy({f"s{k}": 1 for k in range(sites)})
    assert policy.share == pytest.approx(share)
    counts = held_to_share({f"s{k}": 1e8 if k == 0 else 10.0 for k in range(sites)}, policy.share)
    assert counts["s0"] / sum(counts.values()) <= share * (1 + 1e-9)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "4", True])
def test_an_uploads_limit_is_a_positive_number(value: object) -> None:
    with pytest.raises(ValidationError, match="max_upload_mb"):
        Policy({"a": 1}, max_upload_mb=value)  # type: ignore[arg-type]
