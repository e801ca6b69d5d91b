"""fedlora on Flower: `FedLoRA`, a Flower `Strategy`, and what a federation on machines needs besides.

strategy.py   `FedLoRA`: in Flower's simulation, under `flwr run`, with stock PEFT clients (peft.py) or fedlora's own
grid.py       `BoundedGrid`: exactly one answer to each question, measured before it is in memory (inside.py)
server/       the rounds' parts: who is online, what messages hold, each answer's fate, checkpoint and journal; a
              federation's server: `Federation`, measurements, the end; the folder and its members; the processes of
              `serve`; all of a federation on one machine (`up`)
site/         a site: its folder, its node, the trainer that stays in memory
terms/        what server and sites agree on: settings, facts, policy, names, keys
records.py, scores.py, envelope.py: messages as Flower's records, checked before use
apps.py       the ServerApp and the ClientApp; bundle.py: as every federation has them
places.py     paths in the server's folder and in a site's; processes.py: processes, and who has a folder
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.flower.grid import BoundedGrid
    from fedlora.flower.strategy import FedLoRA

# imported on demand: a node's ClientApp process needs neither torch nor the server
__getattr__ = face("fedlora.flower", {"grid": ("BoundedGrid",), "strategy": ("FedLoRA",)}, extra="flower")

__all__ = ["BoundedGrid", "FedLoRA"]
