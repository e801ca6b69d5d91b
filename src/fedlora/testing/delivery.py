"""Delivery is lossless: clients that store only the minimum get exactly what the server read out."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fedlora.client import keep, receive, send
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, Download, Held, Upload
from fedlora.core.parcels import Cache, fingerprint, pack, remember, unpack
from fedlora.server.server import Server
from fedlora.testing.comparing import differing, relative
from fedlora.testing.contract import Measured
from fedlora.testing.federations import EXAMPLES, SHAPES, Ranks, Who, pushed, seed_adapter

BASE = 2e-6  # relative to a base weight's change: its steps are float32, which rounds each by 6e-8


def delivery(server: Server, ranks: Ranks, who: Who) -> Measured:
    """For every client in every round, `unpack(pack(download, held), cache)` equals the download.

    Adapter, heads, starts and roles are equal bit for bit. A part that clients do not train and that the server
    replaced (frozen, with new content) must travel: content decides, not what a method says. A change of the base
    weight equals the server's within `BASE` of its size, which is measured: the server keeps the whole change in
    float64, but the client adds up float32 steps, so bits differ. The federation is float32, like real ones, with
    clients that are away or come late.
    """
    state = server.init(seed_adapter(max(ranks.values()), torch.float32))
    disks: dict[str, tuple[Cache | None, Adapter | None]] = {}
    count, arrived, offs = 0, 0, [0.0]
    for names in who:
        uploads = []
        for name in names:
            client, (cache, kept) = Client(name, ranks[name]), disks.get(name, (None, None))
            plain = server.download(state, client)
            held = cache.held if cache else None
            parcel = pack(plain, held)
            got = unpack(parcel, cache)
            replaced, at = _replaced(plain, held), f"client {name!r} in round {plain.round + 1}"
            if lost := [part for part in replaced if part in parcel.left_out]:
                return Measured(False, f"{at}: the frozen {lost[0]} is not what the client holds, and was left out")
            if paths := _differing(got, plain, held, kept):
                return Measured(False, f"{at} unpacks {len(paths)} values in other bits: {paths[0]}")
            offs += [_base_off(got, plain, module) for module in plain.base.keys() | got.base.keys()]
            if not max(offs) < BASE:
                return Measured(False, f"{at}: its base weight is off the server's by {max(offs):.1e}", 0.0, max(offs))
            count, arrived = count + 1, arrived + len(replaced)
            mine = pushed(receive(got, kept), name, plain.round, plain.roles)
            kept = keep(mine, plain.roles)
            disks[name] = remember(got, kept), kept
            uploads.append(Upload(client, EXAMPLES[name], send(mine, plain.roles)))
        state = server.aggregate(state, uploads)
    says = f"{count} downloads to the bit"
    says += f", {arrived} replaced frozen parts arrived" if arrived else ""
    says += f", base weights within {max(offs):.1e}" if len(offs) > 1 else ""
    return Measured(True, says, min(offs), max(offs))


def _replaced(plain: Download, held: Held | None) -> list[str]:
    """The frozen parts whose content differs from the client's copy."""
    return [part for part, digest in held.parts.items() if fingerprint(plain, part) != digest] if held else []


def _differing(got: Download, plain: Download, held: Held | None, kept: Adapter | None) -> list[str]:
    """Where the unpacked download, or the client's adapter made from it, differs from the server's in any bit."""
    local = held.local if held else ()
    start = Adapter(
        {name: lora for name, lora in plain.start.modules.items() if name not in local},
        {name: head for name, head in plain.start.heads.items() if name not in local},
    )
    mine, same = (replace(receive(download, kept), base=None) for download in (got, plain))
    here = {"adapter": got.adapter, "roles": got.roles, "start": got.start, "mine": mine}
    there = {"adapter": plain.adapter, "roles": plain.roles, "start": start, "mine": same}
    return differing(here, there)


def _base_off(got: Download, plain: Download, module: str) -> float:
    """The relative distance of two changes of a base weight; inf if their versions or shapes differ."""
    here, there = got.base.get(module), plain.base.get(module)
    if here is None or there is None or here.version != there.version:
        return math.inf
    dense = [change.total.delta().double() for change in (here, there)]
    if any(tuple(d.shape) != SHAPES[module] for d in dense):
        return math.inf
    return relative(*dense)
