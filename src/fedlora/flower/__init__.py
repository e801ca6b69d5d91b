"""fedlora on Flower: `FedLoRA`, a strategy around the same `Server`, and what nodes need beside it.

rounds/     the rounds at the server: `FedLoRA`, who is asked, what becomes of each answer, what is measured and kept
serving/    the server's processes: `fedlora flower serve`, status, metrics; a trial on one machine
setup/      a federation's folder made, changed and checked: `init`, `admit`, `remove`, `renew`, `doctor`, the proxy
site/       a site: its folder, its node, the trainer that stays
messages/   what travels, as Flower's records, checked before it is used
terms/      what server and sites agree on: settings, facts, policy, names, keys, the files that travel by hand
places.py   where things lie in the server's folder and in a site's
ownership.py: whose they are, and locks; children.py: processes
apps.py     the ServerApp and the ClientApp; stock.py: stock PEFT clients
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.flower.rounds.strategy import FedLoRA

# on demand: a node's ClientApp process needs neither torch nor the server
__getattr__ = face("fedlora.flower", {"rounds.strategy": ("FedLoRA",)}, extra="flower")

__all__ = ["FedLoRA"]
