"""Certificates of any name, date and authority; but for these they are those of `fedlora flower init`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlora.flower.terms import certificates
from fedlora.flower.terms.certificates import Signer


def authority(name: str = "a CA") -> Signer:
    return certificates._authority(name)


def pem(by: Signer) -> str:
    """ca.crt."""
    return certificates._pem(by[0]).decode()


def server_files(
    folder: Path, by: Signer, names: Sequence[str], begin: float = -1, end: float = 30
) -> tuple[Path, Path]:
    """(server.crt, server.key) for those names, from `begin` to `end` days from now, and ca.crt beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_text(pem(by))

    class Then(datetime.datetime):
        @classmethod
        def now(cls, zone: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(zone) + datetime.timedelta(days=begin)

    with pytest.MonkeyPatch.context() as patched:
        clock = SimpleNamespace(datetime=Then, UTC=datetime.UTC, timedelta=datetime.timedelta)
        patched.setattr(certificates, "datetime", clock)
        certificates._write_server(folder, by, names, end - begin)  # type: ignore[arg-type]
    return folder / "server.crt", folder / "server.key"
