"""A federation's folder, and the rounds that a ServerApp plays with it. No base model is needed for them.

run.toml        the configuration of `fedlora run`, for server and nodes alike
policy.toml     [clients] name = rank; max_rank, max_weight_share, deadline, ...
start/          the common start, as a PEFT directory (`fedlora flower init` makes it where the model is)
server/         what comes of it: checkpoints, rounds.jsonl, adapter/ (PEFT), summary.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from fedlora.adapters.io import AdapterSpec, read_adapter, write_adapter
from fedlora.adapters.writer import pad_rank
from fedlora.core import files
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError
from fedlora.flower.codecs import OwnClients
from fedlora.flower.policy import Policy
from fedlora.flower.strategy import FedLoRA, Identify, registered_names
from fedlora.runs.config import RunConfig, load_config
from fedlora.runs.preparation import prepare
from fedlora.server.server import Server, start
from fedlora.server.state import RunState
from fedlora.training.evaluation import ModelEvaluator


def open_federation(
    folder: Path, *, resume: bool, identify: Identify = registered_names
) -> tuple[FedLoRA, AdapterSpec]:
    """The strategy of a federation's folder, at its last checkpoint where `resume` is on.

    Raises:
        ConfigError: files that are missing or do not fit; rounds are there and `resume` is off.
    """
    config = load_config(folder / "run.toml", [])
    if config.server.sketch_rank:
        raise ConfigError("server.sketch_rank is for simulated runs; the Flower app has no second exchange in a round.")
    if config.evaluate.patience is not None:
        raise ConfigError(
            f"evaluate.patience = {config.evaluate.patience} is for runs on one machine; the Flower app measures at "
            f"the end only, and plays all run.rounds. Leave it out."
        )
    policy = Policy.read(folder / "policy.toml")
    server = config.server.build(config.method.build(), config.run.seed)
    seed_adapter, spec = read_adapter(folder / "start", scaling=config.lora.unit)
    out = folder / "server"
    if not resume and any((out / "checkpoints").glob("round-*[1-9]*.*.safetensors")):
        raise ConfigError(f"{out} already holds rounds; go on with resume=true, or move it away.")
    strategy = FedLoRA(
        server,
        policy,
        start(server, seed_adapter),
        run=f"{folder.resolve().name}-{config.digest()[:8]}",
        folder=out / "checkpoints",
        resume=resume,
        participation=config.run.participation,
        seed=config.run.seed,
        codec=OwnClients(config.server.upload),
        identify=identify,
        on_round=lambda facts: append_line(out / "rounds.jsonl", facts),
    )
    return strategy, spec


def play(
    grid: Grid, folder: Path, *, resume: bool, evaluate: bool, identify: Identify = registered_names
) -> dict[str, Any]:
    """All rounds that are still to do, then the adapter and a summary. What a ServerApp's main is."""
    config = load_config(folder / "run.toml", [])
    if config.server.sketch_rank:
        raise ConfigError("server.sketch_rank is for simulated runs; the Flower app has no second exchange in a round.")
    if (
        threads := config.run.torch_threads()
    ):  # as `prepare` does on the nodes: results are bit for bit at one number of threads
        torch.set_num_threads(threads)
    strategy, spec = open_federation(folder, resume=resume, identify=identify)
    out = folder / "server"
    strategy.start(grid, num_rounds=config.run.rounds)
    state, server = strategy.memory.state, strategy.server
    summary: dict[str, Any] = {
        "rounds": state.round,
        "method": server.method.name,
        "refusals": dict(strategy.memory.refusals),
    }
    if server.has_global_model(state.server):
        heads = state.server.heads if server.roles(state.server).heads != "local" else {}
        modules = {name: pad_rank(lora, 1) for name, lora in server.global_update(state.server).items()}
        write_adapter(out / "adapter", Adapter(modules, heads), spec)
        summary["adapter"] = str(out / "adapter")
    if evaluate:
        summary["test"] = measured(config, server, state)
    files.write(out / "summary.json", json.dumps(summary, indent=2, sort_keys=True) + "\n")
    return summary


def measured(config: RunConfig, server: Server, state: RunState) -> Mapping[str, float]:
    """The test metrics of a state, on the server's own held-out data. Loads the base model."""
    prepared = prepare(config, None)
    if not isinstance(prepared.test, ModelEvaluator):
        return {}
    return dict(prepared.test.evaluate(server, state))


def append_line(path: Path, facts: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts, sort_keys=True) + "\n")
