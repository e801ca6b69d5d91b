"""What a method may promise; and one contract: how it is measured, and how a claim is held against that."""

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


@dataclass(frozen=True)
class Contract:
    """Call it with a server (and a claim, ranks and participants): it returns what it measured, or says what is broken.

    measure: plays and looks, and its docstring says what must hold; pure. claimed: what a claim says of it ("unasked":
    nothing); None: every method must keep it. advice: what to do where it is broken. plays: the federations that
    `check` plays, name -> ranks and participants.

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
        """What was measured. Nothing is held against a method that claims nothing (None), but what all must keep.

        Raises:
            ContractBroken: the method does not do what it claims, or what every method must.
            MethodFault, HyperparameterError: it is no method, as the server found, with the function's name.
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
        """What the method must do here: True, False, None (there is nothing to ask), or "unasked"."""
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
        """`measure`, where whatever else goes wrong is the method's: the toy clients are sound."""
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
