"""What clients get back from a round by hand: an adapter each, at its own ranks, in a folder of its own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlora.adapters.io import write_adapter
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.writer import AdapterSpec, pad_rank
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError, HyperparameterError
from fedlora.offline.server import ByHand


def readout_ranks(text: str, clients: Sequence[str], files: Sequence[AdapterFile]) -> dict[str, Any]:
    """Client -> its rank, or its ranks by module."""
    if text == "same":
        found: dict[str, Any] = {name: dict(file.ranks) for name, file in zip(clients, files, strict=True)}
    else:
        try:
            found = tomllib.loads(Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"--readout is 'same' or a TOML file; {text} cannot be read: {error.strerror}."
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{text} is not TOML: {error}.") from error
        most = 8192
        wrong = [n for n, r in found.items() if not isinstance(r, int) or isinstance(r, bool) or not 1 <= r <= most]
        if wrong or not found:
            raise ConfigError(
                f"{text} has lines client = rank, with whole ranks from 1 to {most}; {wrong[:1] or 'none'} is none."
            )
    folders = {name: _folder(name) for name in found}
    twice = sorted(f for f in folders.values() if list(folders.values()).count(f) > 1)
    if twice:
        raise HyperparameterError(f"two clients would have the folder {twice[0]!r}; give them names that differ more.")
    return found


def hand_out(
    hand: ByHand, ranks: Mapping[str, Any], out: Path, spec: AdapterSpec, extras: Mapping[str, Tensor]
) -> None:
    """Each client's adapter as a PEFT directory below `out`. extras: the tensors beside the pairs."""
    for client, rank in ranks.items():
        adapter = hand.readout(client, rank)
        modules = {name: pad_rank(lora, 1) for name, lora in adapter.modules.items()}
        write_adapter(out / "clients" / _folder(client), Adapter(modules, extras), spec)


def _folder(client: str) -> str:
    """A client's name as a folder's: its last part where the name is a path, and no other letters than these."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", client.rstrip("/").rpartition("/")[2]).lstrip(".")
    if not name:
        raise ConfigError(f"the client {client!r} has no name that a folder can have.")
    return name
