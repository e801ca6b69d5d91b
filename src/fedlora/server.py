"""The server: one method lifted over all modules, with the checks, weights and heads that no method should see.

    state = server.init(seed_adapter)                  a value; every call returns a new one
    down  = server.download(state, client)             what that client starts from
    state = server.aggregate(state, uploads)           = open(state), add(upload) for each, close()

Knows no engine and no network: simulation and Flower are both thin shells around it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlora.checks import check_adapter, check_count, checked_examples, compute_dtype, named_tensors
from fedlora.client import Client, Download, Upload
from fedlora.errors import HyperparameterError, NoGlobalModel, QuorumNotMet, ShapeError, UploadRefused
from fedlora.lora import Adapter, LoRA
from fedlora.method import Method, Role, Roles, Update, aggregate_all
from fedlora.methods.factors import weighted_mean
from fedlora.parallel import workers
from fedlora.seeds import derive_seed
from fedlora.streaming import FoldingMethod, Stream, size

Heads = Literal["average", "local", "frozen"]
Weighting = Literal["examples", "uniform"]
Missing = Literal["renormalise", "zero"]

log = logging.getLogger(__name__)

# The share of the mean's energy that may be lost without a word, and that may lie where rounding could have put it: the
# second is no loss, and a coarse bound.
LARGEST_SILENT_SHARE, LARGEST_SILENT_ROUNDING = 1e-3, 1e-2

_CAUSES = {
    "incremental": "The memory limit took it: give the server more memory.",
    "two-pass sketch": "The sketch took it: give it a larger rank.",
}
_ROUNDING = 'Rounding took it: send float32, or the subspace form (upload = "subspace").'

_HEAD_ROLE: Mapping[Heads, Role] = {"average": "shared", "local": "local", "frozen": "frozen"}


@dataclass(frozen=True)
class Tally:
    """Who counted in an aggregation. weights: client -> p_i. abstained: sent 0 examples. refused: client -> reason."""

    weights: Mapping[str, float]
    abstained: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that the server remembers.

    modules: module -> the method's own state. start: the common seed adapter. changed: "B", "A" and "heads" -> the
    round that last replaced this part.
    """

    round: int
    modules: Mapping[str, Any]
    heads: Mapping[str, Tensor]
    start: Adapter
    changed: Mapping[str, int]
    tally: Tally | None


@dataclass(frozen=True)
class Server:
    """A federated LoRA server.

    Args:
        method: from `fedlora.build(...)`, or any object of the `Method` protocol.
        weighting: p_i by "examples" or "uniform", normalised over the round's participants.
        heads: "average" them by p_i, keep them "local" or "frozen"; None: as the method's roles say.
        quorum: None raises at the first bad upload. An integer refuses bad uploads one by one (`Tally.refused`) and
            raises `QuorumNotMet` only if fewer good ones are left. So does `aggregate`; `OpenRound.add` raises for each
            bad one, which stays out, and the round goes on.
        missing: a module that some participants do not hold: "renormalise" the weights over those who do, or let the
            others count as a "zero" update.
        seed: of the method's own random draws.
        memory: megabytes that one round's uploads may take here; None: as many as there are. What does not fit is
            folded in as it arrives and dropped (`streaming`): exact while it fits, an approximation beyond, of which
            the diagnostics say what was left out.
        workers: matrices that are aggregated at a time, each on one BLAS thread, with the same bits for any number;
            None: as many as torch has threads.

    Raises:
        HyperparameterError: an impossible option.
    """

    method: Method[Any]
    weighting: Weighting = "examples"
    heads: Heads | None = None
    quorum: int | None = None
    missing: Missing = "renormalise"
    seed: int = 0
    memory: float | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, options in {"weighting": Weighting, "missing": Missing, "heads": Heads}.items():
            value = getattr(self, name)
            if value not in get_args(options) and not (name == "heads" and value is None):
                raise HyperparameterError(f"Server: {name} is one of {get_args(options)}; got {value!r}.")
        if self.quorum is not None and self.quorum < 1:
            raise HyperparameterError(f"Server: quorum is at least 1 accepted upload, or None; got {self.quorum}.")
        if self.workers is not None and self.workers < 1:
            raise HyperparameterError(f"Server: workers is a number of threads >= 1, or None; got {self.workers}.")
        if self.memory is not None and not self.memory > 0:
            raise HyperparameterError(f"Server: memory is a positive number of megabytes, or None; got {self.memory}.")
        if self.memory is not None and not isinstance(self.method, FoldingMethod):
            raise HyperparameterError(
                f"Server: a memory limit ({self.memory:g} MB) needs a method that can forget uploads, which glora can "
                f"and {self.method.name} cannot. Leave memory out, or use glora."
            )
        if self.memory is not None and isinstance(self.method, FoldingMethod):
            self.method.require_folding()

    # ------------------------------------------------------------------------------------------------ the protocol

    def init(self, seed_adapter: Adapter) -> ServerState:
        """The common start from an adapter of the largest rank: B = 0 for a fresh one, or trained for a warm start.

        Raises:
            ShapeError: no modules, a factor missing, or values that are not finite.
        """
        if not seed_adapter.modules:
            raise ShapeError("the seed adapter has no modules: there is nothing to federate.")
        for name, lora in seed_adapter.modules.items():
            if len(lora.tensors()) < 2:
                raise ShapeError(f"the seed adapter's module {name!r} lacks a factor: the common start needs both.")
        for name, tensor in named_tensors(seed_adapter):
            if not bool(torch.isfinite(tensor).all()):
                raise ShapeError(f"the seed adapter holds NaN or Inf in {name}.")
        start = Adapter(
            {
                name: _promoted(lora, compute_dtype(lora)).map(Tensor.clone)
                for name, lora in seed_adapter.modules.items()
            },
            {name: head.detach().clone() for name, head in seed_adapter.heads.items()},
        )
        modules = {name: self.method.init(lora, derive_seed(self.seed, name)) for name, lora in start.modules.items()}
        return ServerState(0, MappingProxyType(modules), start.heads, start, {"B": 0, "A": 0, "heads": 0}, None)

    def roles(self, state: ServerState) -> Roles:
        """Who owns what in the round that starts from `state`."""
        roles = self.method.roles(state.round)
        return roles if self.heads is None else replace(roles, heads=_HEAD_ROLE[self.heads])

    def download(self, state: ServerState, client: Client) -> Download:
        """What `client` starts its round from, at its own ranks, in the server's compute dtype: float32, or float64
        where an upload or the start is. A client that trains in bfloat16 casts it itself.

        Raises:
            RankMismatch: the method cannot serve that rank. HyperparameterError: no such module.
        """
        roles, ranks = self.roles(state), self._ranks(state, client)
        modules, start, base = {}, {}, {}
        for name, rank in ranks.items():
            readout = self.method.readout(state.modules[name], client.id, rank)
            # The client's own: training in place must not reach the state.
            modules[name] = readout.lora if readout.fresh else readout.lora.map(Tensor.clone)
            if readout.base is not None:
                base[name] = readout.base
            B, A = state.start.modules[name].factors
            local = {"B": B[:, :rank] if roles.B == "local" else None, "A": A[:rank] if roles.A == "local" else None}
            if local["B"] is not None or local["A"] is not None:
                start[name] = LoRA(local["B"], local["A"])
        heads = {name: head.clone() for name, head in state.heads.items()}
        sent, kept = ({}, heads) if roles.heads == "local" else (heads, {})
        return Download(
            client=client,
            round=state.round,
            adapter=Adapter(modules, sent),
            roles=roles,
            start=Adapter(start, kept),
            base=MappingProxyType(base),
            changed=state.changed,
        )

    def open(self, state: ServerState) -> OpenRound:
        """A round to `add` uploads to, in any order, and to `close`."""
        return OpenRound(self, state)

    def aggregate(self, state: ServerState, uploads: Iterable[Upload]) -> ServerState:
        """The next state from one round's uploads; the same bits whatever their order (with a memory limit that was
        needed: the same up to rounding and what was left out).

        Raises:
            UploadRefused: a bad upload, where `quorum` is None. QuorumNotMet: too few good ones.
            RankMismatch, RankTie: as the method says.
        """
        opened = self.open(state)
        for upload in uploads:
            try:
                opened.add(upload)
            except UploadRefused as refusal:
                if self.quorum is None:
                    raise
                log.warning("round %d: %s", state.round + 1, refusal)
        return opened.close()

    def global_update(self, state: ServerState) -> Mapping[str, LoRA]:
        """The server's whole update of each module, base change included: what evaluation and export use.

        Raises:
            NoGlobalModel: the method has none.
        """
        updates = {}
        for name, s in state.modules.items():
            effective = self.method.effective(s)
            if effective is None:
                raise NoGlobalModel(
                    f"{self.method.name} keeps no global model: its clients hold part of every adapter themselves. "
                    f"Evaluate the clients instead (evaluation target 'clients')."
                )
            updates[name] = effective
        return MappingProxyType(updates)

    def has_global_model(self, state: ServerState) -> bool:
        """Whether `global_update` has an answer."""
        return self.method.effective(next(iter(state.modules.values()))) is not None

    def diagnostics(self, state: ServerState) -> Mapping[str, Mapping[str, object]]:
        """Module -> the method's own numbers: rank, server rank R, gap, tied, captured energy, singular values, ..."""
        return {name: self.method.diagnostics(s) for name, s in state.modules.items()}

    # ------------------------------------------------------------------------------------------------------ inside

    def _ranks(self, state: ServerState, client: Client) -> dict[str, int]:
        if isinstance(client.rank, Mapping):
            unknown = sorted(set(client.rank) - set(state.modules))
            if unknown:
                raise HyperparameterError(
                    f"client {client.id!r} declares a rank for {unknown[0]!r}, which is no adapted module. "
                    f"The modules are {', '.join(list(state.modules)[:3])}, ..."
                )
        return client.ranks(state.modules)


class OpenRound:
    """One round's uploads being collected: the only mutable thing here, used up by `close`."""

    def __init__(self, server: Server, state: ServerState) -> None:
        self._server = server
        self._state = state
        self._roles = server.roles(state)
        self._accepted: dict[str, Upload] = {}  # those held
        self._ranks: dict[str, Mapping[str, int]] = {}  # theirs
        self._counts: dict[str, float] = {}  # of all that were accepted
        self._size = 0
        self._stream = None
        if server.memory is not None and isinstance(server.method, FoldingMethod):
            self._stream = Stream(server.method, state.start, server.memory * 2**20)
        self._abstained: set[str] = set()
        self._refused: dict[str, str] = {}

    def add(self, upload: Upload) -> None:
        """Accept one upload, or record and raise why not. Nothing of a refused upload reaches the state.

        Raises:
            UploadRefused: with the client id and the reason.
        """
        if not self.check(upload):
            return
        self._accepted[upload.client.id] = upload
        self._ranks[upload.client.id] = upload.client.ranks(self._state.modules)
        self._size += size(upload)
        if self._stream is not None and self._size > self._stream.room:
            self._fold(self._stream)

    def check(self, upload: Upload) -> bool:
        """Whether the upload counts (False: it abstained), and from now on it does. Raises as `add`."""
        client = upload.client.id
        try:
            if client in self._counts or client in self._abstained:
                raise UploadRefused(client, "a second upload in the same round; the first one stands.")
            if checked_examples(upload) == 0:
                self._abstained.add(client)
                return False
            if self._stream is not None:
                check_count(upload)
            self._check_adapter(upload)
        except UploadRefused as refusal:
            self._refused.setdefault(client, refusal.reason)
            raise
        self._counts[client] = float(upload.num_examples) if self._server.weighting == "examples" else 1.0
        return True

    @property
    def nbytes(self) -> int:
        """Bytes held for the round: of the uploads, and of what earlier ones were folded into."""
        return self._size + (self._stream.nbytes if self._stream is not None else 0)

    def _fold(self, stream: Stream) -> None:
        """Fold in the uploads that are held, and drop them."""
        uploads = [self._accepted[c] for c in sorted(self._accepted)]
        shared = self._roles.heads == "shared"
        with workers(self._server.workers) as each:
            stream.take(
                {name: self._updates(name, uploads, self._counts) for name in self._state.modules},
                [(u.adapter.heads, self._counts[u.client.id]) for u in uploads if shared],
                each,
            )
        self._accepted, self._ranks, self._size = {}, {}, 0

    def _check_adapter(self, upload: Upload) -> None:
        try:
            ranks = self._server._ranks(self._state, upload.client)
        except HyperparameterError as error:
            raise UploadRefused(upload.client.id, str(error)) from error
        check_adapter(upload, ranks=ranks, roles=self._roles, start=self._state.start, heads=self._state.heads)

    def close(self) -> ServerState:
        """The next state. Uploads are taken in the order of client ids, whatever order they came in.

        Raises:
            QuorumNotMet: fewer accepted uploads than the quorum (at least one).
        """
        server, state, counts = self._server, self._state, dict(sorted(self._counts.items()))
        quorum = server.quorum or 1
        if len(counts) < quorum:
            refused = "; ".join(f"{c}: {why}" for c, why in sorted(self._refused.items())) or "none"
            raise QuorumNotMet(
                f"round {state.round + 1}: {len(counts)} usable uploads, the quorum is {quorum} "
                f"({len(self._abstained)} abstained; refused: {refused}). The state is unchanged."
            )
        weights = shares(counts)
        modules, heads = self._folded() if self._stream and self._stream.used else self._whole(counts)
        made = state.round + 1
        warn_of_losses(server.method, made, modules)
        replaced = {part: made for part in state.changed if getattr(self._roles, part) == "shared"}
        return replace(
            state,
            round=made,
            modules=MappingProxyType(modules),
            heads=MappingProxyType(dict(heads)),
            changed={**state.changed, **replaced},
            tally=Tally(weights, tuple(sorted(self._abstained)), dict(sorted(self._refused.items()))),
        )

    def _whole(self, counts: Mapping[str, float]) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """The next modules and heads from uploads that are all held."""
        server, state = self._server, self._state
        uploads = [self._accepted[c] for c in counts]
        updates = {}
        for name in state.modules:
            over = [u for u in uploads if name in u.adapter.modules] if server.missing == "renormalise" else uploads
            if any(name in u.adapter.modules for u in uploads):
                updates[name] = self._updates(name, uploads, shares({u.client.id: counts[u.client.id] for u in over}))
        with workers(server.workers) as each:
            after = aggregate_all(
                server.method, [state.modules[name] for name in updates], list(updates.values()), each
            )
        heads = state.heads
        if self._roles.heads == "shared":
            weights = list(shares(counts).values())
            heads = {
                name: _mean_head([u.adapter.heads[name] for u in uploads], weights, like=head)
                for name, head in state.heads.items()
            }
        return {**state.modules, **dict(zip(updates, after, strict=True))}, heads

    def _folded(self) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """The next modules and heads from uploads of which some were folded in and dropped."""
        stream, state = self._stream, self._state
        assert stream is not None
        self._fold(stream)
        everyone = math.fsum(self._counts.values())
        with workers(self._server.workers) as each:
            modules = stream.modules(state.modules, everyone if self._server.missing == "zero" else None, each)
        return modules, stream.heads(state.heads, everyone) if self._roles.heads == "shared" else state.heads

    def _updates(self, name: str, uploads: Sequence[Upload], weights: Mapping[str, float]) -> list[Update]:
        """What those of the clients that hold this module sent for it."""
        held = [u for u in uploads if name in u.adapter.modules]
        if not held:
            return []
        dtype = reduce(torch.promote_types, (compute_dtype(u.adapter.modules[name]) for u in held))
        updates = []
        for u in held:
            lora, r = u.adapter.modules[name], self._ranks[u.client.id][name]
            updates.append(Update(u.client.id, weights[u.client.id], r, _promoted(lora, dtype), _stored_dtype(lora)))
        return updates


def warn_of_losses(method: Method[Any], round: int, modules: Mapping[str, Any]) -> None:
    """Logs a warning where a method says that its result lacks part of the mean update that no budget took."""
    facts = {name: method.diagnostics(state) for name, state in modules.items()}

    def worst(key: str, least: float) -> tuple[str, float, int] | None:
        """The module with most of it, how much, and in how many modules there is more than `least`."""
        shares = {name: x for name, f in facts.items() if isinstance(x := f.get(key), float) and x > least}
        name = max(shares, key=lambda n: shares[n], default="")
        return (name, shares[name], len(shares)) if shares else None

    if found := worst("dropped", LARGEST_SILENT_SHARE):
        name, share, count = found
        why = _CAUSES.get(str(facts[name].get("approximation")), _ROUNDING)
        kept = facts[name].get("kept")
        held = f" (it holds {kept:.0%} of the clients' subspaces)" if isinstance(kept, float) and kept < 1 else ""
        log.warning(
            "round %d: up to %.2g%% of the mean's energy is lost in %s%s, more than %g%% in %d of %d modules. %s",
            round, 100 * share, name, held, 100 * LARGEST_SILENT_SHARE, count, len(modules), why,
        )  # fmt: skip
    if found := worst("rounding", LARGEST_SILENT_ROUNDING):
        name, share, count = found
        log.warning(
            "round %d: up to %.2g%% of the mean update's energy in %s (%d of %d modules) lies in directions so weak "
            "beside the clients' factors that storing these could have made them. The server keeps them; readouts hold "
            "some that depend on the clients' coordinates. Send float32, or the subspace form (upload = \"subspace\").",
            round, 100 * share, name, count, len(modules),
        )  # fmt: skip


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Client -> its share of the counts; also where they have no finite sum."""
    top = 1.0 if math.isfinite(sum(counts.values())) else max(counts.values())
    total = math.fsum(n / top for n in counts.values())
    return {client: n / top / total for client, n in counts.items()}


def _stored_dtype(lora: LoRA) -> torch.dtype:
    """The narrower of the dtypes in which the factors arrived."""
    return max((t.dtype for t in lora.tensors().values()), key=lambda d: torch.finfo(d).eps)


def _promoted(lora: LoRA, dtype: torch.dtype) -> LoRA:
    if all(t.dtype == dtype and not t.requires_grad for t in lora.tensors().values()):
        return lora
    return lora.map(lambda t: t.detach().to(dtype))


def _mean_head(heads: list[Tensor], weights: list[float], like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return weighted_mean([h.detach().to(dtype) for h in heads], weights).to(like.dtype)
