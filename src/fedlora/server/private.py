"""The round that uses its uploads only in one noised sum of clipped changes, and keeps no upload.

    v_i = w_i (Q^T (B_i A_i - R_i) P over all modules, the heads' changes)          ||v_i|| <= C
    S   = sum_i round(v_i / gamma) + discrete Gaussian, integers                    stored, charged, then used
    M  <- M + Q (gamma S / (q n)) P^T, cut to R               M: what a client of any rank would start from

or the same of the factors that travel, as the method is `linear_in`. At close M is one term of nobody. Bases come from
the released state, so they are public. Every module and head is in the sum, even if no client holds it. The round
draws the clients to ask, and takes one upload from each. A client that is refused, offline, fails or abstains counts as
zero: there is no quorum, no second draw and no retry, and the `Tally` is empty. What a kill at each step costs:
`privacy.journal`. The server sees every update, and tells
refusals to its operator's log alone; whoever gets its releases (states, readouts, the model) learns little about any
one client.

A plain round replaces M by the clients' mean, and a private one adds their mean change to it. The two agree if every
client started from all of M; they differ where a client's rank is below that of M.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA, change_of
from fedlora.core.messages import Upload
from fedlora.core.method import Method, Roles, Update
from fedlora.core.text import shown
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.linalg import Term, projected_sum, unit_roundoff
from fedlora.linalg.stored import stored_bytes
from fedlora.privacy.geometry import Bases, Layout, bases_of
from fedlora.privacy.mechanism import Mechanism, share_of
from fedlora.privacy.sampling import poisson_sample
from fedlora.server.judged import Judged
from fedlora.server.method_faults import blamed_on, checked_base, checked_effective
from fedlora.server.rounds import OpenRound, RoundKind, Weighting, require_sums
from fedlora.server.state import ServerState, Tally

if TYPE_CHECKING:
    from fedlora.server.server import Server

log = logging.getLogger("fedlora.server")


class Releases(Protocol):
    """Keeps a run's noised sums, each made once; they outlive this process.

    context: a digest of the round's starting point. A sum with another one is refused: a round has one release.
    """

    def stored(self, round: int, context: str) -> Tensor | None:
        """The noised sum of `round` (from 1), int64 (d,), charged by the time it returns; None if none was made."""

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism, sampling: float) -> Tensor:
        """Store and charge the sum before anything of it is released; returns the sum to release. sampling: q, each
        client's chance to take part.

        Raises:
            BudgetSpent, LedgerError: nothing was released, and nothing may be released.
        """


@dataclass(frozen=True)
class Private(RoundKind):
    """Bounds one client's effect on what is released, by public constants.

    Adjacency: one client's contribution to the run is present, or is zero. Everything that scales or shapes a
    contribution is a public constant: anything that depends on who took part, or on what others sent, would break the
    bound. So there is no quorum and no rule.

    Args:
        clip: C, the largest norm of one client's change, over all modules and heads together. noise_multiplier: z, the
            noise's standard deviation in units of one client's largest effect; 0 is for tests and audits.
        clients: the ids of all clients, taking part or not: n public names. Uploads from anybody else are refused.
        rank: R of the next state; it cuts noised products. releases: stores and charges noised sums.
        dims: how many directions of each side of a module changes of products are summed in (`privacy.geometry`); None:
            all.
        sampling: q, each client's chance to be asked in a round, which makes the draw itself (`OpenRound.asked`); 1:
            all of them, always. The mean change is the noised sum / (q n), whoever came.
        most_examples: n_max; a client counts min(n_i, n_max) / n_max; None: 1.
        warm_start: the start is a trained adapter, and either it never saw these clients' data, or the ledger was
            charged for it. seed: of the public random directions.

    Raises:
        HyperparameterError: an impossible value.

    Example:
        >>> class InMemory:
        ...     def stored(self, round, context):
        ...         return None
        ...     def settle(self, round, context, noised, mechanism, sampling):
        ...         return noised  # a real one stores it, and charges a ledger
        >>> private = Private(1.0, 0.0, ("site-1", "site-2"), rank=4, releases=InMemory())
        >>> server = Server(build("glora"), round=private)
        >>> server.aggregate(server.init(seed_adapter), uploads).tally.weights
        {}
    """

    clip: float
    noise_multiplier: float
    clients: tuple[str, ...]
    rank: int
    releases: Releases
    dims: int | None = None
    sampling: float = 1.0
    most_examples: float | None = None
    warm_start: bool = False
    seed: int = 0

    quorum = 0  # no number of uploads is too few, and a bad one does not end the round

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", _population(self.clients))
        for name, value in (("rank", self.rank), ("dims", 1 if self.dims is None else self.dims)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise HyperparameterError(f"Private: {name} is a whole number >= 1; got {value!r}.")
        if not 0 < self.clip < math.inf:
            raise HyperparameterError(f"Private: clip is a positive norm; got {self.clip!r}.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise HyperparameterError(f"Private: noise_multiplier is a number >= 0; got {self.noise_multiplier!r}.")
        if not 0 < self.sampling <= 1:
            raise HyperparameterError(f"Private: sampling is a chance in (0, 1]; got {self.sampling!r}.")
        if self.most_examples is not None and not 0 < self.most_examples < math.inf:
            raise HyperparameterError(f"Private: most_examples is a positive number or None; got {self.most_examples}.")

    @property
    def weighs_by(self) -> Weighting:
        return "uniform" if self.most_examples is None else "examples"

    @property
    def denominator(self) -> float:
        """q n, the public divisor of the sum, whoever came."""
        return self.sampling * len(self.clients)

    def require(self, method: Method[Any], roles: Roles) -> None:
        require_sums("Private", method)
        if method.linear_in == "factors" and self.dims is not None:
            raise HyperparameterError(
                f"{method.name} sums the changes of factors, which have no directions to choose: leave shape and dims "
                f"out."
            )

    def require_start(self, start: Adapter) -> None:
        """Raises `HyperparameterError` if the start would release what was learned from somebody."""
        trained = [name for name, lora in start.modules.items() if bool(lora.factors[0].any())]
        if trained and not self.warm_start:
            raise HyperparameterError(
                f"Server: the start is a trained adapter ({trained[0]!r} and {len(trained) - 1} more have B != 0), and "
                f"the first download releases what it learned. If it never saw these clients' data, or the ledger was "
                f"charged for it, set Private(warm_start=True); otherwise start from B = 0."
            )

    def mechanism(self, size: int) -> Mechanism:
        """The mechanism for vectors of `size` entries. Raises `HyperparameterError` if integers cannot hold sums."""
        mechanism = Mechanism.of(self.clip, self.noise_multiplier, size)
        mechanism.check_room(size, len(self.clients))
        return mechanism

    def open(self, server: Server, state: ServerState) -> PrivateRound:
        return PrivateRound(server, state, self)


def _population(clients: Any) -> tuple[str, ...]:
    """The sorted ids. Raises `HyperparameterError`."""
    named = list(clients) if isinstance(clients, Sequence) and not isinstance(clients, str) else []
    if not named or not all(isinstance(name, str) and name for name in named):
        raise HyperparameterError(
            f"Private: clients are the ids of all clients, as ('north', 'south'); got {clients!r:.80}. Uploads of "
            f"others do not count, and the mean divides by the number of ids."
        )
    if len(set(named)) < len(named):
        raise HyperparameterError(f"Private: {len(named) - len(set(named))} clients are named twice.")
    return tuple(sorted(named))


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
        self._heard: set[str] = set()
        self._changes: Mapping[str, LoRA] = {}
        self._of_heads: Mapping[str, Tensor] = {}
        self._released = options.releases.stored(self.number, self._context)
        self.stored = self._released is not None
        self._asked: tuple[str, ...] | None = () if self.stored else None
        if self._released is not None and self._released.shape != self._total.shape:
            raise HyperparameterError(
                f"the noised sum of round {self.number} that was stored has {len(self._released)} numbers, and this "
                f"round's {len(self._total)}: it belongs to another model or configuration. A private run can only "
                f"continue with the same ones."
            )

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
        if self._released is not None:
            raise UploadRefused(client, "the round's noised sum already exists, so nothing can be added.")
        if client not in self._options.clients:
            raise UploadRefused(client, "it is not among the clients that Private(clients=...) names.")
        if client not in self.asked:
            raise UploadRefused(client, "this client was not drawn for this round, and the ledger relies on the draw.")
        if client in self._heard:
            raise UploadRefused(client, "a second upload in the same round; the first one counts.")
        self._heard.add(client)

    def _take(self, upload: Upload, count: float) -> None:
        change, most = self._change(upload), self._options.most_examples
        if not bool(torch.isfinite(change).all()):
            raise UploadRefused(upload.client.id, "its change is beyond float64: NaN or Inf.")
        self._total += self.mechanism.contribution(change, 1.0 if most is None else share_of(count, most))

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

    # ------------------------------------------------------------------------------------- one module's part of the sum

    def _origin(self, name: str) -> LoRA:
        """M: what a client of any rank would start from. Public, like every readout."""
        state, start = self.state.modules[name], self.state.start.modules[name]
        if not self._products:
            with blamed_on(self.method, "readout"):
                M = self.method.readout(state, None, self._rank(name))
            return LoRA(*(M.tensors().get(f) if f in self.roles.shared else None for f in ("B", "A")))
        # The next effective update is base + the round's sum, so the origin is effective less base: all of the update
        # for glora, nothing for flora, which starts afresh on a base that holds everything.
        effective, base = checked_effective(self.method, state, start), checked_base(self.method, state, start)
        if effective is None:
            raise HyperparameterError(f"{self.method.name} keeps no global model, and products have no other origin.")
        return _sum([(1.0, effective)] if base is None else [(1.0, effective), (-1.0, base.total)])

    def _rank(self, module: str) -> int:
        """The start's, the largest of a factor that travels."""
        return self.state.start.modules[module].rank

    def _layout(self) -> Layout:
        """The coordinates of a round; they depend only on the state before it and on public constants."""
        bases, options = {}, self._options
        for name, origin in self._origins.items():
            if self._products:
                bases[name] = bases_of(origin, options.dims, name, self.number, options.seed)
            else:
                bases |= {f"{name}.{factor}": Bases(*t.shape) for factor, t in origin.tensors().items()}
        shared = self.roles.heads == "shared"
        return Layout(bases, {name: tuple(head.shape) for name, head in self.state.heads.items()} if shared else {})

    def _digest(self) -> str:
        """A digest of the round's starting point: the release before it, and every public constant."""
        o = self._options
        constants = (self.number, self.method, self.roles, o.clip, o.noise_multiplier, o.dims, o.clients, o.rank)
        digest = sha256(repr((*constants, o.sampling, o.most_examples, o.seed)).encode())
        tensors = {f"{name}.{f}": t for name, lora in self._origins.items() for f, t in lora.tensors().items()}
        if not self._products:  # a sum of B means nothing beside another A, though A is frozen and not summed
            with blamed_on(self.method, "readout"):
                whole = {name: self.method.readout(s, None, self._rank(name)) for name, s in self.state.modules.items()}
            tensors |= {f"{name}.{f}": t for name, lora in whole.items() for f, t in lora.tensors().items()}
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
            lora, rank = _sum([(1.0, origin), (1.0, change)], self._options.rank), self._options.rank
        else:
            moved = {
                factor: t.double() + self._changes[f"{module}.{factor}"].delta().to(t.device)
                for factor, t in origin.tensors().items()
            }
            lora, rank = LoRA(moved.get("B"), moved.get("A")), origin.rank
        return [Update(None, 1.0, rank, lora.map(lambda t: t.to(like)), unit_roundoff(like.dtype))]

    def _mean_heads(self) -> dict[str, Tensor]:
        heads = self.state.heads
        return {name: (heads[name].double().cpu() + moved).to(heads[name]) for name, moved in self._of_heads.items()}


def _sum(terms: Sequence[tuple[float, LoRA]], rank: int | None = None) -> LoRA:
    """sum_k w_k B_k A_k as one balanced float64 pair, largest first, of its own rank or at most `rank`."""
    spectrum = projected_sum([Term(*lora.factors, w, 0.0) for w, lora in terms], dtype=torch.float64).spectrum
    return LoRA(*(spectrum if rank is None else spectrum.head(rank)).balanced())
