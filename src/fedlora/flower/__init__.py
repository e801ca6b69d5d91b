"""fedlora on Flower: `FedLoRA`, the rounds around the same `Server`, and what nodes need besides.

rounds/     the rounds at the server: `FedLoRA`, whom it asks, each answer's fate, measurements and records
serving/    the server's processes: `fedlora flower serve`, status; a trial on one machine
setup/      make, change and check a federation's folder: `init`, `admit`, `remove`, `renew`, `doctor`, the proxy
site/       a site: its folder, its node, the trainer that stays in memory
messages/   messages as Flower's records, checked before use
terms/      what server and sites agree on: settings, facts, policy, names, keys, the files that travel by hand
places.py   paths in the server's folder and in a site's
locks.py: who has a folder; children.py: processes
apps.py     the ServerApp and the ClientApp; stock.py: `FedLoRA` for stock PEFT clients, as Flower's `Strategy`
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.flower.rounds.strategy import FedLoRA

# imported on demand: a node's ClientApp process needs neither torch nor the server
__getattr__ = face("fedlora.flower", {"rounds.strategy": ("FedLoRA",)}, extra="flower")

__all__ = ["FedLoRA"]
