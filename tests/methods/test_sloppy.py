"""Methods with one fault each are caught by the contract that it breaks, or by the server, and no client is blamed.

Every method here is FedIT-like averaging with one thing wrong, named by its class. Expected: which contract or error
says so, from what the class does; kind of evidence: negative control of `fedlora.testing`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from fedlora import Kept, LoRA, Method, Roles, Server, Update, build
from fedlora.errors import HyperparameterError, MethodFault
from fedlora.methods._shared import padded
from fedlora.methods.fedit import mean_factors
from fedlora.methods.flexlora import FlexLoRA
from fedlora.testing import CONTRACTS, MIXED, check, sound
from fedlora.testing.federations import rounds


@dataclass(frozen=True, eq=False)
class State:
    mean: LoRA
    extra: Any = None


@dataclass(frozen=True)
class Sound(Method[State]):
    """Average each factor, pad with zeros to the largest rank: nothing is wrong with it."""

    name: ClassVar[str] = "sound"
    paper: ClassVar[str] = "none"
    State: ClassVar[type] = State

    def init(self, seed: LoRA) -> Any:
        return State(seed)

    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return State(self.mean(state, updates))

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        return mean_factors([replace(u, lora=padded(u.lora, state.mean.rank)) for u in updates])

    def readout(self, state: Any, client: str | None, rank: int) -> LoRA:
        return state.mean.first(rank)

    def effective(self, state: Any) -> LoRA | None:
        return state.mean


class WholeRank(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> LoRA:
        return state.mean


class NotANumber(Sound):
    """After the first round. The clients would train on it, and their uploads be NaN."""

    def readout(self, state: Any, client: str | None, rank: int) -> LoRA:
        started = bool(state.mean.factors[0].any())
        return super().readout(state, client, rank).map(lambda t: t / 0 * 0 if started else t)


class DeadSlots(Sound):
    """The last slot of a common factor is zero, where the server cannot fill it."""

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        B = super().mean(state, updates).B
        return LoRA(B * 0, torch.cat([state.mean.A[:-1], state.mean.A[-1:] * 0]))


class OverwritesItsState(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        mean = self.mean(state, updates)
        for old, new in zip(state.mean.factors, mean.factors, strict=True):
            old.copy_(new)
        return state


class Draws(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return State(self.mean(state, updates).map(lambda t: t + 1e-6 * torch.randn_like(t)))


class EndsDecide(Sound):
    """The list turned round gives the same, a list that begins elsewhere does not."""

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        return super().mean(state, [replace(u, weight=0.5) for u in (updates[0], updates[-1])])


class DoublesTheStart(Sound):
    def init(self, seed: LoRA) -> Any:
        seed.factors[1].mul_(2)
        return State(seed)


class ForgetsTheStart(Sound):
    def init(self, seed: LoRA) -> Any:
        return State(LoRA(torch.zeros_like(seed.factors[0]), seed.A))


class OnlyWide(Sound):
    """A constant in float64, which no float32 factor can be multiplied with."""

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        mean = super().mean(state, updates)
        return LoRA(mean.B, torch.eye(len(mean.factors[1]), dtype=torch.float64) @ mean.factors[1])


class KeepsASet(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return replace(super().aggregate(state, updates), extra={u.client for u in updates})


class ModelAtTimes(Sound):
    def effective(self, state: Any) -> LoRA | None:
        return state.mean if bool(state.mean.factors[0].any()) else None


class DividesByWeights(FlexLoRA):
    """Right without a rule, whose terms alone sum to 1."""

    name: ClassVar[str] = "divides"

    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        total = sum(u.weight for u in updates)
        return super().aggregate(state, [replace(u, weight=u.weight / total) for u in updates])


class SquaresWeights(Sound):
    """It says that it uses the mean factors alone, and does not."""

    linear_in: ClassVar[Any] = "factors"

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        return super().mean(state, [replace(u, weight=u.weight**2) for u in updates])


class Own(State):
    """A class that no checkpoint could read back as a `State`."""


class OfAnotherClass(Sound):
    def init(self, seed: LoRA) -> Any:
        return Own(seed)


class TooFewOfAFrozenFactor(Sound):
    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def readout(self, state: Any, client: str | None, rank: int) -> LoRA:
        return state.mean.first(rank - 1)


class LacksAFactor(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> LoRA:
        return LoRA(state.mean.first(rank).B, None)


class Boasts(Sound):
    claims: ClassVar[Any] = frozenset({"exact", "gauge", "readouts", "halves"})


class DividesByZero(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        raise ZeroDivisionError("division by zero")


# Class -> the contract that says so, and words of what it says.
CAUGHT: dict[type[Method[Any]], tuple[str, str]] = {
    ModelAtTimes: ("rank", "None in some states"),
    DeadSlots: ("alive", "1 dead slots"),
    OverwritesItsState: ("purity", "`aggregate` changed what it was given"),
    Draws: ("purity", "the same inputs gave other bits"),
    KeepsASet: ("purity", "a set at /modules/attn.q/extra"),
    EndsDecide: ("order", "updates in another order moves it by"),
    DoublesTheStart: ("purity", "`init` changed what it was given"),
    ForgetsTheStart: ("purity", "a trained start"),
    OnlyWide: ("rank", "same dtype"),
    DividesByWeights: ("sums", "linear in products: sums in place of updates move it by"),
    SquaresWeights: ("sums", "linear in factors: sums in place of updates move it by"),
}
FAULTS: dict[type[Sound], str] = {
    OfAnotherClass: "sound.init",
    TooFewOfAFrozenFactor: "sound.readout.* are needed",
    LacksAFactor: "sound.readout.* is needed",
    WholeRank: r"sound.readout.* returned 6 slots; [25] are needed, at most",
    NotANumber: "sound.readout.* holds NaN or Inf",
    DividesByZero: "sound.aggregate_all raised ZeroDivisionError: division by zero",
}


def test_the_sound_one_keeps_what_it_must_and_promises_nothing() -> None:
    findings = check(Sound())
    assert sound(findings) and [f.contract for f in findings] == list(CONTRACTS)
    assert {f.contract: f.claimed for f in findings}["exact"] == "no" and not any(f.why for f in findings)


@pytest.mark.parametrize("cls", CAUGHT, ids=lambda c: c.__name__)
def test_a_sloppy_method_is_caught_by_the_contract_that_it_breaks(cls: type[Method[Any]]) -> None:
    """By name, with what was measured and what to do; and `check` goes on to what is kept."""
    name, says = CAUGHT[cls]
    found = {f.contract: f for f in check(cls())}
    assert found[name].holds is False and says in str(found[name].why)
    assert not sound(tuple(found.values())) and any(f.holds for f in found.values())


def test_claims_that_do_not_hold_are_broken_contracts() -> None:
    found = {f.contract: f for f in check(Boasts())}
    assert [name for name, f in found.items() if f.holds is False] == ["exact", "gauge", "readouts"]
    assert re.match(r"sound breaks .*'exact': off the mean .*\d", str(found["exact"].why))


@pytest.mark.parametrize("cls", FAULTS, ids=lambda c: c.__name__)
def test_the_server_names_the_method_and_the_function_that_is_at_fault(cls: type[Sound]) -> None:
    """In a round of an engine that refuses bad clients one by one, too: a quorum is no excuse for a method."""
    with pytest.raises(MethodFault, match=FAULTS[cls]):
        list(rounds(Server(cls(), round=Kept(quorum=1)), *MIXED))
    assert not sound(check(cls()))


def test_a_claim_that_is_no_contract_is_refused() -> None:
    class Garbled(Sound):
        claims: ClassVar[Any] = frozenset({"fast"})

    with pytest.raises(HyperparameterError, match=r"'fast'.* rank, alive"):
        check(Garbled())


def test_what_is_no_frozen_method_is_not_even_built() -> None:
    for name, says in (
        ("Lacks", "it has no aggregate; it has no effective"),
        ("OfABag", "its State, Bag, is no @dataclass"),
        ("Thawed", "it is no @dataclass"),
        ("State", "derives from fedlora.Method"),
    ):
        with pytest.raises(HyperparameterError, match=says):
            build(f"{__name__}:{name}")


class Bag:
    pass


@dataclass(frozen=True)
class OfABag(Sound):
    State: ClassVar[type] = Bag


@dataclass
class Thawed(Method[LoRA]):
    name: ClassVar[str] = "thawed"
    paper: ClassVar[str] = "none"
    init = aggregate = readout = effective = lambda self, *_: None  # type: ignore[assignment]


@dataclass(frozen=True)
class Lacks(Method[LoRA]):
    name: ClassVar[str] = "lacks"
    paper: ClassVar[str] = "none"

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state
