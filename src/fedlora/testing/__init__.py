"""Contracts that every method must keep, and those that it may claim. Run them on your own method.

    findings = check(MyMethod())             all of them; `sound(findings)` says whether the method passes
    CONTRACTS["exact"](MyMethod(), *MIXED)   one of them, in one small federation

`fedlora methods check module:Class` prints the same as a table. Only torch is needed.
"""

from fedlora.testing.contracts import CONTRACTS, Finding, Measured, check, sound
from fedlora.testing.federations import EQUAL, MIXED

__all__ = ["CONTRACTS", "EQUAL", "MIXED", "Finding", "Measured", "check", "sound"]
