"""The one thing that a method must offer for private rounds: its next state from a *released mean change*.

A private round gives the method one noised sum of the clients' changes and nothing else: no upload, no weight, no
count. The state M is public already, so the next one is M + that change, cut to a rank R that everybody knew before.
This accumulates changes, where a plain round replaces M by the clients' mean. The two agree where everybody started
from all of M: sum_i p_i (D_i - M) + M is the mean. Where a client's rank is below that of M they do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from fedlora.core.lora import LoRA

S = TypeVar("S")


class Accumulating(ABC, Generic[S]):
    """A method whose next state may be made of its state and a mean change alone.

    Its readouts must depend on the state, the client's name and its rank only: what a client did before may not choose
    what another one receives.
    """

    @abstractmethod
    def require_accumulating(self) -> None:
        """Nothing where its options can be kept in a private round.

        Raises:
            HyperparameterError: an option needs what a released sum does not tell, or would do nothing.
        """

    @abstractmethod
    def accumulated(self, state: S, change: LoRA, rank: int) -> S:
        """The next state: M + change, cut to `rank`.

        Args:
            change: (d_out, d_in) as a pair in float64, of any rank, both factors. rank: R >= 1, a public constant.
        """

    def common_rows(self, state: S) -> Tensor | None:
        """(r, d_in) public rows in whose span the rows of every update lie, or None where there are none.

        With them the change is summed as what it is in an orthonormal basis of these rows, (d_out, r), so that clipping
        it is clipping the product. `fedlora.privacy` chooses bases itself where there are none.
        """
        return None


def options_without_effect(method: object, name: str, defaults: dict[str, object]) -> str | None:
    """The options of a method that are not at these defaults, in words: for `require_accumulating`. None: all are."""
    changed = [f"{key} = {getattr(method, key)!r}" for key, value in defaults.items() if getattr(method, key) != value]
    if not changed:
        return None
    return (
        f"{name}: {', '.join(changed)} cannot be kept in a private round: the server has only one noised sum, no "
        f"client's update, subspace or weight, and its rank R is privacy.rank. Leave "
        f"{'it' if len(changed) == 1 else 'them'} out."
    )
