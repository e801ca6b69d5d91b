"""How far a server's result is off: its error against the true mean, and its drift under a change of gauge.

`audit` measures both for one method on given uploads, whoever made them. It works on factor pairs: ||X - Y||_F of two
updates is the norm of one stacked pair, never of a dense matrix.
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
from fedlora.core.method import Method
from fedlora.errors import FedLoRAError, NoGlobalModel, ShapeError
from fedlora.linalg import svd_of_product
from fedlora.methods.padded_average import PaddedAverage
from fedlora.seeds import derive_seed
from fedlora.server.server import Server
from fedlora.server.state import ServerState


def relative_difference(got: Mapping[str, LoRA], want: Mapping[str, LoRA]) -> float:
    """||got - want||_F / ||want||_F over all modules together; inf if only want is zero."""
    gap = math.hypot(
        *(stack([got[m].map(Tensor.double), want[m].map(Tensor.double)], [1.0, -1.0]).norm() for m in want)
    )
    size = math.hypot(*(want[m].norm() for m in want))
    return gap / size if size else (math.inf if gap else 0.0)


def mean_update(uploads: Sequence[Upload], weights: Mapping[str, float]) -> dict[str, LoRA]:
    """Module -> sum_i p_i B_i A_i as one stacked pair in float64. p_i is normalised over the clients with the module.

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
    """The relative error of zero-padded factor averaging on these uploads, against the true mean.

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
    """A random invertible Q (rank, rank), float64, with this 2-norm condition: orthogonal x geometric x orthogonal.
    Raises `ValueError` for a condition below 1 or above `MOST`."""
    if not 1 <= condition <= MOST:
        raise ValueError(
            f"a condition must be from 1 to {MOST:g}; got {condition:g}. Beyond it, float64 keeps fewer than "
            f"four digits of an update in those coordinates, and soon none."
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

    The result is float64, so storing costs nothing. as_sent: it has the upload's dtypes, and storing moves the update
    itself by about u times the condition.
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
    """A hook on uploads, for experiments: expresses each in random coordinates, new in every round, in its own dtypes.
    The updates mean the same, so a method that depends on coordinates shows it.

    condition: of the coordinates. seed: of the run.
    """

    condition: float
    seed: int

    def __call__(self, upload: Upload, round: int) -> Upload:
        seed = derive_seed(self.seed, "gauge-stress", round)
        return regauge(upload, self.condition, seed=seed, as_sent=True)


def gauge_drift(server: Server, state: ServerState, uploads: Sequence[Upload], *, condition: float = 10.0) -> float:
    """How far, relatively, the server's model moves when clients express float64 copies of their updates in random
    coordinates.

    Example:
        >>> begun = server.init(seed_adapter)
        >>> gauge_drift(Server(build("svd")), begun, uploads) < 1e-9
        True
    """
    with _without_warnings():
        plain = server.aggregate(state, [replace(u, adapter=u.adapter.map(Tensor.double)) for u in uploads])
        moved = server.aggregate(state, [regauge(u, condition) for u in uploads])
    return relative_difference(server.global_update(moved), server.global_update(plain))


# ---------------------------------------------------------------------------------------------------- a whole method


@dataclass(frozen=True)
class Audit:
    """What one method makes of float64 copies of one round's uploads.

    error: the relative error of the server's update against the true mean. drift: condition of the random gauges -> the
    largest relative change of the server's update over the draws; None if one factor travels, so that there is no gauge
    to change. readout_drift: the same for what each client starts from; the largest over clients too. modules: module
    -> the method's diagnostics. refused: why the method cannot take these uploads; all other fields are then empty.

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


def audit(
    name: str, method: Method[Any], uploads: Sequence[Upload], *, conditions: Sequence[float] = (10.0,), draws: int = 3
) -> Audit:
    """What `method` makes of `uploads`, complete adapters of any ranks, and of the same updates in other coordinates.

    The server starts from the best common adapter at the uploads' rank, because some methods compare uploads with what
    the server sent. A method that freezes A accepts only uploads with a common A.
    """
    on_w0 = (replace(u, adapter=Adapter(u.adapter.modules, base={}).map(Tensor.double)) for u in uploads)
    bare = sorted(on_w0, key=lambda u: u.client.id)
    broken = [u.client.id for u in bare if not all(bool(torch.isfinite(t).all()) for t in u.adapter.tensors())]
    if broken:
        return Audit(name, refused=f"the adapter of {broken[0]!r} ({len(broken)} such) holds NaN or Inf.")
    server = Server(method, heads="frozen")
    state = server.init(_common_start(bare))
    roles = server.roles(state)
    one_factor = (roles.B, roles.A) != ("shared", "shared")
    try:
        if not server.has_global_model(state):
            raise NoGlobalModel("it keeps no global model, because part of every adapter stays with its client.")
        if one_factor:
            _require_common("A" if roles.A == "frozen" else "B", bare)
        after = server.aggregate(state, [replace(u, adapter=send(u.adapter, roles)) for u in bare])
    except FedLoRAError as refusal:
        return Audit(name, refused=str(refusal))
    tally = after.tally
    if tally is None:
        raise NoGlobalModel(f"{name} kept no tally of who counted, so it cannot be audited.")
    mean = mean_update(bare, tally.weights)
    found = Audit(name, relative_difference(_learned(server, state, after), mean), modules=server.diagnostics(after))
    if one_factor:
        return found
    drift, readout_drift = {}, {}
    with _without_warnings():  # about coordinates that are bad on purpose
        for c in conditions:
            moved = [server.aggregate(state, [regauge(u, c, seed=draw) for u in bare]) for draw in range(draws)]
            drift[c] = max(relative_difference(server.global_update(s), server.global_update(after)) for s in moved)
            readout_drift[c] = max(
                relative_difference(*(server.download(s, u.client).adapter.modules for s in (other, after)))
                for other in moved for u in bare
            )  # fmt: skip
    return replace(found, drift=drift, readout_drift=readout_drift)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The server warns about rounds; these are experiments with one."""
    log = logging.getLogger("fedlora.server")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _learned(server: Server, before: ServerState, after: ServerState) -> dict[str, LoRA]:
    """The server's update after a round, less the change of the base weight before it."""
    moved = {m: server.method.base(s) for m, s in before.modules.items()}
    base = {m: change.total for m, change in moved.items() if change is not None}
    got = {m: lora.map(Tensor.double) for m, lora in server.global_update(after).items()}
    return {m: stack([lora, base[m].map(Tensor.double)], [1.0, -1.0]) if m in base else lora for m, lora in got.items()}


def _common_start(uploads: Sequence[Upload]) -> Adapter:
    """The uploads' uniform mean cut to their largest rank; with their common A, if they share one."""
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
            spectrum = svd_of_product(B, A)
            B, A = spectrum.head(min(rank, spectrum.sound)).balanced()
            empty = rank - B.shape[1]  # the server fills these slots
            start[name] = LoRA(pad(B, (0, empty)), pad(A, (0, 0, 0, empty)))
    return Adapter(start)


def _is_common(factor: str, loras: Sequence[LoRA]) -> bool:
    """Whether all have bitwise the same slots of that factor, up to the shorter rank."""
    slots = [lora.factors[0].mT if factor == "B" else lora.factors[1] for lora in loras]
    widest = max(slots, key=len)
    return all(torch.equal(s, widest[: len(s)]) for s in slots)


def _require_common(factor: str, uploads: Sequence[Upload]) -> None:
    for name in sorted({name for u in uploads for name in u.adapter.modules}):
        if not _is_common(factor, [u.adapter.modules[name] for u in uploads if name in u.adapter.modules]):
            raise ShapeError(f"it freezes {factor} at one common value, but these adapters have different ones.")
