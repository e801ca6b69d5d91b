"""How far a server's result is from what it should be: exactness against the true mean, drift under a change of gauge.

`audit` asks both of one method on given uploads, whatever made them. Everything is measured on factor pairs: ||X -
Y||_F of two updates is the norm of one stacked pair, never a dense one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.client import Upload, send
from fedlora.errors import FedLoRAError, NoGlobalModel, ShapeError
from fedlora.linalg import rank_tolerance, svd_of_product
from fedlora.lora import Adapter, LoRA, stack
from fedlora.method import Method, Readout
from fedlora.methods.padded_average import PaddedAverage
from fedlora.methods.spectral import instantiate
from fedlora.seeds import derive_seed
from fedlora.server import Server, ServerState


def relative_difference(got: Mapping[str, LoRA], want: Mapping[str, LoRA]) -> float:
    """||got - want||_F / ||want||_F over all modules together; inf where want is zero and got is not."""
    gap = math.fsum(stack([got[m], want[m]], [1.0, -1.0]).norm() ** 2 for m in want)
    size = math.fsum(want[m].norm() ** 2 for m in want)
    return math.sqrt(gap / size) if size else (math.inf if gap else 0.0)


def mean_update(uploads: Sequence[Upload], weights: Mapping[str, float]) -> dict[str, LoRA]:
    """Module -> sum_i p_i B_i A_i as one stacked pair, p_i normalised over those who hold the module."""
    counted = [u for u in uploads if u.client.id in weights]
    means = {}
    for name in sorted({name for u in counted for name in u.adapter.modules}):
        held = [u for u in counted if name in u.adapter.modules]
        total = math.fsum(weights[u.client.id] for u in held)
        means[name] = stack([u.adapter.modules[name] for u in held], [weights[u.client.id] / total for u in held])
    return means


def padded_average_error(state: ServerState, uploads: Sequence[Upload], weights: Mapping[str, float]) -> float:
    """The relative error that zero-padded factor averaging would have made on these uploads, against the true mean."""
    server = Server(PaddedAverage(), heads="frozen")
    accepted = [
        replace(u, num_examples=weights[u.client.id], adapter=Adapter(u.adapter.modules))
        for u in uploads
        if u.client.id in weights
    ]
    averaged = server.aggregate(server.init(Adapter(state.start.modules)), accepted)
    return relative_difference(server.global_update(averaged), mean_update(accepted, weights))


def random_gauge(rank: int, condition: float, *seed: str | int) -> Tensor:
    """An invertible Q (rank, rank), float64, of that 2-norm condition: orthogonal x geometric x orthogonal."""
    generator = torch.Generator().manual_seed(derive_seed("gauge", *seed))
    left, right = (
        torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q for _ in range(2)
    )
    sizes = torch.logspace(0.5, -0.5, rank, base=condition, dtype=torch.float64)
    Q: Tensor = left * sizes @ right
    return Q


def regauge(upload: Upload, condition: float, *, seed: int = 0) -> Upload:
    """The same update in random coordinates: each (B, A) as (B Q, Q^-1 A), in float64 so that storing costs nothing."""

    def move(name: str, lora: LoRA) -> LoRA:
        B, A = (t.double() for t in lora.factors)
        Q = random_gauge(lora.rank, condition, seed, upload.client.id, name)
        return LoRA(B @ Q, torch.linalg.solve(Q, A))

    modules = {name: move(name, lora) for name, lora in upload.adapter.modules.items()}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def gauge_drift(server: Server, state: ServerState, uploads: Sequence[Upload], *, condition: float = 10.0) -> float:
    """How far, relatively, the server's model moves when clients re-express their updates in random coordinates."""
    plain = server.aggregate(state, [replace(u, adapter=u.adapter.map(lambda t: t.double())) for u in uploads])
    moved = server.aggregate(state, [regauge(u, condition) for u in uploads])
    return relative_difference(server.global_update(moved), server.global_update(plain))


# ---------------------------------------------------------------------------------------------------- a whole method


@dataclass(frozen=True)
class Audit:
    """What one method makes of one round's uploads.

    error: of the server's update against the true mean, relative. drift: condition of the random gauges -> the largest
    relative change of the server's update over the draws; None where one factor travels, which leaves no gauge to
    change. readout_drift: the same of what each client starts from, the largest over clients too. modules: module ->
    the method's diagnostics. refused: why the method cannot take these uploads; the rest is empty then.
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
    """What `method` makes of `uploads`, complete adapters of any ranks, and of the same ones in other coordinates.

    The server starts from the best common adapter of the uploads' rank, so that methods that compare with what they
    sent have something to compare with. A method that freezes A can only take uploads which share theirs.
    """
    bare = [replace(u, adapter=Adapter(u.adapter.modules).map(Tensor.double)) for u in uploads]
    server = Server(method, heads="frozen")
    state = server.init(_common_start(bare))
    roles = server.roles(state)
    one_factor = (roles.B, roles.A) != ("shared", "shared")
    try:
        if not server.has_global_model(state):
            raise NoGlobalModel("it keeps no global model: part of every adapter stays with its client.")
        if one_factor:
            _require_common("A" if roles.A == "frozen" else "B", bare)
        sent = [replace(u, adapter=send(u.adapter, roles)) for u in bare]
        after = server.aggregate(state, sent)
    except FedLoRAError as refusal:
        return Audit(name, refused=str(refusal))
    tally = after.tally
    assert tally is not None  # aggregate() always counts
    base = {m: change.base.total for m, change in _readouts(server, state).items() if change.base is not None}
    got = server.global_update(after)
    learned = {m: stack([lora, base[m]], [1.0, -1.0]) if m in base else lora for m, lora in got.items()}
    error = relative_difference(learned, mean_update(bare, tally.weights))
    found = Audit(name, error, modules=server.diagnostics(after))
    if one_factor:
        return found
    drift, readout_drift = {}, {}
    plain = {u.client.id: server.download(after, u.client) for u in bare}
    for condition in conditions:
        moves, readout_moves = [], []
        for draw in range(draws):
            moved = server.aggregate(state, [regauge(u, condition, seed=draw) for u in bare])
            moves.append(relative_difference(server.global_update(moved), got))
            for u in bare:
                there, here = server.download(moved, u.client), plain[u.client.id]
                readout_moves.append(relative_difference(there.adapter.modules, here.adapter.modules))
        drift[condition], readout_drift[condition] = max(moves), max(readout_moves)
    return replace(found, drift=drift, readout_drift=readout_drift)


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
