"""Test a whole method against all contracts: what holds (`measure`), and whether its claims hold (`check`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlora.core.method import Method
from fedlora.errors import FedLoRAError, HyperparameterError
from fedlora.server.server import Server
from fedlora.testing.contract import Claim, Contract, ContractBroken, Measured
from fedlora.testing.contracts import CONTRACTS
from fedlora.testing.federations import Ranks, Who


@dataclass(frozen=True)
class Finding:
    """One contract of one method. holds: whether the method keeps it, by claim or always; None: nothing was claimed.
    why: everything that is wrong, and what to do.

    Example:
        >>> Finding("rank", claimed="always", measured="yes", holds=True).holds
        True
    """

    contract: str
    claimed: str
    measured: str
    holds: bool | None
    why: str | None = None


def claims_of(method: Method[Any]) -> Claim | None:
    """The method's own claim: its attribute `CLAIMS`, on the class or as a property. None if there is none.

    Raises:
        HyperparameterError: `CLAIMS` is not a `Claim`.

    Example:
        >>> claims_of(build("svd")) is None  # built-in methods carry no claim
        True
    """
    found = getattr(method, "CLAIMS", None)
    if found is not None and not isinstance(found, Claim):
        raise HyperparameterError(
            f"CLAIMS of {type(method).__name__} is a {type(found).__name__}; it must be a fedlora.testing.Claim."
        )
    return found


def check(method: Method[Any], claim: Claim | None = None) -> tuple[Finding, ...]:
    """Run every contract on toy federations of four clients; findings say what is wrong. Takes a second or two.

    Args:
        claim: what the method promises; None: its `CLAIMS`. Without a claim, promises are only measured.

    Example:
        >>> findings = check(build("svd"))
        >>> sound(findings)
        True
    """
    claim = claims_of(method) if claim is None else claim
    server = Server(method)
    serves = _found(CONTRACTS["mixed"], server, claim, CONTRACTS["mixed"].plays)[1]
    return tuple(
        _found(contract, server, claim, contract.plays if name == "mixed" else _served(contract, serves))[0]
        for name, contract in CONTRACTS.items()
    )


def sound(findings: tuple[Finding, ...]) -> bool:
    """Whether everything claimed, and everything required, holds.

    Example:
        >>> sound((Finding("rank", claimed="always", measured="no", holds=False),))
        False
    """
    return all(finding.holds is not False for finding in findings)


def measure(method: Method[Any]) -> Claim:
    """The claim that the method could make, from what holds.

    Raises:
        ContractBroken, MethodFault: the method fails before anything can be measured.

    Example:
        >>> measure(build("glora")).exact
        True
    """
    server = Server(method)
    serves = _holds("mixed", server, CONTRACTS["mixed"].plays) is True

    def of(name: str, mixed: bool) -> bool | None:
        plays = CONTRACTS[name].plays
        return _holds(name, server, {k: p for k, p in plays.items() if _is_mixed(p[0]) == mixed})

    exact = of("exact", False)
    both = {name: [of(name, mixed) for mixed in (False, True)[: 1 + serves]] for name in ("exact", "gauge", "state")}
    return Claim(
        exact="equal" if exact and not all(both["exact"]) else bool(exact),
        gauge=None if None in both["gauge"] else all(both["gauge"]),
        state=None if None in both["state"] else all(both["state"]),
        mixed=serves,
        global_model=_holds("global model", server, CONTRACTS["global model"].plays) is True,
        weights=_holds("weights", server, CONTRACTS["weights"].plays) is True,
    )


def _found(
    contract: Contract, server: Server, claim: Claim | None, plays: Mapping[str, tuple[Ranks, Who]]
) -> tuple[Finding, bool]:
    """The worst finding of one contract over its plays; and whether all plays hold."""
    worst: Measured | None = None
    claimed = contract.said(claim)
    for play, (ranks, who) in plays.items():
        try:
            measured = contract(server, claim, ranks, who)
        except ContractBroken as broken:
            return Finding(contract.name, broken.claimed, f"{play}: {broken.measured}", False, str(broken)), False
        except FedLoRAError as error:
            return Finding(contract.name, claimed, f"{play}: {error}", False, str(error)), False
        if worst is None or _badness(measured) > _badness(worst):
            worst = measured
    assert worst is not None  # every contract has a play with equal ranks, or only mixed ones
    known = contract.wanted(claim, next(iter(plays.values()))[0]) != "unasked"
    return Finding(contract.name, claimed, worst.says, True if known else None), worst.holds is True


def _badness(measured: Measured) -> tuple[bool, float]:
    return measured.holds is False, measured.most


def _served(contract: Contract, serves: bool) -> dict[str, tuple[Ranks, Who]]:
    return {name: play for name, play in contract.plays.items() if serves or not _is_mixed(play[0])}


def _is_mixed(ranks: Ranks) -> bool:
    return len(set(ranks.values())) > 1


def _holds(name: str, server: Server, plays: Mapping[str, tuple[Ranks, Who]]) -> bool | None:
    """Whether it holds in all plays; None if one play has nothing to measure."""
    found = [CONTRACTS[name](server, None, ranks, who).holds for ranks, who in plays.values()]
    return None if None in found else all(found)


__all__ = ["Finding", "check", "claims_of", "measure", "sound"]
