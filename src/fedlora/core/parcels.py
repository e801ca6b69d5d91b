"""What really travels: a download without the parts its client already holds.

    parcel   = pack(download, held)           server side; held: what the client says it holds, None at first
    download = unpack(parcel, cache)          client side; complete again
    cache    = remember(download, kept)       what the client stores until then; cache.held is what it tells the server

A part that clients do not train travels once, and again whenever it changes, whoever replaced it: a digest identifies
what the client holds. A part that they train need not travel to a client that measured this download, and stored it.
For the base weights' change, only the steps that the client missed travel, or the total if that is smaller. The
in-process engine uses `pack` to count bytes; networks send the parcel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedlora.core.base_change import BaseChange, added
from fedlora.core.lora import Adapter, LoRA, stack
from fedlora.core.messages import Client, Download, Held
from fedlora.core.method import Roles
from fedlora.core.read_only import ReadOnly
from fedlora.errors import KeptStateError
from fedlora.linalg.stored import stored_bytes

PARTS = ("B", "A", "heads")


@dataclass(frozen=True, eq=False)
class Cache:
    """What a client stores from its last download: the frozen parts, those that it will train if it has not yet, and
    how far its base weights have moved."""

    held: Held
    adapter: Adapter
    base: Mapping[str, BaseChange]


@dataclass(frozen=True, eq=False)
class Parcel:
    """What travels to a client.

    left_out: those of "B", "A" and "heads" that the client holds. adapter, start: as in the download, minus what the
    client holds. base: module -> the total change of its base weight. steps: module -> what to add to the change that
    the client holds. versions: module -> the base weight's version after that, for every module whose base has ever
    moved. held: what the server assumed the client holds.
    """

    client: Client
    round: int
    roles: Roles
    ranks: Mapping[str, int]
    left_out: tuple[str, ...]
    adapter: Adapter
    start: Adapter
    base: Mapping[str, LoRA]
    steps: Mapping[str, LoRA]
    versions: Mapping[str, int]
    held: Held | None


def pack(download: Download, held: Held | None) -> Parcel:
    """Reduce `download` to what a client that holds `held` lacks (None: it has never been sent anything)."""
    d = download
    has = {part for part, digest in (held.parts.items() if held else ()) if digest == fingerprint(d, part)}
    local = held.local if held else ()
    base, steps = {}, {}
    for name, change in d.base.items():
        missed = change.since(held.base.get(name, 0)) if held else None
        if missed is None:
            base[name] = d.base_delta[name]
        elif missed:
            steps[name] = missed[0] if len(missed) == 1 else stack(list(missed), [1.0] * len(missed))
    return Parcel(
        client=d.client,
        round=d.round,
        roles=d.roles,
        ranks=ReadOnly(d.start.ranks | d.adapter.ranks),
        left_out=tuple(sorted(has)),
        adapter=d.adapter.only({*PARTS} - has),
        start=Adapter(
            {name: lora for name, lora in d.start.modules.items() if name not in local},
            {name: head for name, head in d.start.heads.items() if name not in local},
        ),
        base=ReadOnly(base),
        steps=ReadOnly(steps),
        versions=ReadOnly({name: change.version for name, change in d.base.items()}),
        held=held,
    )


def unpack(parcel: Parcel, cache: Cache | None) -> Download:
    """Restore the complete download from the parcel and what the client stored.

    Raises:
        KeptStateError: the parcel leaves something out, and `cache` is not the one it was packed for.
    """
    p = parcel
    if cache is not None and cache.held != p.held:
        cache = None
    if cache is None and p.held is not None and p.held.local:
        raise _left_out(f"the start of {p.held.local[0]!r}, which only this client trains, was")
    stored = cache.adapter if cache else Adapter({})
    modules = {}
    for name in p.ranks:
        came = p.adapter.modules.get(name)
        parts: dict[str, Tensor | None] = dict(came.tensors()) if came else {}
        mine = stored.modules[name].tensors() if name in stored.modules else {}
        for factor in [part for part in p.left_out if part != "heads"]:
            if factor not in mine:
                raise _left_out(f"factor {factor} of module {name!r} was")
            parts[factor] = mine[factor]
        if parts:
            modules[name] = LoRA(parts.get("B"), parts.get("A"))
    if "heads" in p.left_out and cache is None:
        raise _left_out("the heads were")
    heads = stored.heads if "heads" in p.left_out else p.adapter.heads
    base = {}
    for name, version in p.versions.items():
        if name in p.base:
            base[name] = BaseChange(p.base[name], version, ())
            continue
        before = cache.base.get(name) if cache else None
        if name in p.steps and (before is not None or (cache is not None and name not in cache.held.base)):
            total = added(before.total, p.steps[name]) if before else p.steps[name]
            base[name] = BaseChange(total, version, ())
        elif before is not None and before.version == version:
            base[name] = before
        else:
            raise _left_out(f"part of the change of the base weight of {name!r} was")
    return Download(p.client, p.round, Adapter(modules, heads), p.roles, p.start, ReadOnly(base))


def _left_out(what: str) -> KeptStateError:
    return KeptStateError(
        f"{what} left out because this client should store it, but the stored part belongs to another download. "
        f"Ask again for everything."
    )


def fingerprint(download: Download, part: str) -> str:
    """A digest of one of a download's `PARTS`: equal exactly if the same bits would be sent."""
    adapter = download.adapter
    found = adapter.heads if part == "heads" else {name: x.tensors().get(part) for name, x in adapter.modules.items()}
    digest = hashlib.sha256()
    for name, tensor in found.items():
        if tensor is not None:
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(stored_bytes(tensor))
    return digest.hexdigest()[:32]


def held_after(download: Download, kept: Adapter | None = None, *, untrained: bool = False) -> Held:
    """What a client holds after receiving `download`. kept: the local parts that it keeps (`client.keep`). untrained:
    it has stored the shared parts too, for it has not trained them yet."""
    stored = download.roles.parts("frozen", "shared") if untrained else download.roles.parts("frozen")
    parts = ReadOnly({part: fingerprint(download, part) for part in stored})
    local = (*kept.modules, *kept.heads) if kept else ()
    versions = ReadOnly({name: change.version for name, change in download.base.items()})
    return Held(download.round, parts, local, versions)


def remember(download: Download, kept: Adapter | None = None, *, untrained: bool = False) -> Cache:
    """What a client stores from a complete download for the next `unpack`. kept, untrained: as in `held_after`."""
    held = held_after(download, kept, untrained=untrained)
    base = {name: replace(change, steps=()) for name, change in download.base.items()}
    return Cache(held, download.adapter.only(held.parts), ReadOnly(base))
