"""`FedLoRA` for stock PEFT clients (FlowerTune), as a Flower `Strategy`: two changed lines on the server, none on the
clients."""

from __future__ import annotations

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
from fedlora.server.robust_rules import Rule
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
    if resume and folder is None:
        raise ConfigError("resume=True needs the folder of the run's checkpoints: give folder=PATH too.")
    state = start(server, adapter)
    return StockFedLoRA(
        server,
        Policy(dict.fromkeys(clients, r), deadline=deadline),
        state,
        run="stock",
        folder=folder,
        resume=newest(folder, "stock", server, state.server) if resume and folder is not None else None,
        participation=participation,
        seed=seed,
        identify=registered_names if names == "registered" else _in_order(clients),
        codec=StockClients(r, alpha),
    )


def _in_order(clients: Sequence[str]) -> Identify:
    def identify(grid: Grid) -> dict[str, int]:
        return dict(zip(clients, sorted(grid.get_node_ids()), strict=False))

    return identify
