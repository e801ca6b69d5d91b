"""The server: one method applied to all modules, with the checks, weights and heads that methods need not know.

    state = server.init(seed_adapter)                  a value; every call returns a new one
    down  = server.download(state, client)             where that client starts
    state = server.aggregate(state, uploads)           = open(state), add(upload) for each, close()

It knows no engine and no network: simulation and Flower are thin shells around it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating
from fedlora.core.lora import Adapter, LoRA, compute_dtype, named_tensors
from fedlora.core.messages import Client, Download, Missing, Upload
from fedlora.core.method import Method, Role, Roles
from fedlora.core.multiplied import TakesMultipliers
from fedlora.core.read_only import ReadOnly
from fedlora.errors import HyperparameterError, NoGlobalModel, ShapeError, UploadRefused
from fedlora.linalg.own_modes import own_modes
from fedlora.seeds import derive_seed
from fedlora.server.intake import Intake, take_in
from fedlora.server.judging import require_products
from fedlora.server.kept_uploads import promoted
from fedlora.server.method_faults import (
    blamed_on,
    checked_diagnostics,
    checked_roles,
    checked_state,
    checked_update,
    readouts,
)
from fedlora.server.private_options import Privacy, require_private
from fedlora.server.private_round import PrivateRound
from fedlora.server.robust_rules.rule import Rule
from fedlora.server.state import RunState, ServerState
from fedlora.server.terms import Terms, Weighting, ranks_of, weighs_by
from fedlora.server.uploads import Uploads, summing

Heads = Literal["average", "local", "frozen"]

log = logging.getLogger("fedlora.server")

_HEAD_ROLE: Mapping[Heads, Role] = {"average": "shared", "local": "local", "frozen": "frozen"}


@dataclass(frozen=True)
class Server:
    """A federated LoRA server.

    Args:
        method: from `fedlora.build(...)`, or any object of the `Method` protocol.
        weighting: p_i by "examples" or "uniform", normalised over the round's participants; None: "uniform" with a
            rule, because liars may lie about their examples, otherwise "examples".
        heads: "average" them by p_i, keep them "local" or "frozen"; None: as the method's roles say.
        quorum: None raises at the first bad upload. An integer refuses bad uploads one by one (`Tally.refused`) and
            raises `QuorumNotMet` only if fewer good ones remain. `aggregate` does both; in an open round, as on
            Flower, `add` raises for each bad upload, which is left out, the round continues, and None counts as 1.
        missing: for a module that some participants do not hold: "renormalise" the weights over the holders, or count
            the others as a "zero" update.
        seed: of the method's own random draws.
        memory: megabytes that one round's uploads may take here; None: no limit. Once uploads fill half of it, the
            server adds them up in float64 and drops them (`uploads`): the same result up to rounding, for any number of
            clients. For methods that need only sums (`core.summing`).
        privacy: rounds of one clipped and noised sum (`private_round`), so that releases say little about any one
            client. Needs missing = "zero", and no quorum: bad uploads count as zero, and no round is left out.
        rule: one robust rule (`robust_rules`), as [defence] in a run or federation: it gives each client's change its
            own weight, and `Tally.judged` reports the weights.
        workers: the number of matrices aggregated at a time, each on one BLAS thread, with the same bits for any
            number; None: torch's number of threads.

    Raises:
        HyperparameterError: an impossible option.

    Example:
        >>> server = Server(build("glora", rho=1.0), quorum=2)
        >>> state = server.init(seed_adapter)  # modules of rank 4, B = 0
        >>> state = server.aggregate(state, uploads)  # of clients of ranks 2 and 4
        >>> server.global_update(state)["q"].rank <= 2 + 4
        True
    """

    method: Method[Any]
    weighting: Weighting | None = None
    heads: Heads | None = None
    quorum: int | None = None
    missing: Missing = "renormalise"
    seed: int = 0
    memory: float | None = None
    workers: int | None = None
    privacy: Privacy | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.method, str | type):
            raise HyperparameterError(f"Server: method must be an object such as build('glora'); got {self.method!r}.")
        for name, options in {"weighting": Weighting, "missing": Missing, "heads": Heads}.items():
            value = getattr(self, name)
            if value not in get_args(options) and not (name in ("heads", "weighting") and value is None):
                raise HyperparameterError(f"Server: {name} is one of {get_args(options)}; got {value!r}.")
        for name in ("quorum", "workers"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise HyperparameterError(f"Server: {name} is a whole number, or None; got {value!r}.")
        if self.quorum is not None and self.quorum < 1:
            raise HyperparameterError(f"Server: quorum is at least 1 accepted upload, or None; got {self.quorum}.")
        if self.workers is not None and self.workers < 1:
            raise HyperparameterError(f"Server: workers is a number of threads >= 1, or None; got {self.workers}.")
        if self.memory is not None and not 0 < self.memory < math.inf:
            raise HyperparameterError(f"Server: memory is a positive number of megabytes, or None; got {self.memory}.")
        if self.memory is not None:
            summing(self.method, self.memory)
        if self.rule is not None:
            self._check_rule(self.rule)
        if self.privacy is not None:
            self._accumulating(self.privacy)

    def _check_rule(self, rule: Rule) -> None:
        """Raises `HyperparameterError` if the robust rule cannot work with the other options."""
        if not isinstance(rule, Rule):
            raise HyperparameterError(f"Server: rule is a robust rule, as Krum(liars=1), or None; got {rule!r:.80}.")
        beside = {
            "memory": "with a memory limit the server adds uploads up as they come and forgets them",
            "privacy": "weights that depend on the clients' data are not private",
        }
        for option, why in beside.items():
            if getattr(self, option) is not None:
                raise HyperparameterError(
                    f"Server: {rule.name} compares the changes of all clients of a round, and {why}: leave out "
                    f"{option}, or the rule."
                )
        if isinstance(self.method, TakesMultipliers):
            self.method.require_multipliers()
        require_products(rule, self.method, self._roles(0))

    @property
    def weighs_by(self) -> Weighting:
        """`weighting`, or the default that replaces None."""
        return weighs_by(self.weighting, self.rule is not None)

    def _accumulating(self, privacy: Privacy) -> Accumulating[Any]:
        """The method, if its rounds can be private with these options."""
        beside = [name for name in ("quorum", "memory", "rule") if getattr(self, name) is not None]
        return require_private(privacy, self.method, self.missing, self.weighs_by, beside)

    # ------------------------------------------------------------------------------------------------ the protocol

    @own_modes()
    def init(self, seed_adapter: Adapter) -> ServerState:
        """The common start from an adapter of the largest rank: B = 0 for a fresh one, or trained for a warm start.

        Raises:
            ShapeError: no modules, a factor missing, or values that are not finite.
        """
        if not seed_adapter.modules:
            raise ShapeError("the seed adapter has no modules: there is nothing to average.")
        for name, lora in seed_adapter.modules.items():
            if len(lora.tensors()) < 2:
                raise ShapeError(f"the seed adapter's module {name!r} lacks a factor: the common start needs both.")
        if seed_adapter.base:
            raise ShapeError("the seed adapter belongs to changed base weights; start from `adapter.folded()`.")
        for name, tensor in named_tensors(seed_adapter):
            if not bool(torch.isfinite(tensor).all()):
                raise ShapeError(f"the seed adapter holds NaN or Inf in {name}.")
        if self.privacy is not None and not self.privacy.warm_start:
            trained = [name for name, lora in seed_adapter.modules.items() if bool(lora.factors[0].any())]
            if trained:
                raise HyperparameterError(
                    f"Server: the start is a trained adapter ({trained[0]!r} and {len(trained) - 1} more have B != 0), "
                    f"and the first download releases what it learned. If it never saw these clients' data, or the "
                    f"ledger was charged for it, set Privacy(warm_start=True); otherwise start from B = 0."
                )
        start = Adapter(
            {
                name: promoted(lora, compute_dtype(lora)).map(Tensor.clone)
                for name, lora in seed_adapter.modules.items()
            },
            {name: head.detach().clone() for name, head in seed_adapter.heads.items()},
        )
        with blamed_on(self.method, "init"):
            modules = {
                name: checked_state(self.method, "init", self.method.init(lora, derive_seed(self.seed, name)))
                for name, lora in start.modules.items()
            }
        return ServerState(0, ReadOnly(modules), start.heads, start, None)

    def roles(self, state: ServerState) -> Roles:
        """Who owns what in the round that starts from `state`."""
        return self._roles(state.round)

    def _roles(self, round: int) -> Roles:
        with blamed_on(self.method, "roles"):
            roles = checked_roles(self.method, self.method.roles(round))
        return roles if self.heads is None else replace(roles, heads=_HEAD_ROLE[self.heads])

    @own_modes()
    def download(self, state: ServerState, client: Client) -> Download:
        """The start of `client`'s round, at its own ranks, in the server's compute dtype: float32, or float64 if an
        upload or the start is float64. A client that trains in bfloat16 casts it itself.

        Raises:
            RankMismatch: the method cannot serve that rank. HyperparameterError: no such module.
        """
        roles, ranks = self.roles(state), ranks_of(client, state)
        modules, start, base = {}, {}, {}
        for name, readout in readouts(self.method, state.modules, state.start, client.id, ranks, roles).items():
            rank = ranks[name]
            # Give the client its own copy: training in place must not change the state.
            modules[name] = readout.lora if readout.fresh else readout.lora.map(Tensor.clone)
            if readout.base is not None:
                base[name] = readout.base
            B, A = state.start.modules[name].factors
            local = {
                "B": B[:, :rank].clone() if roles.B == "local" else None,
                "A": A[:rank].clone() if roles.A == "local" else None,
            }
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
            base=ReadOnly(base),
        )

    def terms(self, state: ServerState) -> Terms:
        """The terms of the round that starts from `state`: what an upload must be, and how it counts."""
        roles = self.roles(state)
        if self.rule is not None:
            require_products(self.rule, self.method, roles)
        return Terms(
            self.method,
            state,
            roles,
            self.weighs_by,
            self.missing,
            self.quorum,
            self.workers,
            self.rule,
        )

    def open(self, state: ServerState) -> Intake:
        """A round: `add` uploads in any order, then `close`. An `Intake` that depends on the server's options.

        Raises:
            HyperparameterError: the memory limit has no room for one client, or the disk none for the sums.
        """
        terms = self.terms(state)
        if self.privacy is not None:
            return PrivateRound(terms, self._accumulating(self.privacy), self.privacy)
        return Uploads(terms, None if self.memory is None else self.memory * 2**20)

    @own_modes()
    def aggregate(self, state: ServerState, uploads: Iterable[Upload]) -> ServerState:
        """The next state from one round's uploads; the same bits in any order (if a memory limit took effect, the same
        up to rounding).

        Raises:
            UploadRefused: a bad upload, if `quorum` is None. QuorumNotMet: too few good ones. Neither with privacy,
                where a bad upload counts as zero.
            RankMismatch, RankTie: from the method.
        """
        intake = self.open(state)
        told: set[str] = set()
        for taken in take_in(intake, uploads):
            if taken.refusal is not None and self.privacy is None:  # only the diary reports on a private round
                if self.quorum is None:
                    raise taken.refusal
                told.add(taken.refusal.client)
                log.warning("round %d: %s", state.round + 1, taken.refusal)
        after = intake.close()
        for client, reason in after.tally.refused.items() if after.tally is not None else ():
            if client not in told:  # refused only after all uploads were in
                if self.quorum is None:
                    raise UploadRefused(client, reason)
                log.warning("round %d: %s", state.round + 1, UploadRefused(client, reason))
        return after

    @own_modes()
    def global_update(self, state: ServerState) -> Mapping[str, LoRA]:
        """The server's whole update of each module, base change included, for evaluation and export. The caller owns
        the factors.

        Raises:
            NoGlobalModel: the method keeps none.
        """
        updates = {}
        for name, s in state.modules.items():
            with blamed_on(self.method, "effective"):
                effective = self.method.effective(s)
            if effective is None:
                raise NoGlobalModel(
                    f"{self.method.name} keeps no global model: its clients keep a part of every adapter. "
                    f"Evaluate the clients instead (evaluation target 'clients')."
                )
            updates[name] = checked_update(self.method, effective, state.start.modules[name]).map(Tensor.clone)
        return ReadOnly(updates)

    def has_global_model(self, state: ServerState) -> bool:
        """Whether `global_update` returns an update."""
        with blamed_on(self.method, "effective"):
            return self.method.effective(next(iter(state.modules.values()))) is not None

    @own_modes()
    def diagnostics(self, state: ServerState) -> Mapping[str, Mapping[str, object]]:
        """Module -> the method's own numbers: rank, server rank R, gap, tied, captured energy, singular values, ..."""
        return {name: checked_diagnostics(self.method, s) for name, s in state.modules.items()}


def start(server: Server, seed_adapter: Adapter) -> RunState:
    """The state before the first round.

    Example:
        >>> begun = start(server, seed_adapter)
        >>> begun.round, dict(begun.clients)
        (0, {})
    """
    return RunState(0, server.init(seed_adapter))
