"""`admit` and `serve` may register one key at the same moment. Kind: *failure*."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.flower.serving import database, superlink


@pytest.mark.parametrize("who", ["acme", "mallory"])
def test_a_key_that_another_has_registered_meanwhile_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The SuperLink says "already in use" to the second: fine where the key is under that name, an error elsewhere."""
    known: list[Any] = []

    class Raced(superlink.SuperLink):
        def __init__(self) -> None:
            self.folder = SimpleNamespace(database=tmp_path / "superlink.db")  # type: ignore[assignment]

        def nodes(self) -> list[Any]:
            return list(known)

        def _ask(self, call: str, request: str, **fields: Any) -> Any:
            known.append(SimpleNamespace(name=who, key=b"key", id=1, status="registered"))
            raise superlink.SuperLinkError("the SuperLink refuses: Public key already in use")

    monkeypatch.setattr(superlink, "public_key", lambda path: b"key")
    monkeypatch.setattr(database, "forget_unregistered", lambda path, key: None)
    if who == "acme":
        Raced().keep_keys({"acme": tmp_path / "acme.pub"})
    else:
        with pytest.raises(superlink.SuperLinkError, match="already in use"):
            Raced().keep_keys({"acme": tmp_path / "acme.pub"})
