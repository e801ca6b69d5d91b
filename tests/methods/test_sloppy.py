"""Methods with one fault each are caught by the contract that it breaks, or by the server, and no client is blamed.

Every method here is FedIT-like averaging with one thing wrong, named by its class. Expected: which contract or error
says so, from what the class does; kind of evidence: negative control of `fedlora.testing`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from fedlora import LoRA, Readout, Roles, Server, Update, build
from fedlora.core.base_change import moved
from fedlora.core.lora import revive
from fedlora.core.method import AllAtOnce
from fedlora.errors import HyperparameterError, MethodFault
from fedlora.linalg import weighted_mean
from fedlora.testing import CONTRACTS, Claim, ContractBroken, check, measure, sound
from fedlora.testing.federations import EQUAL, FULL, MIXED, rounds


@dataclass(frozen=True, eq=False)
class State:
    key: int
    round: int
    mean: LoRA
    extra: Any = None


@dataclass(frozen=True)
class Sound:
    """Average each factor, pad with zeros to the largest rank: nothing is wrong with it, and it claims too little."""

    name: ClassVar[str] = "sound"
    paper: ClassVar[str] = "none"
    State: ClassVar[type] = State
    CLAIMS: ClassVar[Any] = Claim(exact=False, gauge=False, state=False, mixed=True)

    def init(self, seed: LoRA, key: int) -> Any:
        return State(key, 0, revive(seed, key))

    def roles(self, round: int) -> Roles:
        return Roles()

    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return replace(state, round=state.round + 1, mean=self.mean(state, updates))

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        p, pad = [u.weight for u in updates], torch.nn.functional.pad
        more = [state.mean.rank - u.rank for u in updates]
        B = weighted_mean([pad(u.B, (0, m)) for u, m in zip(updates, more, strict=True)], p)
        return LoRA(B, weighted_mean([pad(u.A, (0, 0, 0, m)) for u, m in zip(updates, more, strict=True)], p))

    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        B, A = state.mean.factors
        return Readout(revive(LoRA(B[:, :rank], A[:rank]), state.key, state.round, client or ""))

    def effective(self, state: Any) -> LoRA | None:
        return state.mean

    def diagnostics(self, state: Any) -> dict[str, object]:
        return {"rank": state.mean.rank}


@dataclass(frozen=True)
class WholeRank(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        return Readout(state.mean)


@dataclass(frozen=True)
class Transposed(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        B, A = super().readout(state, client, rank).lora.factors
        return Readout(LoRA(A.mT, B.mT))


@dataclass(frozen=True)
class Integers(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        return Readout(super().readout(state, client, rank).lora.map(torch.Tensor.long))


@dataclass(frozen=True)
class HalfPrecision(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        return Readout(super().readout(state, client, rank).lora.map(torch.Tensor.half))


@dataclass(frozen=True)
class AllAlike(Sound):
    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        return super().mean(state, [replace(u, weight=1 / len(updates)) for u in updates])


@dataclass(frozen=True)
class NotANumber(Sound):
    """From round 2 on. The clients train on it, and their uploads are NaN."""

    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        lora = super().readout(state, client, rank).lora
        return Readout(lora.map(lambda t: t / 0 * 0 if state.round else t))


@dataclass(frozen=True)
class DeadSlots(Sound):
    """What `revive` is for: a slot that nobody held, cut out of a mean of zeros."""

    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        B, A = (t.clone() for t in super().readout(state, client, rank).lora.factors)
        B[:, -1:], A[-1:] = 0.0, 0.0
        return Readout(LoRA(B, A))


@dataclass(frozen=True)
class OverwritesItsState(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        mean = self.mean(state, updates)
        for old, new in zip(state.mean.factors, mean.factors, strict=True):
            old.copy_(new)
        return replace(state, round=state.round + 1)


@dataclass(frozen=True)
class ScalesTheUploads(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        after = super().aggregate(state, updates)
        for u in updates:
            u.B.mul_(u.weight)
        return after


@dataclass(frozen=True)
class HandsOutItsState(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        B, A = state.mean.factors
        return Readout(LoRA(B[:, :rank], A[:rank]), fresh=True)


@dataclass(frozen=True)
class Draws(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        after = super().aggregate(state, updates)
        return replace(after, mean=after.mean.map(lambda t: t + 1e-6 * torch.randn_like(t)))


@dataclass(frozen=True)
class LastOneWins(Sound):
    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        return super().mean(state, [replace(updates[-1], weight=1.0)])


COUNTER = itertools.count()


@dataclass(frozen=True)
class CountsCalls(Sound):
    """Its readouts depend on how often they were asked for."""

    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        return Readout(super().readout(state, client, rank).lora.map(lambda t: t + 1e-9 * next(COUNTER)))


@dataclass(frozen=True)
class KeepsAList(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return replace(super().aggregate(state, updates), extra={u.client for u in updates})


class Bag:
    def __init__(self, mean: LoRA) -> None:
        self.mean, self.key, self.round = mean, 0, 0


@dataclass(frozen=True)
class NoDataclass(Sound):
    State: ClassVar[type] = Bag

    def init(self, seed: LoRA, key: int) -> Any:
        return Bag(seed)

    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return Bag(self.mean(state, updates))


@dataclass
class Changeable:
    mean: LoRA
    key: int = 0
    round: int = 0


@dataclass(frozen=True)
class ChangeableState(Sound):
    State: ClassVar[type] = Changeable

    def init(self, seed: LoRA, key: int) -> Any:
        return Changeable(seed)


@dataclass(frozen=True)
class DividesByZero(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        raise ZeroDivisionError("division by zero")


@dataclass(frozen=True)
class ReturnsThePair(Sound):
    def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
        return self.mean(state, updates)


@dataclass(frozen=True)
class WrongDiagnostics(Sound):
    def diagnostics(self, state: Any) -> dict[str, object]:
        return {"rank": state.mean.shape[0]}


@dataclass(frozen=True)
class NoRoles(Sound):
    def roles(self, round: int) -> Any:
        return None


@dataclass(frozen=True)
class ForgetsAMatrix(Sound, AllAtOnce[Any]):
    def aggregate_all(self, states: Sequence[Any], updates: Sequence[Sequence[Update]], each: Any = None) -> list[Any]:
        return [self.aggregate(states[0], updates[0])]


@dataclass(frozen=True)
class ForgetsAReadout(Sound, AllAtOnce[Any]):
    def aggregate_all(self, states: Sequence[Any], updates: Sequence[Sequence[Update]], each: Any = None) -> list[Any]:
        return [self.aggregate(*pair) for pair in zip(states, updates, strict=True)]

    def readouts(self, states: Sequence[Any], client: str | None, ranks: Sequence[int]) -> list[Readout]:
        return super().readouts(states[:-1], client, ranks[:-1])


@dataclass(frozen=True)
class TransposedModel(Sound):
    def effective(self, state: Any) -> LoRA | None:
        return LoRA(state.mean.A.mT, state.mean.B.mT)


@dataclass(frozen=True)
class AsksForWhatStaysHome(Sound):
    def roles(self, round: int) -> Roles:
        return Roles(B="local")


@dataclass(frozen=True)
class MovesTheBaseSecretly(Sound):
    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        return replace(super().readout(state, client, rank), base=moved(None, [(1.0, LoRA(*state.mean.factors))]))


@dataclass(frozen=True)
class MovesAnotherBase(Sound):
    """The change is of the transposed matrix."""

    def roles(self, round: int) -> Roles:
        return Roles(moves_base=True)

    def readout(self, state: Any, client: str | None, rank: int) -> Readout:
        B, A = state.mean.factors
        change = moved(None, [(1.0, LoRA(A.mT.contiguous(), B.mT.contiguous()))]) if state.round else None
        return replace(super().readout(state, client, rank), base=change)


@dataclass(frozen=True)
class CrashesOnOtherRanks(Sound):
    CLAIMS: ClassVar[Any] = Claim(exact=False, gauge=False, state=False, mixed=False, weights=False)

    def mean(self, state: Any, updates: Sequence[Update]) -> LoRA:
        return LoRA(*(torch.stack(t).mean(0) for t in zip(*(u.lora.factors for u in updates), strict=True)))


# Class -> the contract that says so, and a word of what it says; or the server's own error and a word of that.
CAUGHT: dict[type[Sound], tuple[str, str]] = {
    DeadSlots: ("alive", "1 of 4 slots are dead"),
    OverwritesItsState: ("purity", "the state that it was given"),
    ScalesTheUploads: ("purity", "the uploads that it was given"),
    HandsOutItsState: ("purity", "trains in place"),
    Draws: ("purity", "when aggregated again"),
    CountsCalls: ("purity", "when read out again"),
    KeepsAList: ("purity", "a set at /modules/attn.q/extra"),
    NoDataclass: ("protocol", "its State is not a dataclass"),
    ChangeableState: ("protocol", "Changeable is a dataclass"),
    LastOneWins: ("order", "updates turned round"),
}
FAULTS: dict[type[Sound], str] = {
    WholeRank: "sound.readout.* returned B of shape",
    Transposed: "sound.readout.* returned B of shape",
    HalfPrecision: "sound.readout.* returned B as torch.float16",
    NotANumber: "sound.readout.* holds NaN or Inf",
    MovesAnotherBase: "sound.readout.* weight that is LoRA",
    Integers: "sound.readout.* returned B as torch.int64",
    DividesByZero: "sound.aggregate raised ZeroDivisionError: division by zero",
    ReturnsThePair: "sound.aggregate returned a LoRA; its State is State",
    MovesTheBaseSecretly: "sound.readout.* the base weight, .*moves_base",
}


def test_a_method_of_weights_of_its_own_says_so() -> None:
    """The default claim is that clients count by their weights; what ignores them is sound where it says so."""
    found = {f.contract: f for f in check(AllAlike())}
    assert found["weights"].holds is False and "changes no bit" in found["weights"].measured
    assert sound(check(AllAlike(), replace(Sound.CLAIMS, weights=False)))
    with pytest.raises(ContractBroken, match="promises less"):
        CONTRACTS["weights"](Server(Sound()), replace(Sound.CLAIMS, weights=False))


def test_the_sound_one_keeps_all_contracts_and_its_claims() -> None:
    findings = check(Sound())
    assert sound(findings) and [f.contract for f in findings] == list(CONTRACTS)
    assert measure(Sound()) == Sound.CLAIMS
    assert all(f.holds for f in findings if f.contract != "halves"), "only halves is not claimed"


@pytest.mark.parametrize("cls", CAUGHT, ids=lambda c: c.__name__)
def test_a_sloppy_method_is_caught_by_the_contract_that_it_breaks(cls: type[Sound]) -> None:
    """By name and with what was measured."""
    name, says = CAUGHT[cls]
    with pytest.raises(ContractBroken) as broken:
        CONTRACTS[name](Server(cls()))
    assert re.search(f"sound breaks .*{name!r}: claimed always; measured: ", str(broken.value))
    assert says in str(broken.value)


@pytest.mark.parametrize("cls", [KeepsAList, LastOneWins], ids=lambda c: c.__name__)
def test_check_goes_on_after_a_broken_contract_and_finds_what_is_kept(cls: type[Sound]) -> None:
    findings = {f.contract: f for f in check(cls())}
    name, says = CAUGHT[cls]
    assert findings[name].holds is False and says in (findings[name].why or "")
    assert findings["rank"].holds and findings["alive"].holds and not sound(tuple(findings.values()))


@pytest.mark.parametrize("cls", FAULTS, ids=lambda c: c.__name__)
def test_the_server_names_the_method_and_the_function_that_is_at_fault(cls: type[Sound]) -> None:
    """In a round of an engine that refuses bad clients one by one, too: a quorum is no excuse for a method."""
    server = Server(cls(), quorum=1)
    ranks = MIXED if cls is WholeRank else EQUAL
    with pytest.raises(MethodFault, match=FAULTS[cls]):
        list(rounds(server, ranks, FULL))
    assert not sound(check(cls()))


def test_what_goes_wrong_elsewhere_is_a_broken_contract_and_no_traceback() -> None:
    """Functions that the server does not guard, and other errors of ours: `check` says whose they are."""
    for cls, says in (
        (WrongDiagnostics, "has no attribute 'shape'"),
        (AsksForWhatStaysHome, "leave to the client"),
        (NoRoles, "None"),
        (ForgetsAMatrix, "states came back for"),
        (ForgetsAReadout, "readout"),
        (TransposedModel, "update of a matrix (22, 30)"),
    ):
        findings = check(cls())
        assert not sound(findings)
        assert any(says in (f.why or "") for f in findings), cls
        assert not any("client" in f.why and "refused" in f.why for f in findings if f.why)


def test_a_readout_of_nan_is_not_put_on_the_clients() -> None:
    """They would train on NaN and be refused; the method is named before that."""
    findings = check(NotANumber())
    whys = [f.why for f in findings if f.why]
    assert not sound(findings) and len(whys) > 5
    for why in whys:
        assert "readout" in why and ("holds NaN" in why or "what the method gave" in why)


def test_a_method_that_crashes_on_other_ranks_must_refuse_them_by_name() -> None:
    with pytest.raises((ContractBroken, MethodFault), match="aggregate raised RuntimeError"):
        CONTRACTS["mixed"](Server(CrashesOnOtherRanks()), CrashesOnOtherRanks.CLAIMS, MIXED, FULL)
    findings = {f.contract: f.holds for f in check(CrashesOnOtherRanks())}
    assert [name for name, holds in findings.items() if holds is False] == ["mixed"]


@pytest.mark.parametrize("cls", [NoDataclass])
def test_what_no_checkpoint_could_hold_is_not_even_built(cls: type[Sound]) -> None:
    with pytest.raises(HyperparameterError, match="its State is not a dataclass"):
        build(f"{__name__}:{cls.__name__}")
