"""`FedLoRA` for stock PEFT clients (FlowerTune), as a Flower `Strategy`: two changed lines on the server, none on the
clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError
from fedlora.flower.messages.codecs import StockClients
from fedlora.flower.messages.records import stock_key
from fedlora.flower.rounds.collecting import Identify, registered_names
from fedlora.flower.rounds.flower_state import newest
from fedlora.flower.rounds.strategy import FedLoRA, log
from fedlora.flower.terms.policy import Policy
from fedlora.methods.registry import build
from fedlora.server.kept import Kept
from fedlora.server.rules import Rule
from fedlora.server.server import Server, start


class StockFedLoRA(FedLoRA, Strategy):
    """`FedLoRA` with the arguments of Flower's `Strategy.start`; `stock_strategy` makes one."""

    codec: StockClients

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As `FedLoRA.start`.

        Args:
            initial_arrays: not used, because the strategy has its own state. timeout: replaces the policy's deadline.
            train_config: additions to the clients' config, besides "server-round". evaluate_fn: called as by Flower,
                with the server's model as clients read it, before the first round and after each.

        Returns:
            Also the model as clients read it.

        Raises:
            ConfigError: an evaluate_config, because this strategy does not evaluate by Flower's messages.
        """
        if evaluate_config is not None:
            raise ConfigError("FedLoRA sends no evaluate_config. Measure at the server with evaluate_fn.")
        if train_config is not None:
            self.codec = replace(self.codec, config=ReadOnly(dict(train_config)))
        scores: dict[int, MetricRecord] = {}

        def evaluate(*_: object) -> None:
            if evaluate_fn is not None and (found := evaluate_fn(self.round, self.arrays())) is not None:
                scores[self.round] = found

        evaluate()
        self.after_round = evaluate
        result = super().start(grid, num_rounds=num_rounds, timeout=timeout)
        result.arrays, result.evaluate_metrics_serverapp = self.arrays(), scores
        return result

    def arrays(self) -> ArrayRecord:
        """The server's model as clients read it."""
        return self.codec.result(self.server, self.flower_state.state.server)

    def summary(self) -> None:
        log.info("FedLoRA: %s, %d clients, round %d", self.server.method.name, len(self.policy.clients), self.round)

    def _not_used(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error: `start` makes messages one by one, and names every answer."""
        raise NotImplementedError("FedLoRA plays its rounds in `start`; no other loop can.")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _not_used


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
) -> StockFedLoRA:
    """A strategy for clients that exchange `get_peft_model_state_dict` and know nothing of fedlora.

    Args:
        peft_state: the initial state dict of linear LoRA layers. r, alpha: those of all clients.
        clients: their registered names. names: "order" is for simulations, whose nodes have no names: the online nodes
            get these names in the order of their ids. If one is away, all after it get the name of another, and the
            memory of other clients with it (GLoRA's): only where all nodes stay, and never in a deployment.
            method, hparams: as in `fedlora.build`. folder: for checkpoints. resume: continue from its newest one; with
            an empty folder it begins at round 1. rule: a robust rule, such as
            `fedlora.server.rules.MultiKrum(f=1)`, instead of Flower's own strategies of that name, which
            compare factors and would not understand adapters.

    Raises:
        ConfigError: other tensors than LoRA factors of rank r in pairs, an argument that is not as above, a folder to
            resume from that does not exist, a method that such clients cannot run, or a rule that needs more clients
            in a round.
    """
    _check_arguments(alpha, clients, names)
    if resume and (folder is None or not folder.is_dir()):
        raise ConfigError(
            f"resume=True needs folder=PATH, the folder of the run's checkpoints; {folder or 'it'} is not there, and "
            f"the run would begin again at round 1. Correct the path; for a new run, leave resume out, or make the "
            f"folder."
        )
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in peft_state.items():
        found = stock_key(key)
        if found is None or tensor.shape[0 if found[1] == "A" else 1] != r:
            raise ConfigError(
                f"{key!r} of shape {tuple(tensor.shape)} is not a LoRA factor of rank {r} of a linear layer."
            )
        pairs.setdefault(found[0], {})[found[1]] = tensor.detach().cpu().float()
    for module, pair in pairs.items():
        if len(pair) < 2:
            lacks = "B" if "A" in pair else "A"
            raise ConfigError(f"{module!r} has no lora_{lacks}: give get_peft_model_state_dict as a whole.")
    factor = alpha / r
    adapter = Adapter({m: LoRA(pair["B"] * factor, pair["A"]) for m, pair in sorted(pairs.items())})
    server = Server(build(method, **hparams), heads="frozen", seed=seed, round=Kept(rule, quorum=quorum))
    state = start(server, adapter)
    return StockFedLoRA(
        server,
        Policy.made({"clients": dict.fromkeys(clients, r), "deadline": deadline}, "stock_strategy"),
        state,
        run="stock",
        folder=folder,
        resume=newest(folder, "stock", server, state.server) if resume and folder is not None else None,
        participation=participation,
        seed=seed,
        identify=registered_names if names == "registered" else _in_order(clients),
        codec=StockClients(r, alpha),
    )


def _check_arguments(alpha: float, clients: Sequence[str], names: str) -> None:
    """Raises `ConfigError`."""
    if names not in ("registered", "order"):
        raise ConfigError(f"names is 'registered' or 'order'; got {names!r}.")
    if isinstance(clients, str) or len(set(clients)) != len(clients):
        raise ConfigError(f"clients is a list of different names, such as ['site-1', 'site-2']; got {clients!r}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ConfigError(f"alpha is the clients' lora_alpha, a number above 0; got {alpha!r}.")


def _in_order(clients: Sequence[str]) -> Identify:
    def identify(grid: Grid) -> dict[str, int]:
        return dict(zip(clients, sorted(grid.get_node_ids()), strict=False))

    return identify
