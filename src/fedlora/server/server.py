"""The server: one method applied to all modules, with the checks, weights and heads that methods need not know.

    state = server.init(seed_adapter)                  a value; every call returns a new one
    down  = server.download(state, client)             where that client starts
    state = server.aggregate(state, uploads)           = open(state), add(upload) for each, close()

It knows no engine and no network: simulation and Flower are thin shells around it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA, compute_dtype, filled, fresh_rows, named_tensors
from fedlora.core.messages import Client, Download, Upload
from fedlora.core.method import Method, Role, Roles
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import shown
from fedlora.errors import HyperparameterError, NoGlobalModel, RankMismatch, ShapeError, UploadRefused
from fedlora.linalg.own_modes import own_modes
from fedlora.seeds import derive_seed
from fedlora.server.checks import ranks_of, unserved
from fedlora.server.kept import Kept
from fedlora.server.method_faults import call, checked_readout, checked_states
from fedlora.server.private import Private
from fedlora.server.rounds import OpenRound, RoundKind
from fedlora.server.state import RunState, ServerState

Heads = Literal["average", "local", "frozen"]

log = logging.getLogger("fedlora.server")

_HEAD_ROLE: Mapping[Heads, Role] = {"average": "shared", "local": "local", "frozen": "frozen"}


@dataclass(frozen=True)
class Server:
    """A federated LoRA server.

    Args:
        method: from `fedlora.build(...)`, or any `Method`.
        heads: "average" them by p_i, keep them "local" or "frozen"; None: as the method's roles say.
        seed: of all draws.
        round: `Kept(rule=, weighting=, quorum=)`, `Streamed(weighting=, quorum=)` or `Private(...)`.

    Raises:
        HyperparameterError: this kind of round is wrong for the method, or an impossible option.

    Example:
        >>> server = Server(build("glora", rho=1.0), round=Kept(quorum=2))
        >>> state = server.init(seed_adapter)  # modules of rank 4, B = 0
        >>> state = server.aggregate(state, uploads)  # of clients of ranks 2 and 4
        >>> server.global_update(state)["q"].rank <= 2 + 4
        True
    """

    method: Method[Any]
    heads: Heads | None = None
    seed: int = 0
    round: RoundKind = field(default_factory=Kept)

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise HyperparameterError(f"Server: method is a Method, such as build('glora'); got {self.method!r:.80}.")
        if self.heads not in (*get_args(Heads), None):
            raise HyperparameterError(f"Server: heads is one of {get_args(Heads)}, or None; got {self.heads!r}.")
        self.round.require(self.method, self._roles(0))

    @property
    def privacy(self) -> Private | None:
        """Its rounds' options, if they are private: then records tell nothing about single clients."""
        return self.round if isinstance(self.round, Private) else None

    @own_modes()
    def init(self, seed_adapter: Adapter) -> ServerState:
        """The common start from an adapter of the largest rank: B = 0 for a fresh one, or trained for a warm start.

        Raises:
            ShapeError: no modules, or values that are not finite. FactorNotShared: a factor is missing.
        """
        if not seed_adapter.modules:
            raise ShapeError("the seed adapter has no modules: there is nothing to average.")
        if seed_adapter.base:
            raise ShapeError("the seed adapter belongs to changed base weights; start from `adapter.folded()`.")
        for name, tensor in named_tensors(seed_adapter):
            if not bool(torch.isfinite(tensor).all()):
                raise ShapeError(f"the seed adapter holds NaN or Inf in {name}.")
        if self.privacy is not None:
            self.privacy.require_start(seed_adapter)
        start = {name: self._begun(name, lora) for name, lora in seed_adapter.modules.items()}
        made = [call(self.method, "init", lora) for lora in start.values()]
        modules = dict(zip(start, checked_states(self.method, "init", made, len(start)), strict=True))
        heads = {name: head.detach().clone() for name, head in seed_adapter.heads.items()}
        return ServerState(0, ReadOnly(modules), ReadOnly(heads), Adapter(start, heads), None)

    def roles(self, state: ServerState) -> Roles:
        """Who owns what in the round that starts from `state`."""
        return self._roles(state.round)

    def _roles(self, round: int) -> Roles:
        roles: Roles = replace(call(self.method, "roles", round), moves_base=self.method.moves_base)
        return roles if self.heads is None else replace(roles, heads=_HEAD_ROLE[self.heads])

    @own_modes()
    def download(self, state: ServerState, client: Client) -> Download:
        """The start of `client`'s round: its own copy, at its ranks, every slot trainable. In the server's compute
        dtype: float32, or float64 if an upload or the start is float64. A client that trains in bfloat16 casts it.

        Raises:
            RankMismatch: the method cannot serve that rank. HyperparameterError: no such module.
        """
        roles, ranks = self.roles(state), ranks_of(client, state)
        modules, start, base = {}, {}, {}
        for name, rank in ranks.items():
            seed = state.start.modules[name]
            if why := unserved(self.method, roles, rank, seed.rank):
                raise RankMismatch(f"{client.id}, {name!r}: {why}.")
            if not roles.B == roles.A == "local":
                modules[name] = self._readout(state, name, client.id, rank, roles)
            if "local" in (roles.B, roles.A):
                B, A = (
                    t if role == "local" else None for t, role in zip(seed.factors, (roles.B, roles.A), strict=True)
                )
                start[name] = LoRA(B, A).first(rank).map(Tensor.clone)
            if (change := call(self.method, "base", state.modules[name])) is not None:
                base[name] = change
        heads = {name: head.clone() for name, head in state.heads.items()}
        sent, kept = ({}, heads) if roles.heads == "local" else (heads, {})
        return Download(
            client=client, round=state.round, adapter=Adapter(modules, sent), roles=roles, start=Adapter(start, kept),
            base=ReadOnly(base),
        )  # fmt: skip

    def _readout(self, state: ServerState, module: str, client: str, rank: int, roles: Roles) -> LoRA:
        """The client's own copy of its readout, with its empty slots filled."""
        seed = state.start.modules[module]
        made = call(self.method, "readout", state.modules[module], client, rank)
        lora = checked_readout(self.method, made, seed, rank, roles)
        if roles.both_shared:
            lora = filled(lora, rank, lambda: self._rows(state, module, client, rank))
        return lora.map(Tensor.clone)

    def _rows(self, state: ServerState, module: str, client: str, rank: int) -> Tensor:
        """(rank, d_in): the rows of A for empty slots; in the first round of a fresh start, those of the common one."""
        B, A = state.start.modules[module].factors
        rows = fresh_rows(rank, A.shape[1], self._key(module), state.round, client, like=A)
        if state.round == 0 and not bool(B.any()):
            rows[: len(A)] = A[:rank]
        return rows

    def _begun(self, module: str, seed: LoRA) -> LoRA:
        """A copy of the seed without dead slots, in the dtype that the server computes with."""
        dtype = compute_dtype([seed])
        lora = seed.map(lambda t: t.detach().to(dtype, copy=True))
        A = lora.factors[1]
        return filled(lora, lora.rank, lambda: fresh_rows(*A.shape, self._key(module), like=A))

    def _key(self, module: str) -> int:
        return derive_seed(self.seed, module)

    def open(self, state: ServerState) -> OpenRound:
        """A round that starts from `state`: `add` uploads in any order, then `close`."""
        self.round.require(self.method, self.roles(state))
        return self.round.open(self, state)

    def aggregate(self, state: ServerState, uploads: Iterable[Upload]) -> ServerState:
        """The next state from one round's uploads; the same bits in any order (of a streamed round: up to rounding).

        Raises:
            UploadRefused: a bad upload, if the round has no quorum (`OpenRound`). QuorumNotMet: too few good ones.
                Neither in a private round, where a bad upload counts as zero.
            LostUpdate: from the method.
        """
        opened = self.open(state)
        for upload in uploads:
            try:
                opened.add(upload)
            except UploadRefused as refusal:
                if self.round.quorum is None:
                    raise
                if self.privacy is None:  # a private round logs its own
                    log.warning("round %d: %s", opened.number, shown(refusal, 1000))
        return opened.close()

    @own_modes()
    def global_update(self, state: ServerState) -> Mapping[str, LoRA]:
        """The server's whole update of each module, base change included, for evaluation and export. The caller owns
        the factors.

        Raises:
            NoGlobalModel: the method keeps none.
        """
        updates = {}
        for name, module in state.modules.items():
            effective = call(self.method, "effective", module)
            if effective is None:
                raise NoGlobalModel(
                    f"{self.method.name} keeps no global model: its clients keep a part of every adapter. "
                    f"Evaluate the clients instead (evaluation target 'clients')."
                )
            updates[name] = effective.map(Tensor.clone)
        return ReadOnly(updates)

    def has_global_model(self, state: ServerState) -> bool:
        """Whether `global_update` returns an update."""
        return call(self.method, "effective", next(iter(state.modules.values()))) is not None

    @own_modes()
    def diagnostics(self, state: ServerState) -> Mapping[str, Mapping[str, object]]:
        """Module -> the method's own numbers: rank, server rank R, gap, tied, captured energy, singular values, ..."""
        return {name: call(self.method, "diagnostics", s) for name, s in state.modules.items()}


def start(server: Server, seed_adapter: Adapter) -> RunState:
    """The state before the first round.

    Example:
        >>> begun = start(server, seed_adapter)
        >>> begun.round, dict(begun.clients)
        (0, {})
    """
    return RunState(0, server.init(seed_adapter))
