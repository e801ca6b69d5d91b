"""Is the mean that the server keeps the mean of what the clients sent, and does it know how far off it is?

    python benchmarks/exactness.py [--quick] [--every N] [--json FILE]

One row for each way in which clients can be hard: the dtype that they store in, how many, their weights, their updates,
the server's budget. Each is compared with the dense float64 mean of the factors as they were
uploaded. Beside the server's relative error stand that of a plain QR, QR, SVD in the compute dtype, and what the server
says about itself (`error` in its diagnostics). A row fails where the server is further off than it says, where it says
more than twice of what is true although it holds all uploads, or where nothing was cut and the error exceeds both three
times the plain one and 8 u sum p_i ||B_i|| ||A_i|| / ||mean||.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedlora import Adapter, Client, Kept, LoRA, Server, ServerState, Streamed, Upload, build
from fedlora.errors import RankMismatch
from measure import Goal, Table, on_stderr, report

F64 = torch.float64
DTYPES = {
    "float64": (torch.float64,), "float32": (torch.float32,), "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,), "mixed": (torch.float32, torch.bfloat16, torch.float16),
}  # fmt: skip
CLIENTS = (3, 25, 64, 128, 500)
WEIGHTS = ("equal", "lognormal", "one 1e-4", "one 1e-9")
BUDGETS = ("whole", "cut", "summed")

Pairs = list[tuple[Tensor, Tensor]]  # (B (d_out, r), A (r, d_in)) of each client, float64


@dataclass(frozen=True)
class Row:
    """One hard round."""

    dtype: str
    clients: int
    weights: str
    updates: str
    budget: str


@dataclass(frozen=True)
class Shape:
    """d_out x d_in, and the clients' rank: 1 where there are more than `many`, so that most rounds stay below full."""

    d_out: int
    d_in: int
    rank: int
    many: int

    def rank_of(self, clients: int) -> int:
        return self.rank if clients <= self.many else 1


@dataclass(frozen=True)
class Verdict:
    """Relative errors: true, plain (of QR, QR, SVD), bound; said by the server. failed: why, or empty. known: what a
    float64 sum can know; below it what is said is a bound, most of it 256 u64 of the terms."""

    row: Row
    true: float
    plain: float
    bound: float
    said: float
    dropped: float
    failed: str
    refused: bool = False
    known: float = 0.0


# -------------------------------------------------------------------------------------------------- families of updates


def _normal(n: int, s: Shape, g: torch.Generator) -> Pairs:
    r = s.rank_of(n)
    return [
        (torch.randn(s.d_out, r, generator=g, dtype=F64), torch.randn(r, s.d_in, generator=g, dtype=F64))
        for _ in range(n)
    ]


def _trained_like(n: int, s: Shape, g: torch.Generator) -> Pairs:
    """One common start, steps of a tenth, singular values falling as 1 / j^2, as adapters after some rounds have."""
    (B0, A0), *_ = _normal(1, s, g)
    r = s.rank_of(n)
    fall = torch.arange(1, B0.shape[1] + 1, dtype=F64) ** -2.0
    return [((B0 + 0.1 * B)[:, :r] * fall[:r], (A0 + 0.1 * A)[:r] * 1.0) for B, A in _normal(n, s, g)]


def _sizes(n: int, s: Shape, g: torch.Generator) -> Pairs:
    return [(B * 10.0 ** (k % 3), A) for k, (B, A) in enumerate(_normal(n, s, g))]


def _one_large(n: int, s: Shape, g: torch.Generator) -> Pairs:
    """A hundred in each factor: float16 ends at 65,504."""
    return [(B * 100, A * 100) if k == 1 else (B, A) for k, (B, A) in enumerate(_normal(n, s, g))]


def _near_cancelling(n: int, s: Shape, g: torch.Generator) -> Pairs:
    """Every second client is minus the one before it, up to 1e-3."""
    made: Pairs = []
    for k, (B, A) in enumerate(_normal(n, s, g)):
        made.append((-made[-1][0] * (1 + 1e-3 * torch.rand_like(B, dtype=F64)), made[-1][1]) if k % 2 else (B, A))
    return made


def _deficient_b(n: int, s: Shape, g: torch.Generator) -> Pairs:
    """The last column a mixture of the others, in random coordinates: the stored B has full rank by rounding alone."""
    made = []
    for B, A in _normal(n, s, g):
        if B.shape[1] > 1:
            B[:, -1] = B[:, :-1].sum(dim=1)
        Q = torch.linalg.qr(torch.randn(B.shape[1], B.shape[1], generator=g, dtype=F64)).Q
        made.append((B @ Q, Q.mT @ A))
    return made


def _deficient_a(n: int, s: Shape, g: torch.Generator) -> Pairs:
    made = []
    for B, A in _normal(n, s, g):
        if len(A) > 1:
            A[-1] = A[:-1].sum(dim=0)
        made.append((B, A))
    return made


def _some_zero(n: int, s: Shape, g: torch.Generator) -> Pairs:
    return [(B * 0 if k % 3 == 2 else B, A) for k, (B, A) in enumerate(_normal(n, s, g))]


def _bad_gauge(n: int, s: Shape, g: torch.Generator) -> Pairs:
    """Coordinates of condition 1e3, of which bfloat16 keeps little."""
    made = []
    for B, A in _normal(n, s, g):
        r = B.shape[1]
        left, right = (torch.linalg.qr(torch.randn(r, r, generator=g, dtype=F64)).Q for _ in range(2))
        Q = left * torch.logspace(1.5, -1.5, r, dtype=F64) @ right if r > 1 else torch.full((1, 1), 30.0, dtype=F64)
        made.append((B @ Q, torch.linalg.solve(Q, A)))
    return made


UPDATES: dict[str, Callable[[int, Shape, torch.Generator], Pairs]] = {
    "normal": _normal, "trained-like": _trained_like, "sizes 1/10/100": _sizes, "one x 1e4": _one_large,
    "near-cancelling": _near_cancelling, "deficient B": _deficient_b, "deficient A": _deficient_a,
    "some zero": _some_zero, "bad gauge": _bad_gauge,
}  # fmt: skip


def _counts(kind: str, n: int, g: torch.Generator) -> list[float]:
    """Example counts. The client that "one x 1e4" makes large is the one with the small weight."""
    if kind == "lognormal":
        return [float(x) for x in torch.exp(1.5 * torch.randn(n, generator=g, dtype=F64) + 4)]
    small = {"one 1e-4": 1e-4, "one 1e-9": 1e-9}.get(kind, 1.0)
    return [small if k == 1 else 1.0 for k in range(n)]


def uploads_of(row: Row, shape: Shape, seed: int = 0) -> list[Upload]:
    """The round's uploads, stored in their dtypes."""
    g = torch.Generator().manual_seed(seed)
    kinds = DTYPES[row.dtype]
    made = []
    counts = _counts(row.weights, row.clients, g)
    for k, (B, A) in enumerate(UPDATES[row.updates](row.clients, shape, g)):
        adapter = Adapter({"m": LoRA(B, A).map(lambda t, k=k: t.to(kinds[k % len(kinds)]))})  # type: ignore[misc]
        made.append(Upload(Client(f"c{k:03}", shape.rank_of(row.clients)), counts[k], adapter))
    return made


# ---------------------------------------------------------------------------------------------------------- one round


def _start(server: Server, shape: Shape, rank: int) -> ServerState:
    return server.init(Adapter({"m": LoRA(torch.zeros(shape.d_out, rank), torch.ones(rank, shape.d_in))}))


def _aggregated(row: Row, shape: Shape, uploads: Sequence[Upload]) -> tuple[Server, ServerState]:
    rank = shape.rank_of(row.clients)
    method = build("glora", rho=0.5 if row.budget == "cut" else 1.0, history=0)
    server = Server(method, round=Streamed() if row.budget == "summed" else Kept())
    return server, server.aggregate(_start(server, shape, rank), uploads)


def _plain(uploads: Sequence[Upload], p: Sequence[float], dtype: torch.dtype, module: str) -> Tensor:
    """The thin SVD as one writes it down: QR, QR, SVD, all in the compute dtype."""
    pairs = [(u.adapter.modules[module].factors, w) for u, w in zip(uploads, p, strict=True)]
    B = torch.cat([B.to(dtype) * w for (B, _), w in pairs], dim=1)
    A = torch.cat([A.to(dtype) for (_, A), _ in pairs], dim=0)
    Q, R = torch.linalg.qr(B)
    P, T = torch.linalg.qr(A.mT)
    O, s, Wh = torch.linalg.svd(R @ T.mT, full_matrices=False)
    return ((Q @ O).double() * s.double()) @ (Wh @ P.mT).double()


def judge(row: Row, shape: Shape, seed: int = 0) -> Verdict:
    """What became of one hard round."""
    uploads = uploads_of(row, shape, seed)

    def aggregated() -> tuple[Server, ServerState]:
        return _aggregated(row, shape, uploads)

    return _verdict(row, uploads, "m", aggregated)


def _verdict(
    row: Row, uploads: Sequence[Upload], module: str, aggregated: Callable[[], tuple[Server, ServerState]]
) -> Verdict:
    total = math.fsum(u.num_examples for u in uploads)
    p = [u.num_examples / total for u in uploads]
    stored = [tuple(t.double() for t in u.adapter.modules[module].factors) for u in uploads]
    mean = torch.stack([w * (B @ A) for (B, A), w in zip(stored, p, strict=True)]).sum(dim=0)
    size = float(torch.linalg.matrix_norm(mean))
    terms = math.fsum(
        w * float(torch.linalg.matrix_norm(B, ord=2) * torch.linalg.matrix_norm(A))
        for (B, A), w in zip(stored, p, strict=True) if B.shape[1]
    )  # fmt: skip
    dtype = torch.float64 if row.dtype == "float64" else torch.float32
    u = torch.finfo(dtype).eps / 2
    plain = float(torch.linalg.matrix_norm(_plain(uploads, p, dtype, module) - mean)) / size
    bound = max(3 * plain, 8 * u * terms / size, 32 * torch.finfo(F64).eps)  # the last is what the oracle knows
    try:
        server, state = aggregated()
    except RankMismatch as refusal:
        return Verdict(row, math.nan, plain, bound, math.nan, math.nan, "", bool(str(refusal)))
    lora, facts = server.global_update(state)[module], server.diagnostics(state)[module]
    true = float(torch.linalg.matrix_norm(lora.map(Tensor.double).delta() - mean)) / size
    said, dropped = (float(facts[key]) for key in ("error", "dropped"))  # type: ignore[arg-type]
    known = 256 * torch.finfo(F64).eps * terms / size
    failed = []
    # A streamed mean is stored once before the method sees it, so the method's own report leaves that out.
    if row.budget != "summed" and not true <= said * (1 + 1e-9) + known:
        failed.append("further off than it says")
    if row.budget != "summed" and said > 2 * true + known:
        failed.append("says too much")
    if row.budget != "cut" and true > bound:
        failed.append("not exact")
    if row.budget == "whole" and not (float(facts["captured"]) <= 1 - true**2 + 2 * true * known + 1e-9):  # type: ignore[arg-type]
        failed.append("captured says too much")
    return Verdict(row, true, plain, bound, said, dropped, ", ".join(failed), known=known)


def rows(clients: Sequence[int]) -> Iterator[Row]:
    """Every combination."""
    for made in itertools.product(DTYPES, clients, WEIGHTS, UPDATES, BUDGETS):
        yield Row(*made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small matrices and few clients, in a minute or two")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth round: all take an hour")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    logging.getLogger("fedlora").setLevel(logging.ERROR)  # a warning for each bad round is right, and not news here
    shape = Shape(48, 40, 4, 25) if args.quick else Shape(512, 384, 8, 64)
    everything = list(rows((3, 25) if args.quick else CLIENTS))[:: args.every]
    found = []
    for k, row in enumerate(everything):
        found.append(judge(row, shape))
        if k % 50 == 0:
            on_stderr(f"{k} of {len(everything)} rounds")
    on_stderr("")
    report(args.json, began, tables={"exactness": _table(found)}, goals=_goals(found))
    for v in (v for v in found if v.failed):
        print(f"FAILED {v.row}: true {v.true:.2e}, said {v.said:.2e}, bound {v.bound:.2e}: {v.failed}")
    print(f"{len(found)} rounds, {sum(v.refused for v in found)} refused, {sum(bool(v.failed) for v in found)} failed")
    raise SystemExit(1 if any(v.failed for v in found) else 0)


def _table(found: Sequence[Verdict]) -> Table:
    """The worst of each dtype where nothing is cut, and of each other budget."""
    rows = [["budget", "stored as", "rounds", "failed", "worst error", "plain", "said", "said / true"]]
    kinds = [*(("whole", (dtype,)) for dtype in DTYPES), *((budget, tuple(DTYPES)) for budget in BUDGETS[1:])]
    for budget, dtypes in kinds:
        some = [v for v in found if v.row.budget == budget and v.row.dtype in dtypes]
        kept = [v for v in some if not v.refused]
        dtype = dtypes[0] if len(dtypes) == 1 else "any"
        counts = [str(len(some)), str(sum(bool(v.failed) for v in some))]
        if not kept:
            rows.append([budget, dtype, *counts, "", "", "", ""])
            continue
        worst = max(kept, key=lambda v: v.true)
        loose = _looseness(kept)
        spread = f"{loose[0]:.2f} - {loose[-1]:.2f}" if loose else "a bound"
        rows.append([budget, dtype, *counts, *(f"{x:.1e}" for x in (worst.true, worst.plain, worst.said)), spread])
    return rows


def _looseness(found: Sequence[Verdict]) -> list[float]:
    """What the server says over what is true, ascending, where it says more than a bound (`Verdict.known`)."""
    return sorted(v.said / v.true for v in found if v.true > v.known)


def _goals(found: Sequence[Verdict]) -> list[Goal]:
    whole = [v for v in found if v.row.budget in ("whole", "summed") and not v.refused]
    held = [v for v in found if v.row.budget in ("whole", "cut")]
    return [
        Goal("hard rounds that fail", sum(bool(v.failed) for v in found), "<= 0", form=".0f"),
        Goal("worst error of an uncut mean", max(v.true for v in whole), "<= 3e-7", form=".1e"),
        Goal("error that the server reports over the true one", _looseness(held)[-1], "<= 2"),
    ]


if __name__ == "__main__":
    main()
