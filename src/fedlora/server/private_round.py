"""The private intake: of a round's uploads only one noised sum of clipped changes is ever used, and no upload is kept.

    v_i = w_i (Q^T (B_i A_i - readout_i) P over all modules, the heads' changes), ||v_i|| <= C     `Mechanism.contribution`
    S   = sum_i v_i + discrete Gaussian, in integers                                    written down, charged, then used
    M   <- M + Q (S / (q n)) P^T, cut to R                                              `core.accumulating`

Bases come from the released state, so they are public. Every module and head is in the sum, also one that nobody holds.
Whoever is refused, offline, fails or abstains counts as zero: there is no quorum, no second draw and no retry, and the
`Tally` is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating
from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.privacy.geometry import Bases
from fedlora.server.closing import closed
from fedlora.server.intake import WholeUpload
from fedlora.server.method_faults import blamed_on, checked_readout, checked_update
from fedlora.server.private_options import Privacy
from fedlora.server.state import ServerState, Tally
from fedlora.server.terms import Terms


@dataclass(frozen=True, eq=False)
class Layout:
    """Where what stands in the vector that is summed: modules by name, then heads by name. All of it is public.

    bases: module -> Q and P. blocks: module -> the shape of its block. heads: head -> its shape; {} where heads do not
    travel.
    """

    bases: Mapping[str, Bases]
    blocks: Mapping[str, tuple[int, int]]
    heads: Mapping[str, tuple[int, ...]]

    @property
    def sizes(self) -> dict[str, int]:
        """Part -> how many entries it has, in the order of the vector."""
        return {name: math.prod(shape) for name, shape in (*self.blocks.items(), *self.heads.items())}

    @property
    def size(self) -> int:
        """d, of the whole vector."""
        return sum(self.sizes.values())

    def joined(self, modules: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> Tensor:
        """One vector (d,) of float64; what is missing is zero."""
        parts = [
            modules[name].double().reshape(-1) if name in modules else torch.zeros(math.prod(shape), dtype=torch.float64)
            for name, shape in self.blocks.items()
        ]
        parts += [
            heads[name].double().reshape(-1) if name in heads else torch.zeros(math.prod(shape), dtype=torch.float64)
            for name, shape in self.heads.items()
        ]
        return torch.cat([part.cpu() for part in parts])

    def parted(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(module -> its block, head -> its change) of such a vector."""
        shapes = (*self.blocks.items(), *self.heads.items())
        pieces = vector.split([math.prod(shape) for _, shape in shapes])
        found = {name: piece.reshape(shape) for (name, shape), piece in zip(shapes, pieces, strict=True)}
        return {name: found[name] for name in self.blocks}, {name: found[name] for name in self.heads}


def layout(terms: Terms, method: Accumulating[Any], privacy: Privacy) -> Layout:
    """The coordinates of a round: a function of the state before it and of public constants alone."""
    bases, blocks = {}, {}
    for name, state in sorted(terms.state.modules.items()):
        with blamed_on(terms.method, "effective"):
            update = terms.method.effective(state)
        if update is None:
            raise HyperparameterError(f"{terms.method.name} keeps no global model, and privacy releases nothing else.")
        released = checked_update(terms.method, update, terms.state.start.modules[name])
        rows = method.common_rows(state)
        bases[name] = (
            privacy.geometry.bases(released, name, terms.number, privacy.seed)
            if rows is None
            else Bases(None, torch.linalg.qr(rows.detach().double().cpu().mT).Q)
        )
        B, A = terms.state.start.modules[name].factors
        blocks[name] = bases[name].shape(B.shape[0], A.shape[1])
    shared = terms.roles.heads == "shared"
    heads = {name: tuple(head.shape) for name, head in sorted(terms.state.heads.items())} if shared else {}
    return Layout(bases, blocks, heads)


class PrivateRound:
    """An `Intake` that keeps one vector. Uploads may come in any order: integers add up to the same sum."""

    exchanges = 1
    keeps = False

    def __init__(self, terms: Terms, method: Accumulating[Any], privacy: Privacy) -> None:
        self._terms, self._method, self._privacy = terms, method, privacy
        self._layout = layout(terms, method, privacy)
        self._total = torch.zeros(self._layout.size, dtype=torch.int64)
        self._seen: set[str] = set()
        self._released = privacy.releases.stored(terms.number)
        if self._released is not None and self._released.shape != self._total.shape:
            raise HyperparameterError(
                f"the noised sum of round {terms.number} that was stored has {tuple(self._released.shape)} numbers, and "
                f"this round's {tuple(self._total.shape)}: it is of another model or configuration. A private run goes "
                f"on with the same ones only."
            )

    def ask(self) -> WholeUpload:
        return WholeUpload()

    def add(self, upload: Upload) -> None:
        """Count one upload: at most one of each client, whatever becomes of it.

        Raises:
            UploadRefused: to the one who sent it. It counts as zero, and nobody else may be told.
        """
        client = upload.client.id
        if client in self._seen:
            raise UploadRefused(client, "a second upload in the same round; whatever came first stands.")
        self._seen.add(client)
        if len(self._seen) > self._privacy.clients:
            raise UploadRefused(client, f"more than the {self._privacy.clients} clients of the federation took part.")
        if self._released is not None or not self._terms.check(upload):
            return
        self._total += self._privacy.mechanism.contribution(
            self._change(upload), self._privacy.weight(float(upload.num_examples))
        )

    def close(self) -> ServerState:
        """The next state. It takes place whoever came: an empty round releases pure noise.

        Raises:
            Whatever `Releases.settle` raises where the budget is spent: nothing was released then.
        """
        privacy, terms = self._privacy, self._terms
        if self._released is None:
            noised = privacy.mechanism.noised(self._total)
            privacy.releases.settle(terms.number, noised, privacy.mechanism.sensitivity(self._layout.size))
            self._released = noised
        self._total.zero_()
        mean = privacy.mechanism.mean(self._released, privacy.denominator)
        blocks, changes = self._layout.parted(mean)
        modules = {}
        with blamed_on(terms.method, "accumulated"):
            for name, block in blocks.items():
                change = self._layout.bases[name].lift(block)
                modules[name] = self._method.accumulated(terms.state.modules[name], change, privacy.rank)
        heads = {name: (terms.state.heads[name].double() + c).to(terms.state.heads[name]) for name, c in changes.items()}
        return closed(terms, modules, heads, Tally({}))

    def _change(self, upload: Upload) -> Tensor:
        """What the client changed of what it was sent, in the round's coordinates: (d,), float64."""
        terms, modules = self._terms, {}
        for name, rank in upload.client.ranks(terms.state.modules).items():
            with blamed_on(terms.method, "readout"):
                made = terms.method.readout(terms.state.modules[name], upload.client.id, rank)
            before = checked_readout(terms.method, made, terms.state.start.modules[name], rank, terms.roles)
            modules[name] = self._layout.bases[name].project(change_of(upload.adapter.modules[name], before.lora))
        heads = {
            name: upload.adapter.heads[name].detach().double().cpu() - terms.state.heads[name].double().cpu()
            for name in self._layout.heads
        }
        return self._layout.joined(modules, heads)


def change_of(sent: LoRA, received: LoRA) -> LoRA:
    """B A as sent - B_0 A_0 as received, as one pair in float64. A factor that did not travel is the received one."""
    B_0, A_0 = (t.detach().double().cpu() for t in received.factors)
    B = B_0 if sent.B is None else sent.B.detach().double().cpu()
    A = A_0 if sent.A is None else sent.A.detach().double().cpu()
    if sent.A is None:
        return LoRA(B - B_0, A_0)
    if sent.B is None:
        return LoRA(B_0, A - A_0)
    return LoRA(torch.cat([B, -B_0], dim=1), torch.cat([A, A_0]))
