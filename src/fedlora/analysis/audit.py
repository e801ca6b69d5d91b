"""How far a server's result is from what it should be: exactness against the true mean, drift under a change of gauge.

`audit` asks both of one method on given uploads, whatever made them. Everything is measured on factor pairs: ||X -
Y||_F of two updates is the norm of one stacked pair, never a dense one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.client import send
from fedlora.core.lora import Adapter, LoRA, stack
from fedlora.core.messages import Upload
from fedlora.core.method import Method, Readout
from fedlora.errors import FedLoRAError, NoGlobalModel, ShapeError
from fedlora.linalg import rank_tolerance, svd_of_product
from fedlora.methods._spectral import instantiate
from fedlora.methods.padded_average import PaddedAverage
from fedlora.seeds import derive_seed
from fedlora.server.server import Server
from fedlora.server.state import ServerState


def relative_difference(got: Mapping[str, LoRA], want: Mapping[str, LoRA]) -> float:
    """||got - want||_F / ||want||_F over all modules together; inf where want is zero and got is not."""
    gap = math.hypot(
        *(stack([got[m].map(Tensor.double), want[m].map(Tensor.double)], [1.0, -1.0]).norm() for m in want)
    )
    size = math.hypot(*(want[m].norm() for m in want))
    return gap / size if size else (math.inf if gap else 0.0)


def mean_update(uploads: Sequence[Upload], weights: Mapping[str, float]) -> dict[str, LoRA]:
    """Module -> sum_i p_i B_i A_i as one stacked pair in float64, p_i normalised over those who hold the module.

    Example:
        >>> mean_update(uploads, {"site-1": 0.5, "site-2": 0.5})["q"].rank  # stacked: 2 + 4
        6
    """
    counted = sorted((u for u in uploads if u.client.id in weights), key=lambda u: u.client.id)
    means = {}
    for name in sorted({name for u in counted for name in u.adapter.modules}):
        held = [u for u in counted if name in u.adapter.modules]
        total = math.fsum(weights[u.client.id] for u in held)
        shares = [weights[u.client.id] / total for u in held]
        means[name] = stack([u.adapter.modules[name].map(Tensor.double) for u in held], shares)
    return means


def padded_average_error(state: ServerState, uploads: Sequence[Upload], weights: Mapping[str, float]) -> float:
    """The relative error that zero-padded factor averaging would have made on these uploads, against the true mean.

    Example:
        >>> padded_average_error(server.init(seed_adapter), uploads, {"site-1": 0.5, "site-2": 0.5}) > 0.01
        True
    """
    server = Server(PaddedAverage(), heads="frozen")
    accepted = [
        replace(u, num_examples=weights[u.client.id], adapter=Adapter(u.adapter.modules))
        for u in uploads
        if u.client.id in weights
    ]
    averaged = server.aggregate(server.init(Adapter(state.start.modules)), accepted)
    return relative_difference(server.global_update(averaged), mean_update(accepted, weights))


MOST = 1e12  # the condition at which float64 (unit round-off 1.1e-16) keeps four digits of an update


def random_gauge(rank: int, condition: float, *seed: str | int) -> Tensor:
    """An invertible Q (rank, rank), float64, of that 2-norm condition: orthogonal x geometric x orthogonal. Raises
    `ValueError` for a condition below 1 or above `MOST`."""
    if not 1 <= condition <= MOST:
        raise ValueError(
            f"a condition must be from 1 to {MOST:g}; got {condition:g}. Beyond it, float64 keeps fewer than "
            f"four digits of an update that is written in them, and soon none."
        )
    generator = torch.Generator().manual_seed(derive_seed("gauge", *seed))
    left, right = (
        torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q for _ in range(2)
    )
    sizes = torch.logspace(0.5, -0.5, rank, base=condition, dtype=torch.float64)
    Q: Tensor = left * sizes @ right
    return Q


def regauge(upload: Upload, condition: float, *, seed: int = 0, as_sent: bool = False) -> Upload:
    """The same update in random coordinates: each (B, A) as (B Q, Q^-1 A).

    In float64, so that storing costs nothing; as_sent: in the dtypes that the upload came in, where storing moves the
    update itself by about u times the condition.
    """

    def move(name: str, lora: LoRA) -> LoRA:
        B, A = (t.double() for t in lora.factors)
        Q = random_gauge(lora.rank, condition, seed, upload.client.id, name)
        moved = LoRA(B @ Q, torch.linalg.solve(Q, A))
        return LoRA(*(t.to(s) for t, s in zip(moved.factors, lora.factors, strict=True))) if as_sent else moved

    modules = {name: move(name, lora) for name, lora in upload.adapter.modules.items()}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


@dataclass(frozen=True)
class GaugeStress:
    """A hook on uploads, for experiments: each is re-expressed in random coordinates, new in every round, in the dtypes
    in which it came. What is averaged means the same, so a method that minds averages coordinates.

    condition: of the coordinates. seed: of the run.
    """

    condition: float
    seed: int

    def __call__(self, upload: Upload, round: int) -> Upload:
        seed = derive_seed(self.seed, "gauge-stress", round)
        return regauge(upload, self.condition, seed=seed, as_sent=True)


def gauge_drift(
    server: Server, state: ServerState, uploads: Sequence[Upload], *, condition: float = 10.0, as_sent: bool = False
) -> float:
    """How far, relatively, the server's model moves when clients re-express their updates in random coordinates.

    A statement about the method, from float64 copies; as_sent: about this server, with the uploads in the dtypes that
    they came in before and after. An exact method then moves as far as `storing_drift` says the mean itself does.

    Example:
        >>> begun = server.init(seed_adapter)
        >>> gauge_drift(Server(build("svd")), begun, uploads) < 1e-9
        True
    """
    before = uploads if as_sent else [replace(u, adapter=u.adapter.map(Tensor.double)) for u in uploads]
    with _without_warnings():
        plain = server.aggregate(state, before)
        moved = server.aggregate(state, [regauge(u, condition, as_sent=as_sent) for u in uploads])
    return relative_difference(server.global_update(moved), server.global_update(plain))


def storing_drift(
    uploads: Sequence[Upload], weights: Mapping[str, float], *, condition: float = 10.0, seed: int = 0
) -> float:
    """How far the float64 mean itself moves when the uploads are stored again, in random coordinates, as they came."""
    moved = [regauge(u, condition, seed=seed, as_sent=True) for u in uploads]
    return relative_difference(mean_update(moved, weights), mean_update(uploads, weights))


# ---------------------------------------------------------------------------------------------------- a whole method


@dataclass(frozen=True)
class Audit:
    """What one method makes of one round's uploads: of float64 copies, which is about the method; and of the uploads as
    they came, in their dtypes, which is about the server (the fields named `sent`).

    error, sent_error: of the server's update against the true mean of the stored factors, relative; None where that
    mean is zero. drift, sent_drift: condition of the random gauges -> the largest relative change of the server's
    update over the draws; None where one factor travels, which leaves no gauge to change, and for a mean of zero.
    storing: how far the mean itself moves when the uploads are stored in those gauges as they came. readout_drift,
    sent_readout_drift: as drift, of what each client starts from, the largest over clients too. zero_mean: the mean
    update is zero up to rounding of its terms. modules: module -> the method's diagnostics. refused: why the method
    cannot take these uploads; the rest is empty then.

    Example:
        >>> from fedlora.analysis.audit import audit
        >>> found = audit("glora", build("glora"), uploads)
        >>> found.error < 1e-12, max(found.drift.values()) < 1e-6  # exact, and blind to coordinates
        (True, True)
    """

    method: str
    error: float | None = None
    drift: Mapping[float, float] | None = None
    readout_drift: Mapping[float, float] | None = None
    modules: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    refused: str | None = None
    sent_error: float | None = None
    sent_drift: Mapping[float, float] | None = None
    sent_readout_drift: Mapping[float, float] | None = None
    storing: Mapping[float, float] | None = None
    zero_mean: bool = False


def audit(
    name: str, method: Method[Any], uploads: Sequence[Upload], *, conditions: Sequence[float] = (10.0,), draws: int = 3
) -> Audit:
    """What `method` makes of `uploads`, complete adapters of any ranks, and of the same ones in other coordinates.

    The server starts from the best common adapter of the uploads' rank, so that methods that compare with what they
    sent have something to compare with. A method that freezes A can only take uploads which share theirs.
    """
    on_w0 = (replace(u, adapter=Adapter(u.adapter.modules, base={})) for u in uploads)
    came = sorted(on_w0, key=lambda u: u.client.id)
    bare = [replace(u, adapter=u.adapter.map(Tensor.double)) for u in came]
    broken = [u.client.id for u in bare if not all(bool(torch.isfinite(t).all()) for t in _tensors(u))]
    if broken:
        return Audit(name, refused=f"the adapter of {broken[0]!r} ({len(broken)} such) holds NaN or Inf.")
    server = Server(method, heads="frozen")
    start = _common_start(bare)
    state = server.init(start)
    roles = server.roles(state)
    one_factor = (roles.B, roles.A) != ("shared", "shared")
    try:
        if not server.has_global_model(state):
            raise NoGlobalModel("it keeps no global model, because part of every adapter stays with its client.")
        if one_factor:
            _require_common("A" if roles.A == "frozen" else "B", bare)
        after = server.aggregate(state, [replace(u, adapter=send(u.adapter, roles)) for u in bare])
        # As they came: from a start of the same dtype, which wide factors would widen.
        wide = any(t.dtype == torch.float64 for u in came for t in _tensors(u))
        plain_state = server.init(start if wide else start.map(Tensor.float))
        as_sent = server.aggregate(plain_state, [replace(u, adapter=send(u.adapter, roles)) for u in came])
    except FedLoRAError as refusal:
        return Audit(name, refused=str(refusal))
    tally = after.tally
    if tally is None:
        raise NoGlobalModel(f"{name} aggregated and kept no tally of who counted, so it cannot be audited.")
    mean = mean_update(bare, tally.weights)
    zero_mean = _is_zero(mean)
    found = Audit(name, modules=server.diagnostics(after), zero_mean=zero_mean)
    if not zero_mean:
        found = replace(
            found,
            error=relative_difference(_learned(server, state, after), mean),
            sent_error=relative_difference(_learned(server, plain_state, as_sent), mean),
        )
    if one_factor or zero_mean:
        return found
    with _without_warnings():  # of coordinates that are bad on purpose
        exact, as_came = (
            {c: _largest([_moves(server, played, c, draw) for draw in range(draws)]) for c in conditions}
            for played in (_Played(state, after, bare, False), _Played(plain_state, as_sent, came, True))
        )
    return replace(
        found,
        drift={c: moves[0] for c, moves in exact.items()},
        readout_drift={c: moves[1] for c, moves in exact.items()},
        sent_drift={c: moves[0] for c, moves in as_came.items()},
        sent_readout_drift={c: moves[1] for c, moves in as_came.items()},
        storing={c: moves[2] for c, moves in as_came.items()},
    )


@dataclass(frozen=True)
class _Played:
    """A round: the server before and after it. as_sent: the uploads keep their dtypes in other coordinates, too."""

    before: ServerState
    after: ServerState
    uploads: Sequence[Upload]
    as_sent: bool


def _moves(server: Server, played: _Played, condition: float, draw: int) -> tuple[float, float, float]:
    """How far three things move with the uploads in other coordinates: the server's update, what clients start from,
    and, as sent, the uploads' mean itself. inf where the uploads' dtype has no room for these coordinates."""
    there = [regauge(u, condition, seed=draw, as_sent=played.as_sent) for u in played.uploads]
    if not all(bool(torch.isfinite(t).all()) for u in there for t in _tensors(u)):
        return math.inf, math.inf, math.inf
    moved = server.aggregate(played.before, there)
    weights = played.after.tally.weights if played.after.tally else {}
    return (
        relative_difference(server.global_update(moved), server.global_update(played.after)),
        max(
            relative_difference(*(server.download(s, u.client).adapter.modules for s in (moved, played.after)))
            for u in played.uploads
        ),
        relative_difference(mean_update(there, weights), mean_update(played.uploads, weights)) if played.as_sent else 0,
    )


def _largest(draws: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    model, readouts, mean = (max(moves) for moves in zip(*draws, strict=True))
    return model, readouts, mean


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The server's warnings are about rounds; these are experiments with one."""
    log = logging.getLogger("fedlora.server")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _learned(server: Server, before: ServerState, after: ServerState) -> dict[str, LoRA]:
    """The server's update after a round, less what the base weight had moved by before it."""
    base = {m: change.base.total for m, change in _readouts(server, before).items() if change.base is not None}
    got = {m: lora.map(Tensor.double) for m, lora in server.global_update(after).items()}
    return {m: stack([lora, base[m].map(Tensor.double)], [1.0, -1.0]) if m in base else lora for m, lora in got.items()}


def _is_zero(mean: Mapping[str, LoRA]) -> bool:
    """Whether an update is nothing but float64 rounding of its terms."""
    for lora in mean.values():
        B, A = lora.factors
        sizes = torch.linalg.vector_norm(B, dim=0) * torch.linalg.vector_norm(A, dim=1)
        if lora.norm() > 64 * torch.finfo(torch.float64).eps * float(torch.linalg.vector_norm(sizes)):
            return False
    return True


def _tensors(upload: Upload) -> list[Tensor]:
    return [t for lora in upload.adapter.modules.values() for t in lora.tensors().values()]


def _common_start(uploads: Sequence[Upload]) -> Adapter:
    """The uploads' uniform mean cut to their largest rank; with their A, where they share one."""
    start = {}
    for name in sorted({name for u in uploads for name in u.adapter.modules}):
        held = [u.adapter.modules[name] for u in uploads if name in u.adapter.modules]
        rank = max(lora.rank for lora in held)
        widest = next(lora for lora in held if lora.rank == rank)
        mean = stack(held, [1 / len(held)] * len(held))
        if _is_common("A", held):
            B = sum(pad(lora.factors[0], (0, rank - lora.rank)) for lora in held) / len(held)
            start[name] = LoRA(torch.as_tensor(B), widest.factors[1])
        else:
            B, A = mean.factors
            spectrum = svd_of_product(B, A, tolerance=rank_tolerance(B.dtype))
            chosen = torch.arange(min(rank, spectrum.sound))
            start[name] = instantiate(spectrum, chosen, rank, split="balanced", start=None, seed=("audit", name))
    return Adapter(start)


def _is_common(factor: str, loras: Sequence[LoRA]) -> bool:
    """Whether all have bitwise the same slots of that factor, as far as each goes."""
    slots = [lora.factors[0].mT if factor == "B" else lora.factors[1] for lora in loras]
    widest = max(slots, key=len)
    return all(torch.equal(s, widest[: len(s)]) for s in slots)


def _require_common(factor: str, uploads: Sequence[Upload]) -> None:
    for name in sorted({name for u in uploads for name in u.adapter.modules}):
        if not _is_common(factor, [u.adapter.modules[name] for u in uploads if name in u.adapter.modules]):
            raise ShapeError(f"it freezes {factor} at one common value, and these adapters differ in theirs.")


def _readouts(server: Server, state: ServerState) -> dict[str, Readout]:
    return {m: server.method.readout(s, None, state.start.modules[m].rank) for m, s in state.modules.items()}
