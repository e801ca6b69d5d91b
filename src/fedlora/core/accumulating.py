"""What a method must add to support private rounds: computing its next state from a *released mean change*.

A private round gives the method one noised sum of the clients' changes and nothing else: no uploads, no weights, no
count. The state M is already public, so the next state is M + that change, cut to a rank R known in advance. A private
round accumulates changes, whereas a plain round replaces M by the clients' mean. The two agree if every client started
from all of M: sum_i p_i (D_i - M) + M is the mean. They differ where a client's rank is below that of M.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from fedlora.core.lora import LoRA

S = TypeVar("S")


class Accumulating(ABC, Generic[S]):
    """A method that can compute its next state from its current state and a mean change alone.

    Its readouts may depend only on the state, the client's name and its rank: one client's past must not affect what
    another client receives.
    """

    @abstractmethod
    def require_accumulating(self) -> None:
        """Check that a private round can honour this method's options.

        Raises:
            HyperparameterError: an option needs data that a released sum does not carry, or would have no effect.
        """

    @abstractmethod
    def accumulated(self, state: S, change: LoRA, rank: int) -> S:
        """The next state: M + change, cut to `rank`.

        Args:
            change: (d_out, d_in) as a pair in float64, of any rank, both factors. rank: R >= 1, a public constant.
        """

    def common_rows(self, state: S) -> Tensor | None:
        """(r, d_in) public rows whose span contains the rows of every update, or None if there are none.

        With them, the change is summed as its (d_out, r) coordinates in an orthonormal basis of these rows, so that
        clipping it clips the product. Without them, `fedlora.privacy` chooses bases itself.
        """
        return None


def options_without_effect(method: object, name: str, defaults: dict[str, object]) -> str | None:
    """A message naming the options that differ from `defaults`, for `require_accumulating`; None if none differ."""
    changed = [f"{key} = {getattr(method, key)!r}" for key, value in defaults.items() if getattr(method, key) != value]
    if not changed:
        return None
    return (
        f"{name}: {', '.join(changed)} cannot be kept in a private round: the server has only one noised sum, no "
        f"client's update, subspace or weight, and its rank R is privacy.rank. Leave "
        f"{'it' if len(changed) == 1 else 'them'} out."
    )
