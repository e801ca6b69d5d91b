"""Write the golden vectors from the code as it is. Run it only when behaviour is meant to change, and say so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build

HERE = Path(__file__).parent
D_OUT, D_IN = 14, 11
RANKS = {"a": 2, "b": 3, "c": 4}
WEIGHTS = {"a": 0.2, "b": 0.5, "c": 0.3}


def draw(seed: int, ranks: dict[str, int] = RANKS) -> dict[str, LoRA]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {c: LoRA(normal(D_OUT, r), normal(r, D_IN)) for c, r in ranks.items()}


def deficient() -> dict[str, LoRA]:
    """b has a zero column in B, c a repeated row in A, a is zero altogether."""
    pairs = {c: lora.factors for c, lora in draw(3).items()}
    pairs["b"][0][:, 1] = 0
    pairs["c"][1][3] = pairs["c"][1][0]
    return {c: LoRA(B * 0 if c == "a" else B, A) for c, (B, A) in pairs.items()}


def orthogonal() -> dict[str, LoRA]:
    """Mutually orthogonal column spaces: with equal weights every eigenvalue of K ties."""
    Q = torch.linalg.qr(torch.cat([lora.factors[0] for lora in draw(4).values()], dim=1)).Q
    pieces = dict(zip(RANKS, Q.split(list(RANKS.values()), dim=1), strict=True))
    return {c: LoRA(pieces[c] * (2.0 + k), lora.factors[1]) for k, (c, lora) in enumerate(draw(5).items())}


# Case -> (options, weights, rounds of uploads, what it is).
CASES: dict[str, tuple[dict[str, Any], dict[str, float], list[dict[str, LoRA]], str]] = {
    "generic": ({}, WEIGHTS, [draw(1), draw(2)], "defaults: exact, two rounds with history"),
    "paper": ({"name": "glora-paper", "rho": 0.6}, WEIGHTS, [draw(1), draw(2)], "the paper to the letter, R = 6"),
    "tied": ({"rank": 5}, dict.fromkeys(RANKS, 1 / 3), [orthogonal()], "a tied cut, resolved by energy"),
    "deficient": ({"rho": 0.5}, WEIGHTS, [deficient()], "zero and repeated columns and rows, a zero client"),
    "absent": ({"gamma": 0.0}, WEIGHTS, [draw(6), {c: x for c, x in draw(7).items() if c != "b"}], "b misses round 2"),
    "budget below the ranks": ({"rank": 2}, WEIGHTS, [draw(8)], "R = 2 < r_i: empty slots in every readout but a's"),
}


def play(options: dict[str, Any], weights: dict[str, float], rounds: list[dict[str, LoRA]]) -> list[dict[str, Any]]:
    """What the code makes of a case: one dict of results a round."""
    server = Server(build(**{"name": "glora", **options}))
    seed = LoRA(torch.zeros(D_OUT, 4, dtype=torch.float64), draw(0)["c"].factors[1])
    state = server.init(Adapter({"m": seed}))
    results = []
    for uploads in rounds:
        total = math.fsum(weights[c] for c in uploads)
        sent = [Upload(Client(c, RANKS[c]), weights[c] / total, Adapter({"m": lora})) for c, lora in uploads.items()]
        state = server.aggregate(state, sent)
        U, s, Vh = torch.linalg.svd(server.global_update(state)["m"].delta(), full_matrices=False)
        real = int((s > 1e-10 * s[:1]).sum())
        U, s, Vh = U[:, :real], s[:real], Vh[:real]
        given = {c: positive(*server.method.readout(state.modules["m"], c, r).factors) for c, r in RANKS.items()}
        results.append(
            {
                "projector": U @ U.mT,
                "coordinates": positive(U, s[:, None] * Vh)[1],
                "selected": {c: (A @ Vh.mT).abs().argmax(dim=1).tolist() for c, (_, A) in given.items()},
                "readout": given,
            }
        )
    return results


def positive(B: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The same products of columns and rows, each column's largest entry positive."""
    sign = torch.where(B.amax(dim=0) >= -B.amin(dim=0), 1.0, -1.0).to(B)
    return B * sign, sign[:, None] * A


def main() -> None:
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for case, (options, weights, rounds, what) in CASES.items():
        results = play(options, weights, rounds)
        selected = [r["selected"] for r in results]
        described[case] = {"what": what, "options": options, "weights": weights, "ranks": RANKS, "selected": selected}
        for t, (uploads, result) in enumerate(zip(rounds, results, strict=True)):
            for c, lora in uploads.items():
                tensors[f"{case}/{t}/client/{c}/B"], tensors[f"{case}/{t}/client/{c}/A"] = lora.factors
            tensors[f"{case}/{t}/projector"] = result["projector"]
            tensors[f"{case}/{t}/coordinates"] = result["coordinates"]
            for c, (B, A) in result["readout"].items():
                tensors[f"{case}/{t}/readout/{c}/B"], tensors[f"{case}/{t}/readout/{c}/A"] = B, A
    safetensors.torch.save_file({k: t.contiguous().clone() for k, t in tensors.items()}, HERE / "glora.safetensors")
    (HERE / "glora.json").write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
