"""Contracts that every method must keep, and promises. Run them on your own method, from pytest or without it.

    findings = check(MyMethod())                         all contracts; `sound(findings)` says whether the method passes
    CONTRACTS["exact"](Server(MyMethod()), claim)        one contract, which raises `ContractBroken`
    measure(MyMethod())                                  the `Claim` that the method could make

`fedlora methods check module:Class` prints the same as a table. Only torch is needed.
"""

from fedlora.testing.checking import Finding, check, claims_of, measure, sound
from fedlora.testing.contract import Claim, Contract, ContractBroken, Measured
from fedlora.testing.contracts import CONTRACTS

__all__ = [
    "CONTRACTS",
    "Claim",
    "Contract",
    "ContractBroken",
    "Finding",
    "Measured",
    "check",
    "claims_of",
    "measure",
    "sound",
]
