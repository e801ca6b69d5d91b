"""The private intake: it uses a round's uploads only in one noised sum of clipped changes, and keeps no upload.

    v_i = w_i (Q^T (B_i A_i - readout_i) P over all modules, the heads' changes), ||v_i|| <= C
    S   = sum_i v_i + discrete Gaussian, in integers             stored, charged, then used
    M   <- M + Q (S / (q n)) P^T, cut to R                       `core.accumulating`

Bases come from the released state, so they are public. Every module and head is in the sum, even if no client holds it.
The round itself draws the clients to ask, and takes one upload from each. A client that is refused, offline, fails or
abstains counts as zero: there is no quorum, no second draw and no retry, and the `Tally` is empty.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating
from fedlora.core.lora import LoRA, change_of
from fedlora.core.messages import Upload
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.linalg.own_modes import own_modes
from fedlora.linalg.stored import stored_bytes
from fedlora.privacy.geometry import Bases, Layout
from fedlora.privacy.sampling import poisson_sample
from fedlora.server.checks import check_types
from fedlora.server.closing import closed
from fedlora.server.method_faults import blamed_on, checked_update
from fedlora.server.private_options import Privacy
from fedlora.server.state import ServerState, Tally
from fedlora.server.terms import Terms


def layout(terms: Terms, method: Accumulating[Any], privacy: Privacy) -> Layout:
    """The coordinates of a round; they depend only on the state before it and on public constants."""
    bases = {}
    for name, released in released_of(terms).items():
        rows = method.common_rows(terms.state.modules[name])
        if rows is not None and privacy.geometry.shape != "full":
            raise HyperparameterError(
                f"{terms.method.name} has a frozen factor that everybody knows, and sums its changes in the "
                f"coordinates of that factor: the shape {privacy.geometry.shape!r} has no effect. Leave shape and "
                f"dims out."
            )
        if rows is None:
            bases[name] = privacy.geometry.bases(released, name, terms.number, privacy.seed)
        else:
            d_out, d_in = (t.shape[k] for k, t in enumerate(terms.state.start.modules[name].factors))
            bases[name] = Bases(d_out, d_in, None, torch.linalg.qr(rows.detach().double().cpu().mT).Q)
    shared = terms.roles.heads == "shared"
    return Layout(bases, {name: tuple(head.shape) for name, head in terms.state.heads.items()} if shared else {})


def released_of(terms: Terms) -> dict[str, LoRA]:
    """Module -> M, the update released before the round."""
    found = {}
    for name, state in sorted(terms.state.modules.items()):
        with blamed_on(terms.method, "effective"):
            update = terms.method.effective(state)
        if update is None:
            raise HyperparameterError(f"{terms.method.name} keeps no global model, and privacy can release only that.")
        found[name] = checked_update(terms.method, update, terms.state.start.modules[name])
    return found


def context_of(terms: Terms, privacy: Privacy) -> str:
    """A digest of a round's starting point: the release before it, and every public constant of the mechanism."""
    p = privacy
    constants = (terms.number, terms.method, terms.roles, p.clip, p.noise_multiplier, p.geometry, p.clients)
    digest = sha256(repr((*constants, p.rank, p.sampling, p.most_examples, p.seed)).encode())
    tensors = {f"{name}.{f}": t for name, lora in released_of(terms).items() for f, t in lora.tensors().items()}
    for name, tensor in sorted({**tensors, **terms.state.heads}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(stored_bytes(tensor))
    return digest.hexdigest()


class PrivateRound:
    """An `Intake` that keeps one vector. Uploads may come in any order: their integers have the same sum.

    layout: the vector's layout. mechanism: its clipping and noise. Both are public.

    Your own loop asks the clients in `asked` and nobody else:

        opened = server.open(state)
        for name in opened.asked:
            with suppress(UploadRefused):   # it counts as zero, and the diary knows why
                opened.add(upload_of(name))
        state = opened.close()
    """

    keeps = False

    def __init__(self, terms: Terms, method: Accumulating[Any], privacy: Privacy) -> None:
        self._terms, self._method, self._privacy = terms, method, privacy
        self.layout, self._context = layout(terms, method, privacy), context_of(terms, privacy)
        self.mechanism = privacy.mechanism(self.layout.size)
        self._total = torch.zeros(self.layout.size, dtype=torch.int64)
        self._members, self._heard = frozenset(privacy.clients), set[str]()
        self._counted = 0
        self._released = privacy.releases.stored(terms.number, self._context)
        self.stored = self._released is not None
        if self._released is not None and self._released.shape != self._total.shape:
            raise HyperparameterError(
                f"the noised sum of round {terms.number} that was stored has {len(self._released)} numbers, and this "
                f"round's {len(self._total)}: it belongs to another model or configuration. A private run can "
                f"only continue with the same ones."
            )

    @cached_property
    def asked(self) -> tuple[str, ...]:
        """The clients that take part: all, or a secret draw of each with chance q by the system's randomness; the same
        ones after a kill. Nobody if the sum is `stored`."""
        privacy = self._privacy
        if self.stored:
            return ()
        if privacy.sampling == 1.0:
            return privacy.clients
        drawn = poisson_sample(privacy.clients, privacy.sampling)
        kept = privacy.releases.first_drawn(self._terms.number, self._context, drawn)
        return tuple(sorted(self._members.intersection(kept)))

    @cached_property
    def _drawn(self) -> frozenset[str]:
        return frozenset(self.asked)

    @own_modes()
    def add(self, upload: Upload) -> None:
        """Count one upload: at most one from each client in `asked`, whatever happens to it. Another client's part
        never depends on it, and q n stays the public number.

        Raises:
            UploadRefused: for the client that sent it. The upload counts as zero, and only the diary reports it.
        """
        try:
            self._take(upload)
        except UploadRefused as refusal:
            self._privacy.note(self._terms.number, refusal.client, refusal.reason)
            raise

    def refuse(self, refusal: UploadRefused) -> None:
        """As `Intake.refuse`: the client counts as zero, and only the diary reports it."""
        self._privacy.note(self._terms.number, refusal.client, refusal.reason)

    def _take(self, upload: Upload) -> None:
        check_types(upload)
        client = upload.client.id
        if self._released is not None:
            raise UploadRefused(client, "the round's noised sum already exists, so nothing can be added.")
        if client not in self._members:
            raise UploadRefused(client, "it is not among the clients that Privacy(clients=...) names.")
        if client not in self._drawn:
            raise UploadRefused(client, "this client was not drawn for this round, and the ledger relies on the draw.")
        if client in self._heard:
            raise UploadRefused(client, "a second upload in the same round; the first one counts.")
        self._heard.add(client)
        self._total += self._contribution(upload)
        self._counted += 1

    def _contribution(self, upload: Upload) -> Tensor:
        """int64 (d,). Raises only `UploadRefused`, whatever the tensors contain, so that no client can end a round."""
        try:
            if not self._terms.check(upload):
                return torch.zeros_like(self._total)
            change, weight = self._change(upload), self._privacy.weight(float(upload.num_examples))
            if not bool(torch.isfinite(change).all()):
                raise UploadRefused(upload.client.id, "its change is beyond float64: NaN or Inf.")
            return self.mechanism.contribution(change, weight)
        except UploadRefused:
            raise
        except Exception as error:
            raise UploadRefused(upload.client.id, f"it cannot be read: {type(error).__name__}: {error}") from error

    @own_modes()
    def close(self) -> ServerState:
        """The next state. The round always closes, whoever came: an empty one releases pure noise.

        Raises:
            Whatever `Releases.settle` raises if the budget is spent: then nothing was released.
        """
        privacy, terms = self._privacy, self._terms
        privacy.note_end(terms.number, len(self.asked), self._counted)
        if self._released is None:
            noised = self.mechanism.noised(self._total)
            self._released = privacy.releases.settle(
                terms.number, self._context, noised, self.mechanism, privacy.sampling
            )
        self._total.zero_()
        mean = self.mechanism.mean(self._released, privacy.denominator)
        changes, of_heads = self.layout.parts(mean)
        with blamed_on(terms.method, "accumulated"):
            modules = {
                name: self._method.accumulated(terms.state.modules[name], change, privacy.rank)
                for name, change in changes.items()
            }
        heads = {name: (head.double().cpu() + of_heads[name]).to(head) for name, head in terms.state.heads.items()
                 if name in of_heads}  # fmt: skip
        return closed(terms, modules, heads, Tally({}))

    def _change(self, upload: Upload) -> Tensor:
        """The client's change relative to its readout, in the round's coordinates: (d,), float64."""
        modules = {
            name: change_of(upload.adapter.modules[name], begun).map(Tensor.cpu)
            for name, begun in self._terms.begun(upload.client).items()
        }
        heads = {
            name: upload.adapter.heads[name].detach().double().cpu() - self._terms.state.heads[name].double().cpu()
            for name in self.layout.heads
        }
        return self.layout.vector(modules, heads)
