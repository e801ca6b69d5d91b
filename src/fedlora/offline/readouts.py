"""The adapters that clients get back from a round by hand: one each, at its own ranks, in its own folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlora.adapters.io import write_adapter
from fedlora.adapters.labels import write_labels
from fedlora.adapters.merge_card import client_card
from fedlora.adapters.merge_report import ClientReport
from fedlora.adapters.merge_request import Parts
from fedlora.adapters.narrowing import narrowed_pair
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import combine
from fedlora.adapters.writer import MERGE, pad_rank
from fedlora.core.echo import quoted
from fedlora.core.lora import Adapter, LoRA, stack
from fedlora.errors import ConfigError, HyperparameterError, repeated
from fedlora.given_files import read_toml
from fedlora.offline.server import ByHand


def readout_ranks(
    text: str, clients: Sequence[str], files: Sequence[AdapterFile], known: Mapping[str, Mapping[str, int]]
) -> tuple[dict[str, Any], list[str]]:
    """Client -> its rank, or its ranks by module; and notes on clients that a file leaves out or adds.

    known: clients that took part in an earlier round -> their ranks then.
    """
    notes, absent = [], [name for name in known if name not in clients]
    if text == "same":
        found: dict[str, Any] = {name: dict(file.ranks) for name, file in zip(clients, files, strict=True)}
        found |= {name: dict(known[name]) for name in absent}
        if absent:
            notes.append(f"{_names(absent)} took no part in this round, but gets an adapter all the same")
    else:
        found = read_toml(Path(text), "--readout is 'same' or a TOML file:")
        most = 8192
        wrong = [n for n, r in found.items() if not isinstance(r, int) or isinstance(r, bool) or not 1 <= r <= most]
        if wrong or not found:
            raise ConfigError(
                f"{text} needs lines client = rank, with whole ranks from 1 to {most}; {wrong[:1] or 'none'} is none."
            )
    folders = {name: _folder(name) for name in found}
    twice = repeated(folders.values())
    if twice:
        raise HyperparameterError(
            f"two clients would get the same folder {twice[0]!r}; give them names that differ more."
        )
    lacking, new = [c for c in (*clients, *absent) if c not in found], [c for c in found if c not in clients]
    if lacking:
        notes.append(f"{text} names no rank for {_names(lacking)}, so no adapter is written for that client")
    back = [name for name in new if name in known] if text != "same" else []
    if back:
        notes.append(f"{_names(back)} took no part in this round; {text} names a rank, so an adapter is written")
    if new := [name for name in new if name not in known]:
        notes.append(f"{text} names {_names(new)}, who never took part: treated as a new client")
    return found, notes


def hand_out(
    hand: ByHand, ranks: Mapping[str, Any], out: Path | None, parts: Parts, whole: Mapping[str, LoRA], label: str,
    max_error: float | None,
) -> tuple[list[ClientReport], list[str]]:  # fmt: skip
    """Write each client's adapter as a PEFT directory below `out`, which is being built; None: only report.

    Args:
        whole: the global update. label: the method's, for the card. max_error: the largest distance allowed.

    Returns:
        each adapter's distance from the global update as written, and notes on ranks.

    Raises:
        ConfigError: a distance exceeds `max_error`.
    """
    wide = {name: lora.map(Tensor.double) for name, lora in whole.items() if name in parts.modules}
    norms = {name: lora.norm() for name, lora in wide.items()}
    size = math.hypot(*norms.values())
    most = max((combine(name, [lora], [1.0]).product.rank for name, lora in whole.items()), default=0) if ranks else 0
    reports, notes = [], []
    for client, rank in ranks.items():
        found = {name: lora for name, lora in hand.readout(client, rank).modules.items() if name in wide}
        modules = {name: narrowed_pair(pad_rank(lora, 1), parts.dtype, name)[0] for name, lora in found.items()}
        gaps = [
            stack([modules[name].map(Tensor.double), lora], [1.0, -1.0]).norm() if name in modules else norms[name]
            for name, lora in wide.items()
        ]
        stored = [lora.rank for lora in modules.values()]
        off = math.hypot(*gaps)
        error = off / size if size else (math.inf if off else 0.0)
        report = ClientReport(_folder(client), (min(stored), max(stored)), len(modules), error)
        reports.append(report)
        if max_error is not None and not error <= max_error:
            raise ConfigError(
                f"the adapter of client {quoted(report.client)}, of rank {report.ranks[1]}, would be off the global "
                f"update by {error:.2g} of its size: more than --max-error {max_error:g}; nothing was written. Give it "
                f"a higher rank (--readout FILE), or leave out --readout."
            )
        if report.ranks[1] > max(most, 1) and isinstance(rank, int):
            notes.append(
                f"rank {rank} of client {quoted(report.client)} is more than the update has ({most}): the remaining "
                f"slots are empty"
            )
        if out is not None:
            card = client_card(parts.spec, label, report, len(wide))
            folder = out / "clients" / report.client
            write_adapter(folder, Adapter(modules, parts.extras), parts.spec, card=card, by=MERGE)
            if parts.labels:
                write_labels(folder, parts.labels)
    return reports, notes


def _names(clients: Sequence[str]) -> str:
    return f"{', '.join(quoted(name, 80) for name in clients[:8])}" + (", ..." if len(clients) > 8 else "")


def _folder(client: str) -> str:
    """A client's folder name: the last part of its name if that is a path, with unusual letters replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", client.rstrip("/").rpartition("/")[2]).lstrip(".")
    if not name:
        raise ConfigError(f"the client {quoted(client)} cannot be the name of a folder.")
    if len(name) > 200:
        raise ConfigError(f"the client {quoted(client)} has {len(name):,} letters; a folder's name has 200 at most.")
    return name
