"""What really travels: a download without the parts that its client holds already.

    parcel   = pack(download, held)           server side; held: what the client says that it holds, None at first
    download = unpack(parcel, cache)          client side; complete again
    cache    = remember(download, kept)       what the client stores until then; cache.held is what it tells the server

A part that clients do not train travels once, and again when it is another one, whoever replaced it: what the client
holds is known by a digest. Of the change of the base weights only the steps that it missed travel, or the whole where
that is smaller. The in-process engine uses
`pack` to count bytes; networks send a parcel's `tensors`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

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
    """What a client stores of its last download: the frozen parts, and how far its base weights have moved."""

    TAG: ClassVar[str] = "cache/1"

    held: Held
    adapter: Adapter
    base: Mapping[str, BaseChange]


@dataclass(frozen=True, eq=False)
class Parcel:
    """What travels to a client.

    left_out: those of "B", "A" and "heads" that the client holds. adapter, start: as in the download, without what the
    client holds. base: module -> the whole change of its
    base weight. steps: module -> what to add to the change that the client holds. versions: module -> version of the
    base weight after that, for all modules whose base has ever moved. held: what the client was taken to hold.
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

    def tensors(self) -> dict[str, Tensor]:
        """Everything with a size, by a name for the wire."""
        named: dict[str, Tensor] = {}
        groups = {"adapter": self.adapter.modules, "start": self.start.modules, "base": self.base, "steps": self.steps}
        for group, loras in groups.items():
            for module, lora in loras.items():
                named |= {f"{group}/{factor}/{module}": tensor for factor, tensor in lora.tensors().items()}
        for group, heads in {"heads": self.adapter.heads, "start-heads": self.start.heads}.items():
            named |= {f"{group}/{name}": head for name, head in heads.items()}
        return named


def pack(download: Download, held: Held | None) -> Parcel:
    """What `download` comes down to for a client that holds `held` (None: it has never been sent anything)."""
    d = download
    ranks = d.start.ranks | d.adapter.ranks
    has = [part for part, digest in (held.parts.items() if held else ()) if digest == fingerprint(d, part)]
    modules = {}
    for name, lora in d.adapter.modules.items():
        B, A = (None if factor in has else lora.tensors().get(factor) for factor in ("B", "A"))
        if B is not None or A is not None:
            modules[name] = LoRA(B, A)
    base, steps = {}, {}
    for name, change in d.base.items():
        missed = change.since(held.base.get(name, 0)) if held else None
        if missed is None or sum(step.rank for step in missed) > change.total.rank:
            base[name] = d.base_delta[name]
        elif missed:
            steps[name] = missed[0] if len(missed) == 1 else stack(list(missed), [1.0] * len(missed))
    return Parcel(
        client=d.client,
        round=d.round,
        roles=d.roles,
        ranks=ReadOnly(ranks),
        left_out=tuple(sorted(has)),
        adapter=Adapter(modules, {} if "heads" in has else d.adapter.heads),
        start=_without(d.start, held.local if held else ()),
        base=ReadOnly(base),
        steps=ReadOnly(steps),
        versions=ReadOnly({name: change.version for name, change in d.base.items()}),
        held=held,
    )


def _without(start: Adapter, local: Sequence[str]) -> Adapter:
    return Adapter(
        {name: lora for name, lora in start.modules.items() if name not in local},
        {name: head for name, head in start.heads.items() if name not in local},
    )


def unpack(parcel: Parcel, cache: Cache | None) -> Download:
    """The complete download again, from what came and what the client stored.

    Raises:
        KeptStateError: the parcel leaves out something, and `cache` is not what it was packed for.
    """
    p = parcel
    if cache is not None and cache.held != p.held:
        cache = None
    stored = cache.adapter if cache else Adapter({})
    modules = {}
    for name in p.ranks:
        came = p.adapter.modules.get(name)
        parts: dict[str, Tensor | None] = dict(came.tensors()) if came else {}
        mine = stored.modules[name].tensors() if name in stored.modules else {}
        for factor in ("B", "A"):
            if factor in p.left_out:
                parts[factor] = _stored(mine, factor, f"factor {factor} of module {name!r}")
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


def _stored(mine: Mapping[str, Tensor], factor: str, what: str) -> Tensor:
    if factor not in mine:
        raise _left_out(f"{what} was")
    return mine[factor]


def _left_out(what: str) -> KeptStateError:
    return KeptStateError(
        f"{what} left out for a client that stores it, but the stored part here belongs to another download. "
        f"Ask again, for everything."
    )


def fingerprint(download: Download, part: str) -> str:
    """A digest of one of a download's `PARTS`: the same where, bit for bit, the same would be sent."""
    adapter = download.adapter
    found = adapter.heads if part == "heads" else {name: x.tensors().get(part) for name, x in adapter.modules.items()}
    digest = hashlib.sha256()
    for name, tensor in found.items():
        if tensor is not None:
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(stored_bytes(tensor))
    return digest.hexdigest()[:32]


def held_after(download: Download, kept: Adapter | None = None) -> Held:
    """What a client holds once it has received `download`. kept: the local parts that it keeps (`client.keep`)."""
    d = download
    frozen = ReadOnly({part: fingerprint(d, part) for part in PARTS if getattr(d.roles, part) == "frozen"})
    ranks = ReadOnly(d.start.ranks | d.adapter.ranks)
    local = (*kept.modules, *kept.heads) if kept else ()
    return Held(d.round, frozen, ranks, local, ReadOnly({name: change.version for name, change in d.base.items()}))


def remember(download: Download, kept: Adapter | None = None) -> Cache:
    """What a client stores of a complete download, for the next `unpack`. kept: as for `held_after`."""
    held = held_after(download, kept)
    modules = {}
    for name, lora in download.adapter.modules.items():
        B, A = (lora.tensors().get(factor) if factor in held.parts else None for factor in ("B", "A"))
        if B is not None or A is not None:
            modules[name] = LoRA(B, A)
    heads = download.adapter.heads if "heads" in held.parts else {}
    base = {name: replace(change, steps=()) for name, change in download.base.items()}
    return Cache(held, Adapter(modules, heads), ReadOnly(base))
