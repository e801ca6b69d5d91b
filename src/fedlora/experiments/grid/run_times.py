"""How many examples a run trains on, and how long runs took: what a plan's hours and a page's times are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedlora.experiments.stored.results import Result


@dataclass(frozen=True)
class Times:
    """Of some runs together. examples: trained on. training, wall: seconds; training is that of the clients, wall of
    the whole processes."""

    runs: int
    examples: int
    training: float
    wall: float


def examples_of(config: Mapping[str, Any], clients: int | None = None) -> int:
    """How many examples a run trains on, where it counts steps: batches of all clients that take part, in all rounds.

    config: as results have it. clients: how many there are, where that is known better than by the configuration.
    """
    a_round = max(1, round(config["run"]["participation"] * (clients or clients_of(config))))
    return int(a_round * config["run"]["rounds"] * max(1, config["train"]["steps"]) * config["train"]["batch_size"])


def times_of(results: Iterable[Result]) -> Times:
    """The sums over these runs."""
    each = list(results)
    return Times(
        len(each),
        sum(examples_of(result.raw["config"], len(result.raw["ranks"])) for result in each),
        sum(float(result.raw["seconds"].get("train", 0.0)) for result in each),
        sum(float(result.raw["wall_seconds"]) for result in each),
    )


def clients_of(config: Mapping[str, Any]) -> int:
    """How many there are: the files of data.clients, the tasks of superni, or clients.count, else one for each rank."""
    clients, data = config["clients"], config["data"]
    if data["clients"]:
        return len(data["clients"])
    if data["task"] == "superni":
        return int(data["tasks"])
    ranks = [] if clients["profile"] else clients["ranks"] or []
    return int(clients["count"] or len(ranks))
