"""Clients that lie, for experiments in one process: what they send, in update space. Never part of a federation.

`kinds` what there is; `spaces` where changes are added up and how a wanted change becomes an upload; `crafts` and
`directions` the attacks themselves; `adversary` the liars of a run; `who` which clients they are. Torch only.
"""

from fedlora.attacks.adversary import Adversary
from fedlora.attacks.crafts import largest_z
from fedlora.attacks.kinds import KINDS, Attack
from fedlora.attacks.who import choose_attackers, flip_labels

__all__ = ["KINDS", "Adversary", "Attack", "choose_attackers", "flip_labels", "largest_z"]
