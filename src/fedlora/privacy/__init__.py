"""Differential privacy of what a federation releases. The unit is one client; the server is trusted.

`mechanism` clips, rounds, sums and adds noise; `geometry` defines the space for it; `accounting` computes the cost;
`ledger` records spending on a population of clients; `journal` makes each noised sum leave at most once; `releases`
lists what may leave at all; `sampling` draws who takes part. None of it knows a method, a server or a network.

Importing it needs only torch; noise needs `opendp` and epsilon `dp-accounting` (pip install 'fedlora[privacy]').
"""

from fedlora.privacy.accounting import Spending, epsilon, epsilon_of, noise_multiplier_for
from fedlora.privacy.events import Budget, Event, Recomputed, recompute
from fedlora.privacy.journal import Journal
from fedlora.privacy.ledger import Ledger
from fedlora.privacy.mechanism import Mechanism

__all__ = [
    "Budget", "Event", "Journal", "Ledger", "Mechanism", "Recomputed", "Spending", "epsilon", "epsilon_of",
    "noise_multiplier_for", "recompute",
]  # fmt: skip
