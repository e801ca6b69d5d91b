"""A private round: it clips and adds up what its clients changed, has the sum noised once, and keeps no upload.

    products   v_i = w_i (Q^T (B_i A_i - R_i) P over all modules, the heads' changes)
    factors    the same of the factors that travel, entry by entry, as the method is `linear_in`

At close the state's own update M, moved by the noised mean change, is one term of nobody. Bases come from the released
state, so they are public. Every module and head is in the sum, even if no client holds it.

A plain round replaces M by the clients' mean, and this one adds their mean change to it. The two agree if every client
started from all of M; they differ where a client's rank is below that of M.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, change_of
from fedlora.core.messages import Upload
from fedlora.core.method import Update
from fedlora.core.text import shown
from fedlora.errors import UploadRefused
from fedlora.linalg import Spectrum, Term, projected_sum, unit_roundoff
from fedlora.linalg.stored import stored_bytes
from fedlora.privacy.geometry import Bases, Layout, bases_of
from fedlora.privacy.sampling import poisson_sample
from fedlora.server.judged import Judged
from fedlora.server.method_faults import call
from fedlora.server.rounds import SECOND_UPLOAD, OpenRound
from fedlora.server.state import ServerState, Tally

if TYPE_CHECKING:
    from fedlora.server.private import Private
    from fedlora.server.server import Server

log = logging.getLogger("fedlora.server")


class PrivateRound(OpenRound):
    """A round that keeps one vector. Uploads may come in any order: their integers have the same sum.

    layout: the vector's layout. mechanism: its clipping and noise. Both are public.

    Your own loop asks the clients in `asked` and nobody else:

        opened = server.open(state)
        for name in opened.asked:
            with suppress(UploadRefused):   # it counts as zero
                opened.add(upload_of(name))
        state = opened.close()
    """

    def __init__(self, server: Server, state: ServerState, options: Private) -> None:
        super().__init__(server, state)
        self._server, self._options = server, options
        self._products = server.method.linear_in == "products"
        self._origins = {name: self._origin(name) for name in state.modules}
        self.layout = self._layout()
        self.mechanism = options.mechanism(self.layout.size)
        self._context = self._digest()
        self._total = torch.zeros(self.layout.size, dtype=torch.int64)
        self._heard: set[str] = set()  # refused ones too: a retry would depend on what was sent
        self._changes: Mapping[str, LoRA] = {}
        self._of_heads: Mapping[str, Tensor] = {}
        self._released = options.releases.stored(self.number, self._context)
        self.stored = self._released is not None
        self._asked: tuple[str, ...] | None = () if self.stored else None

    @property
    def asked(self) -> tuple[str, ...]:
        """All, or a secret draw of each with chance q by the system's randomness. Nobody if the sum is `stored`."""
        if self._asked is None:
            self._asked = tuple(poisson_sample(self._options.clients, self._options.sampling))
        return self._asked

    def refuse(self, refusal: UploadRefused) -> None:
        """The client counts as zero, and only the log of the server's operator says so."""
        who, why = shown(refusal.client), shown(refusal.reason, 1000)
        log.warning("round %d: %s does not count: %s", self.number, who, why)

    def _admit(self, client: str) -> None:
        if client not in self.asked:
            raise UploadRefused(
                client, "it was not asked: not among Private(clients=...), not drawn, or the round's sum is stored."
            )
        if client in self._heard:
            raise UploadRefused(client, SECOND_UPLOAD)
        self._heard.add(client)

    def _take(self, upload: Upload, count: float) -> None:
        most = self._options.most_examples
        weight = 1.0 if most is None else min(count, most) / most
        self._total += self.mechanism.contribution(self._change(upload), weight)

    def _settle(self) -> Judged | None:
        options, asked = self._options, len(self.asked)
        if asked and not self.counts:
            log.warning(
                "round %d: none of the %d clients that were asked counts. The round releases only noise, and is "
                "charged like any other: remove the cause before you spend more rounds.", self.number, asked,
            )  # fmt: skip
        if self._released is None:
            noised = self.mechanism.noised(self._total)
            self._released = options.releases.settle(
                self.number, self._context, noised, self.mechanism, options.sampling
            )
        self._total.zero_()
        self._changes, self._of_heads = self.layout.parts(self.mechanism.mean(self._released, options.denominator))
        return None

    def _tally(self, judged: Judged | None) -> Tally:
        return Tally({})

    def _origin(self, name: str) -> LoRA:
        """M: what a client of any rank would start from. Public, like every readout."""
        state, start = self.state.modules[name], self.state.start.modules[name]
        if not self._products:  # with a frozen factor, beside which a sum of the other has its meaning
            return cast(LoRA, call(self.method, "readout", state, None, start.rank))
        # The next effective update is base + the round's sum, so the origin is effective less base: all of the update
        # for glora, nothing for flora, which starts afresh on a base that holds everything.
        effective, base = (call(self.method, what, state) for what in ("effective", "base"))
        return LoRA(*_sum([(1.0, effective)] if base is None else [(1.0, effective), (-1.0, base.total)]).balanced())

    def _layout(self) -> Layout:
        """The coordinates of a round; they depend only on the state before it and on public constants."""
        bases, options = {}, self._options
        for name, origin in self._origins.items():
            if self._products:
                bases[name] = bases_of(origin, options.dims, name, self.number, options.seed)
            else:
                bases |= {f"{name}.{f}": Bases(*origin.tensors()[f].shape) for f in self.roles.shared}
        shared = self.roles.heads == "shared"
        return Layout(bases, {name: tuple(head.shape) for name, head in self.state.heads.items()} if shared else {})

    def _digest(self) -> str:
        """A digest of the round's starting point: the release before it, and every public constant."""
        o = self._options
        constants = (
            self.number, self.method, self.roles, o.clipping_norm, o.noise_multiplier, o.dims, o.clients, o.rank,
            o.sampling, o.most_examples, o.seed,
        )  # fmt: skip
        digest = sha256(repr(constants).encode())
        tensors = {f"{name}.{f}": t for name, lora in self._origins.items() for f, t in lora.tensors().items()}
        for name, tensor in sorted({**tensors, **self.state.heads}.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(stored_bytes(tensor))
        return digest.hexdigest()

    def _change(self, upload: Upload) -> Tensor:
        """The client's change relative to what it was sent, in the round's coordinates: (d,), float64."""
        changes, begun = dict[str, LoRA](), self._server.download(self.state, upload.client).adapter
        for name, lora in upload.adapter.modules.items():
            if self._products:
                changes[name] = change_of(lora, begun.modules[name]).map(Tensor.cpu)
                continue
            most = self._origins[name].rank
            if lora.rank > most:
                raise UploadRefused(upload.client.id, f"a private round sums factors of rank {most}, not {lora.rank}.")
            for factor, t in lora.tensors().items():
                moved = (t.detach().double() - begun.modules[name].tensors()[factor].double()).cpu()
                slots = torch.eye(lora.rank, most, dtype=moved.dtype)  # pads the slots that this client lacks
                changes[f"{name}.{factor}"] = LoRA(moved, slots) if factor == "B" else LoRA(slots.mT, moved)
        heads = {
            name: upload.adapter.heads[name].detach().double().cpu() - self.state.heads[name].double().cpu()
            for name in self.layout.heads
        }
        return self.layout.vector(changes, heads)

    def _updates(self, module: str) -> list[Update]:
        origin, like = self._origins[module], self.state.start.modules[module].factors[0]
        if self._products:
            change = self._changes[module].map(lambda t: t.to(origin.factors[0]))
            rank = self._options.rank
            best = _sum([(1.0, origin), (1.0, change)]).head(rank)
            lora = LoRA(*best.balanced())
            log.info(
                "round %d: the cut to rank %d leaves out %.2g of %s's energy.", self.number, rank, best.cut, module
            )
        else:
            moved = {
                f: origin.tensors()[f].double() + self._changes[f"{module}.{f}"].delta().to(like.device)
                for f in self.roles.shared
            }
            lora, rank = LoRA(moved.get("B"), moved.get("A")), origin.rank
        return [Update(None, 1.0, rank, lora.map(lambda t: t.to(like)), unit_roundoff(like.dtype))]

    def _mean_heads(self) -> dict[str, Tensor]:
        heads = self.state.heads
        return {name: (heads[name].double().cpu() + moved).to(heads[name]) for name, moved in self._of_heads.items()}


def _sum(terms: Sequence[tuple[float, LoRA]]) -> Spectrum:
    """sum_k w_k B_k A_k in energy order, float64."""
    return projected_sum([Term(*lora.factors, w, 0.0) for w, lora in terms], dtype=torch.float64).spectrum
