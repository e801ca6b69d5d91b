"""fedlora on Flower: `FedLoRA`, a strategy around the same `Server`, and what nodes need beside it.

records.py      tensors and parcels as Flower's records, lossless, and checked before anything is made of them
strategy.py     FedLoRA(Strategy): rounds with deadline, quorum, retry, quarantine and resume
policy.py       who may take part, at which rank, with which weight
node.py         a node's own work and state: what its ClientApp calls
resident.py     that work in a process which stays, so that the base model is loaded once
apps.py         the ServerApp and the ClientApp
simulated.py    the same in Flower's simulation engine (Ray)
project.py      `fedlora flower init`: an app, keys, certificates, units; trial.py: `fedlora flower up`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlora.flower.strategy import FedLoRA


def __getattr__(name: str) -> Any:
    if name == "FedLoRA":  # on demand: a node's ClientApp process needs neither torch nor the server
        from fedlora.flower.strategy import FedLoRA

        return FedLoRA
    raise AttributeError(name)


__all__ = ["FedLoRA"]
