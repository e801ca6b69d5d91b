"""What a method may promise; and one contract: how it is measured, and how a claim is compared with the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fedlora.errors import HyperparameterError, KeptStateError, MethodFault, QuorumNotMet, UploadRefused
from fedlora.server.server import Server
from fedlora.testing.federations import EQUAL, FULL, MIXED, PARTIAL, Ranks, Who

Unasked = Literal["unasked"]
PLAYS: Mapping[str, tuple[Ranks, Who]] = {
    "equal ranks, all there": (EQUAL, FULL), "equal ranks, some away": (EQUAL, PARTIAL),
    "mixed ranks, all there": (MIXED, FULL), "mixed ranks, some away": (MIXED, PARTIAL),
}  # fmt: skip
ALWAYS, UNCLAIMED = "always", "not claimed"


@dataclass(frozen=True)
class Claim:
    """What a method promises beyond what every method must keep. A method states it in a class attribute `CLAIMS`.

    If it depends on hyper-parameters, `CLAIMS` is a property. False is also a claim: that the promise does not hold.

    exact: the server's update is the clients' weighted mean update ("equal": with equal ranks only). gauge: it does not
    depend on the clients' coordinates; None: one factor travels, so there is no gauge to change. state: neither do
    readouts. mixed: clients of different ranks are served. global_model: `effective` returns an update. weights:
    clients count by their weights p_i; False: the method has its own weights, or none.

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
    """A contract's result. holds: whether it holds, claimed or not; None: there is nothing to measure. says: in words.
    least, most: the range over rounds of the number compared with a tolerance.

    Example:
        >>> CONTRACTS["rank"](Server(build("svd")), None).holds
        True
    """

    holds: bool | None
    says: str
    least: float = 0.0
    most: float = 0.0


class ContractBroken(AssertionError):
    """A method breaks a contract. Carries `contract`, `claimed` and `measured`, in words.

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
    """A claim about one contract in the table's words."""
    return {True: "yes", False: "no", None: "no gauge to change"}[wanted]


@dataclass(frozen=True)
class Contract:
    """Call it with a server (and a claim, ranks and participants): it returns what it measured, or raises.

    measure: a pure function that plays and measures; its docstring says what must hold. claimed: what a claim says of
    this contract ("unasked": nothing); None: every method must keep it. advice: what to do if it is broken. plays: the
    federations that `check` plays, name -> ranks and participants.

    Example:
        >>> CONTRACTS["gauge"].name
        'gauge'
        >>> CONTRACTS["gauge"](Server(build("svd")), None).most < 1e-6
        True
    """

    name: str
    measure: Callable[[Server, Ranks, Who], Measured]
    claimed: Callable[[Claim, Ranks], bool | Unasked | None] | None
    advice: str
    plays: Mapping[str, tuple[Ranks, Who]]

    def __call__(self, server: Server, claim: Claim | None = None, ranks: Ranks = EQUAL, who: Who = FULL) -> Measured:
        """The measurement. A method without a claim (None) must keep only what all methods must keep.

        Raises:
            ContractBroken: the method breaks its claim, or what every method must keep.
            MethodFault, HyperparameterError: the server found a fault in the method; the message names the function.
        """
        measured = self.measured(server, ranks, who)
        wanted = self.wanted(claim, ranks)
        if wanted != "unasked" and measured.holds is not wanted:
            said = ALWAYS if self.claimed is None else worded(wanted)
            advice = self.advice
            if wanted is False and measured.holds:
                advice = "It promises less than it does: change the claim."
            raise ContractBroken(server.method.name, self.name, said, measured.says, advice)
        return measured

    def wanted(self, claim: Claim | None, ranks: Ranks) -> bool | Unasked | None:
        """What the method must do here: True, False, None (nothing to measure), or "unasked"."""
        if self.claimed is None:
            return True
        return "unasked" if claim is None else self.claimed(claim, ranks)

    def said(self, claim: Claim | None) -> str:
        """The claim in words, over all plays."""
        if self.claimed is None:
            return ALWAYS
        wanted = [self.wanted(claim, ranks) for ranks, _ in self.plays.values()]
        if wanted[0] == "unasked":
            return UNCLAIMED
        return worded(wanted[0]) if len(set(wanted)) == 1 else "with equal ranks"

    def measured(self, server: Server, ranks: Ranks, who: Who) -> Measured:
        """`measure`, blaming the method for every other error, because the toy clients are sound."""
        try:
            return self.measure(server, ranks, who)
        except (ContractBroken, MethodFault, HyperparameterError):
            raise
        except (UploadRefused, QuorumNotMet, KeptStateError) as error:
            why = f"the round failed: {error}"
            advice = "The clients of this federation are sound, so what the method gave them is wrong: see `readout`."
            raise ContractBroken(server.method.name, self.name, ALWAYS, why, advice) from error
        except Exception as error:  # a stranger's code can raise anything
            why = f"the round failed: {type(error).__name__}: {error}"
            advice = "No client and no setting is at fault here: it comes from the method, or from what it returned."
            raise ContractBroken(server.method.name, self.name, ALWAYS, why, advice) from error
