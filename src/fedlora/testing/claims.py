"""What a method may promise, what was measured of it, and the error that says where both part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALWAYS, UNCLAIMED = "always", "not claimed"


@dataclass(frozen=True)
class Claim:
    """What a method promises beyond what every method must keep. A method says so in a class attribute `CLAIMS`.

    Where it depends on hyper-parameters, `CLAIMS` is a property. A claim of False is one too: that it does not hold.

    exact: the server's update is the clients' weighted mean update ("equal": with equal ranks only). gauge: it does not
    depend on the clients' coordinates; None: one factor travels, so there is no gauge to change. state: what clients
    get back does not either. mixed: clients of different ranks are served. global_model: `effective` has an answer.
    weights: clients count by their weights p_i; False: the method has weights of its own, or none.

    Example:
        >>> Claim(exact=True, gauge=True, state=True, mixed=True).global_model
        True
    """

    exact: bool | Literal["equal"]
    gauge: bool | None
    state: bool | None
    mixed: bool
    global_model: bool = True
    weights: bool = True


@dataclass(frozen=True)
class Measured:
    """What a contract found. holds: whether it is so, claimed or not; None: there is nothing to ask. says: in words.
    least, most: over the rounds, of what is compared with a tolerance.

    Example:
        >>> CONTRACTS["rank"](Server(build("svd")), None).holds
        True
    """

    holds: bool | None
    says: str
    least: float = 0.0
    most: float = 0.0


class ContractBroken(AssertionError):
    """A method does not keep a contract. Carries `contract`, `claimed` and `measured`, in words.

    Example:
        >>> try:
        ...     CONTRACTS["gauge"](Server(build("fedit")), Claim(exact=True, gauge=True, state=True, mixed=False))
        ... except ContractBroken as broken:
        ...     print(broken.contract)
        gauge
    """

    def __init__(self, method: str, contract: str, claimed: str, measured: str, advice: str) -> None:
        super().__init__(
            f"{method} breaks the contract {contract!r}: claimed {claimed}; measured: {measured}. {advice}"
        )
        self.contract, self.claimed, self.measured, self.advice = contract, claimed, measured, advice


def worded(wanted: bool | None) -> str:
    """A claim about one contract as the table says it."""
    return {True: "yes", False: "no", None: "no gauge to change"}[wanted]
