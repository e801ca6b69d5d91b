"""Byzantine clients, for experiments in one process: what they send, in update space. Never part of a federation.

`kinds` lists the attacks; `changes` is the algebra of what clients add to their readouts; `adversary` is a run's
byzantine clients; `directions` has the attacks on coordinates and subspaces; `who` chooses the byzantine clients. Needs
only torch.
"""

from fedlora.attacks.adversary import Adversary, largest_z
from fedlora.attacks.kinds import KINDS, Attack
from fedlora.attacks.who import choose_attackers, flip_labels

__all__ = ["KINDS", "Adversary", "Attack", "choose_attackers", "flip_labels", "largest_z"]
