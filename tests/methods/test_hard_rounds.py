"""Uploads that nearly cancel, in every dtype: each method's result is what it promises, to the roundoff of the result.

Kind of evidence: property, against the oracles of `support.formulas` (dense float64). What a method computes between
the stored uploads and the stored result is float64's (docs/explanation/numerics.md), so that only storing shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build, receive, send
from support.formulas import ROWS, Expected, Matrix, Pairs, mean, np64, product

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# label -> (method, oracle, whether it takes different ranks): all that have a closed formula of their own.
HARD: dict[str, tuple[Any, Any, bool]] = {
    **{label: row for label, row in ROWS.items() if label not in ("svd", "svd rank", "fair", "fair flat")},
    "fedsvd": (build("fedsvd"), lambda t, pairs, past: Expected(mean(pairs)), True),
    "glora": (build("glora"), product, True),
}


class HardRound:
    """One drawn round of module "m". Clients a and b send opposite updates, b's in other coordinates in every second
    round; the others send `near` of their size. One more client has no such module."""

    def __init__(self, method: Any, mixed: bool, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.stored, self.near = DTYPES[seed % 4], 10.0 ** -self.rng.uniform(0, 7)
        self.dtype = torch.promote_types(self.stored, torch.float32)
        d_out, d_in, r = (int(x) for x in self.rng.integers((6, 6, 1), (40, 40, 6)))
        others = "cde"[: self.rng.integers(1, 4)]
        self.ranks = {"a": r, "b": r, **{name: int(self.rng.integers(1, 6)) if mixed else r for name in others}}
        self.shape, self.top = (d_out, d_in), max(self.ranks.values())
        self.server = Server(method)
        A, other = self.normal(self.top, d_in), LoRA(torch.ones(4, 1), torch.ones(1, 3))
        if method.one_rank:
            other = LoRA(torch.ones(4, self.top), torch.ones(self.top, 3))
        seeded = LoRA(torch.zeros(d_out, self.top), torch.from_numpy(A)).map(lambda t: t.to(self.dtype))
        self.before = self.server.init(Adapter({"m": seeded, "other": other}))
        self.uploads, self.pairs = self.sent()

    def normal(self, *shape: int) -> Matrix:
        return self.rng.standard_normal(shape)

    def handed_out(self, state: ServerState, name: str, rank: int | None) -> Adapter:
        other = self.before.start.modules["other"].rank
        client = Client(name, {"other": other} if rank is None else {"m": rank, "other": other})
        return receive(self.server.download(state, client), None)

    def sent(self) -> tuple[list[Upload], Pairs]:
        roles = self.server.roles(self.before)
        r, size = self.ranks["a"], self.near**0.5 if roles.both_shared else self.near
        B, A, Q = self.normal(self.shape[0], r), self.normal(r, self.shape[1]), np.linalg.qr(self.normal(r, r))[0]
        Q = Q if self.rng.integers(2) else np.eye(r)
        counts = {name: int(self.rng.integers(1, 99)) for name in self.ranks} | {"away": 30}
        counts["b"] = counts["a"] if self.rng.integers(3) else counts["b"]  # else b's numbers are stored anew
        part, uploads, pairs = counts["a"] / counts["b"], [], []
        total = sum(counts.values()) - 30
        for name, k in [*self.ranks.items(), ("away", None)]:
            given = dict(self.handed_out(self.before, name, k).modules)
            if k is not None:
                own = (size * self.normal(self.shape[0], k), size * self.normal(k, self.shape[1]))
                own = {"a": (B, A), "b": (-part * B @ Q, Q.T @ A)}.get(name, own)
                kept = (roles.B == "frozen", roles.A == "frozen")
                moved = zip(given["m"].factors, own, kept, strict=True)
                given["m"] = LoRA(*(t if frozen else torch.from_numpy(x).to(self.stored) for t, x, frozen in moved))
                pairs.append((counts[name] / total, *map(np64, given["m"].factors)))
            client = Client(name, {module: lora.rank for module, lora in given.items()})
            uploads.append(Upload(client, counts[name], send(Adapter(given, base={}), roles)))
        return uploads, pairs

    def errors(self, oracle: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """(relative error of the update, or of each factor that is handed out, the method's diagnostics)."""
        start = self.handed_out(self.before, "new", self.top).modules["m"]
        want = oracle(0, self.pairs, Expected(None, tuple(map(np64, start.factors))))
        after = self.server.aggregate(self.before, self.uploads)
        facts = dict(self.server.diagnostics(after)["m"])
        client = Client("new", {"m": self.top, "other": self.before.start.modules["other"].rank})
        tensors = self.server.download(after, client).adapter.modules["m"].tensors()
        assert {t.dtype for t in tensors.values()} == {self.dtype}
        if want.pair is None or self.server.method.name == "fedex-lora":
            got = self.server.global_update(after)["m"].map(torch.Tensor.double).delta()
            return {"update": off(np64(got), want.update)}, facts
        B, A = want.pair
        live = A.any(axis=1) if B is None else B.any(axis=0)  # dead slots were given fresh rows
        pairs = {"B": None if B is None else B.T, "A": A}
        found = {x: np64(t.mT if x == "B" else t)[live] for x, t in tensors.items()}
        return {x: off(found[x], pairs[x][live]) for x in found}, facts


def off(got: Matrix, want: Matrix) -> float:
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300))


@pytest.mark.quick(len(HARD))
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("label", HARD)
def test_hard_rounds_are_what_the_method_promises(label: str, part: int) -> None:
    """To eight roundoffs of the result's dtype, and what float64 leaves of terms that cancel; `error` is no less."""
    method, oracle, mixed = HARD[label]
    for seed in range(12 * part, 12 * part + 12):
        drawn = HardRound(method, mixed, seed)
        errors, facts = drawn.errors(oracle)
        storing = 8 * torch.finfo(drawn.dtype).eps / 2
        left = 1e3 * 2**-53 / drawn.near  # what float64 leaves of terms that cancel; GLoRA's bound of it is coarser
        if label == "hetlora":
            left *= drawn.near**-0.5  # a client that sends little weighs little, too
        assert errors and max(errors.values()) < storing + left, (drawn.stored, drawn.near, errors)
        if "error" in facts:  # it is told from the stored sum on, not from the uploads
            assert errors["update"] <= facts["error"] < 2 * storing + 10 * left
