"""Lying clients, for experiments in one process: what they send, in update space. Never part of a federation.

`kinds` lists the attacks; `spaces` defines how changes are added and become an upload; `crafts` and `directions` are
the attacks themselves; `adversary` is a run's liars; `who` chooses them. Needs only torch.
"""

from fedlora.attacks.adversary import Adversary
from fedlora.attacks.crafts import largest_z
from fedlora.attacks.kinds import KINDS, Attack
from fedlora.attacks.who import choose_attackers, flip_labels

__all__ = ["KINDS", "Adversary", "Attack", "choose_attackers", "flip_labels", "largest_z"]
