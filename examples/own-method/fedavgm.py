"""FedAvgM: server momentum, on factors."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedlora import LoRA, Method
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True, eq=False)
class MomentumState:
    pair: LoRA
    velocity: LoRA


@dataclass(frozen=True)
class FedAvgM(Method[MomentumState]):
    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu et al. 2019, on factors"
    State: ClassVar[type] = MomentumState
    one_rank: ClassVar[bool] = True
    linear_in: ClassVar[str] = "factors"
    claims: ClassVar[frozenset[str]] = frozenset({"halves"})

    momentum: float = 0.9

    def init(self, seed):
        return MomentumState(seed, seed.map(torch.zeros_like))

    def aggregate(self, state, updates):
        new, old, velocity = mean_factors(updates).factors, state.pair.factors, state.velocity.factors
        steps = [new[k] - old[k] + self.momentum * velocity[k] for k in (0, 1)]
        pair = LoRA(*(old[k] + steps[k] for k in (0, 1)))
        return MomentumState(pair, LoRA(*steps))

    def readout(self, state, client, rank):
        return state.pair

    def effective(self, state):
        return state.pair
