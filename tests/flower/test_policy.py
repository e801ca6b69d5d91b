"""Policy files, and the limits in them. Kind of evidence: contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms.policy import Policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "clients: Field required"),
        ("[clients]\n", "nobody could take part"),
        ("[clients]\na = 0\n", "whole number from 1"),
        ("[clients]\na = {q = true}\n", "whole number from 1"),
        ("colour = 1\n[clients]\na = 8\n", "colour: Unexpected keyword argument"),
        ("[clients\n", "is not TOML"),
    ],
)
def test_a_bad_policy_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        Policy.read(tmp_path / "policy.toml")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "4", True])
def test_an_uploads_limit_is_a_positive_number(value: object) -> None:
    with pytest.raises(ValidationError, match="max_upload_mb"):
        Policy({"a": 1}, max_upload_mb=value)  # type: ignore[arg-type]
