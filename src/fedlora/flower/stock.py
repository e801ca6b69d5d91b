"""`FedLoRA` for stock PEFT clients (FlowerTune): two changed lines on the server, none on the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flwr.serverapp import Grid
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA
from fedlora.errors import ConfigError
from fedlora.flower.messages.codecs import StockClients
from fedlora.flower.messages.records import stock_key
from fedlora.flower.rounds.strategy import FedLoRA, Identify, registered_names
from fedlora.flower.terms.policy import Policy
from fedlora.methods.registry import build
from fedlora.server.robust_rules import Rule
from fedlora.server.server import Server, start


def stock_strategy(
    peft_state: Mapping[str, Tensor],
    *,
    r: int,
    alpha: float,
    clients: Sequence[str],
    method: str = "glora",
    names: Literal["registered", "order"] = "registered",
    participation: float = 1.0,
    quorum: int | None = 1,
    deadline: float = 3600.0,
    seed: int = 0,
    folder: Path | None = None,
    resume: bool = False,
    rule: Rule | None = None,
    **hparams: Any,
) -> FedLoRA:
    """A strategy for clients that exchange `get_peft_model_state_dict` and know nothing of fedlora.

    Args:
        peft_state: the initial state dict of linear LoRA layers. r, alpha: those of all clients.
        clients: their registered names; with names="order" (for simulations, whose nodes have none) the online nodes
            get these names in the order of their ids. method, hparams: as in `fedlora.build`. rule: a robust rule, such
            as `fedlora.server.robust_rules.MultiKrum(liars=1)`, instead of Flower's own strategies of that name, which
            compare factors and would not understand adapters.

    Raises:
        ConfigError: other tensors than LoRA factors of rank r, a method that such clients cannot run, or a rule that
            needs more clients in a round.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in peft_state.items():
        found = stock_key(key)
        if found is None or tensor.shape[0 if found[1] == "A" else 1] != r:
            raise ConfigError(
                f"{key!r} of shape {tuple(tensor.shape)} is not a LoRA factor of rank {r} of a linear layer."
            )
        pairs.setdefault(found[0], {})[found[1]] = tensor.detach().cpu().float()
    factor = alpha / r
    adapter = Adapter({m: LoRA(pair["B"] * factor, pair["A"]) for m, pair in sorted(pairs.items())})
    server = Server(build(method, **hparams), heads="frozen", quorum=quorum, seed=seed, rule=rule)
    return FedLoRA(
        server,
        Policy(dict.fromkeys(clients, r), deadline=deadline),
        start(server, adapter),
        run="stock",
        folder=folder,
        resume=resume,
        participation=participation,
        seed=seed,
        identify=registered_names if names == "registered" else _in_order(clients),
        codec=StockClients(r, alpha),
    )


def _in_order(clients: Sequence[str]) -> Identify:
    def identify(grid: Grid) -> dict[str, int]:
        return dict(zip(clients, sorted(grid.get_node_ids()), strict=False))

    return identify
