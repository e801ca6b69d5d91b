"""Write the golden products of all methods, from the code as it is. Run it only when behaviour is meant to change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Method, Server, Upload, build
from fedlora.methods.registry import METHODS

FILE = Path(__file__).parent / "methods.safetensors"
SHAPES = {"q": (9, 7), "v": (6, 8)}  # module -> d_out, d_in
EXAMPLES = {"a": 20, "b": 50, "c": 30}
RANKS = {"equal": {"a": 3, "b": 3, "c": 3}, "mixed": {"a": 2, "b": 3, "c": 4}}
ALSO_ONE = {"fedsvd", "ffa-lora", "rolora"}  # frozen with equal ranks only
ROUNDS = 3
AWAY = ("b", 1)  # client b misses round 1, counted from 0


def methods() -> dict[str, Method]:
    """Case -> the method: each built-in one as it is by default, and GLoRA with each of its kinds of cut."""
    built: dict[str, Method] = {name: build(name) for name in METHODS if name != "lora-fair"}
    return built | {
        "svd rank=2": build("svd", rank=2),
        "lora-fair lambda_=0.5": build("lora-fair", lambda_=0.5),
        "lora-fair metric=cosine": build("lora-fair", metric="cosine"),
        "glora rho=0.5": build("glora", rho=0.5),
        "glora rank=4 gamma=0.3": build("glora", rank=4, gamma=0.3),
        "glora-paper rho=0.6": build("glora-paper", rho=0.6),
    }


def cases() -> list[tuple[str, str]]:
    """(method, ranks) that the method can serve."""
    return [
        (name, ranks)
        for name, method in methods().items()
        for ranks in RANKS
        if ranks == "equal" or not (method.one_rank or name in ALSO_ONE)
    ]


def inputs() -> dict[str, Tensor]:
    """The start of rank 4 and what each client uploads in each round, in float64."""
    generator = torch.Generator().manual_seed(20261129)
    drawn = {}
    for module, (d_out, d_in) in SHAPES.items():
        drawn[f"start/{module}"] = torch.randn(4, d_in, generator=generator, dtype=torch.float64)
        for ranks, of in RANKS.items():
            for round in range(ROUNDS):
                for client, r in of.items():
                    key = f"upload/{ranks}/{round}/{client}/{module}"
                    drawn[f"{key}/B"] = torch.randn(d_out, r, generator=generator, dtype=torch.float64)
                    drawn[f"{key}/A"] = torch.randn(r, d_in, generator=generator, dtype=torch.float64)
    return drawn


def play(method: Method, ranks: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Three rounds: "ROUND/effective/MODULE", "ROUND/base/MODULE" (the change of the base weight) and
    "ROUND/download/CLIENT/MODULE" (the product B A of what it starts from; the one factor that travels alone)."""
    server, of = Server(method), RANKS[ranks]
    rank = max(of.values())
    start = {
        name: LoRA(torch.zeros(d_out, rank, dtype=torch.float64), given[f"start/{name}"][:rank])
        for name, (d_out, _) in SHAPES.items()
    }
    state = server.init(Adapter(start))
    results: dict[str, Tensor] = {}
    for round in range(ROUNDS):
        roles = server.roles(state)
        uploads = []
        for client, r in of.items():
            if (client, round) == AWAY:
                continue
            sent = {}
            for name in SHAPES:
                key = f"upload/{ranks}/{round}/{client}/{name}"
                factors = {f: given[f"{key}/{f}"] if getattr(roles, f) == "shared" else None for f in "BA"}
                sent[name] = LoRA(**factors)
            uploads.append(Upload(Client(client, r), EXAMPLES[client], Adapter(sent)))
        state = server.aggregate(state, uploads)
        if server.has_global_model(state):
            for name, lora in server.global_update(state).items():
                results[f"{round}/effective/{name}"] = lora.delta()
        for client, r in of.items():
            download = server.download(state, Client(client, r))
            for name, lora in download.adapter.modules.items():
                tensors = lora.tensors()
                product = lora.delta() if len(tensors) == 2 else next(iter(tensors.values()))
                results[f"{round}/download/{client}/{name}"] = product
                if name in download.base_delta:
                    results[f"{round}/base/{name}"] = download.base_delta[name].delta()
    return {key: tensor.double() for key, tensor in results.items()}


def main() -> None:
    tensors = inputs()
    for name, ranks in cases():
        for key, tensor in play(methods()[name], ranks, tensors).items():
            tensors[f"expected/{name}/{ranks}/{key}"] = tensor
    safetensors.torch.save_file({key: t.contiguous().clone() for key, t in tensors.items()}, FILE)


if __name__ == "__main__":
    main()
