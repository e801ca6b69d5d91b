"""The client's three verbs: receive, send, keep. Kind of evidence: contract.

Expected values come from the definition of the roles alone (`fedlora.core.method.Roles`): shared parts travel both
ways, local ones never travel, frozen ones travel down. Tensors are told apart by a constant value beside each test.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, Download, LoRA, Roles, keep, receive, send
from fedlora.client import ClientMemory, Played, begin_round, finish_round
from fedlora.core.method import Role
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError, KeptStateError, UploadRefused

EACH = (  # each part in each role, and modules of which nothing travels
    Roles("shared", "shared", "shared"), Roles("local", "shared", "local"), Roles("shared", "frozen", "frozen"),
    Roles("frozen", "local", "shared"), Roles("local", "local", "local"), Roles("frozen", "frozen", "local"),
)  # fmt: skip
every_roles = pytest.mark.parametrize("roles", EACH, ids=lambda r: f"{r.B}-{r.A}-{r.heads}")
D_OUT, D_IN, RANK = 5, 4, 2
SENT, START, KEPT, TRAINED = 1.0, 2.0, 3.0, 4.0  # which tensor is which


def pair(value: float, rank: int = RANK, *, B: bool = True, A: bool = True) -> LoRA:
    return LoRA(torch.full((D_OUT, rank), value) if B else None, torch.full((rank, D_IN), value) if A else None)


def part(value: float, roles: Roles, wanted: tuple[Role, ...], rank: int = RANK) -> Adapter:
    """Those parts of one module "m" and one head "h" whose role is wanted."""
    B, A = roles.B in wanted, roles.A in wanted
    modules = {"m": pair(value, rank, B=B, A=A)} if B or A else {}
    return Adapter(modules, {"h": torch.full((3,), value)} if roles.heads in wanted else {})


def downloaded(roles: Roles, rank: int = RANK) -> Download:
    return Download(
        client=Client("a", rank),
        round=0,
        adapter=part(SENT, roles, ("shared", "frozen"), rank),
        roles=roles,
        start=part(START, roles, ("local",), rank),
        base={},
    )


def values(adapter: Adapter | None) -> dict[str, float]:
    """Part -> the constant that marks where it came from; absent parts are left out."""
    if adapter is None:
        return {}
    tensors: dict[str, Tensor] = {f: t for lora in adapter.modules.values() for f, t in lora.tensors().items()}
    tensors |= adapter.heads
    assert all(len(t.unique()) == 1 for t in tensors.values())
    return {name: float(t.flatten()[0]) for name, t in tensors.items()}


def expected(roles: Roles, **by_role: float) -> dict[str, float]:
    """The parts of the given roles, each with its role's value."""
    owners = {"B": roles.B, "A": roles.A, "h": roles.heads}
    return {name: by_role[role] for name, role in owners.items() if role in by_role}


# --------------------------------------------------------------------------------------------------------- receive


@every_roles
def test_a_later_receive_completes_with_what_was_kept(roles: Roles) -> None:
    """The start is used only the first time, and need not come again; the inputs stay as they are."""
    download, kept = downloaded(roles), keep(Adapter({"m": pair(KEPT)}, {"h": torch.full((3,), KEPT)}), roles)
    for given in (download, replace(download, start=Adapter({}))):
        assert values(receive(given, kept)) == expected(roles, shared=SENT, frozen=SENT, local=KEPT)
    assert values(download.adapter) == expected(roles, shared=SENT, frozen=SENT)
    assert values(download.start) == expected(roles, local=START)
    assert values(kept) == expected(roles, local=KEPT)


def test_a_module_kept_and_one_new_to_the_client() -> None:
    """A client that takes on a module later starts there, and goes on where it has kept something."""
    roles = Roles(B="local")
    one, two = pair(SENT, B=False), pair(START, A=False)
    download = replace(downloaded(roles), adapter=Adapter({"m": one, "n": one}), start=Adapter({"m": two, "n": two}))
    got = receive(download, Adapter({"m": pair(KEPT, A=False)}))
    assert [float(got.modules[m].factors[0][0, 0]) for m in ("m", "n")] == [KEPT, START]


@pytest.mark.parametrize(("roles", "factor"), [(Roles(B="local"), "B"), (Roles(A="local"), "A")])
def test_a_kept_factor_of_another_rank_is_refused(roles: Roles, factor: str) -> None:
    with pytest.raises(KeptStateError, match=rf"kept factor {factor} .*'m' .*rank 3, .* rank 2"):
        receive(downloaded(roles), part(KEPT, roles, ("local",), rank=3))


@pytest.mark.parametrize(("roles", "factor"), [(Roles(B="local"), "B"), (Roles(A="local"), "A")])
def test_a_local_factor_neither_sent_nor_kept_is_named(roles: Roles, factor: str) -> None:
    download = replace(downloaded(roles), start=Adapter({}))
    for kept in (None, Adapter({}), Adapter({"other": pair(KEPT)})):
        with pytest.raises(KeptStateError, match=rf"factor {factor} .*'m' is local: .*kept"):
            receive(download, kept)


@pytest.mark.parametrize(
    ("roles", "kept"),
    [
        (Roles(B="local"), Adapter({"m": LoRA(torch.ones(D_OUT + 1, RANK), None)})),
        (Roles(A="local"), Adapter({"m": LoRA(None, torch.ones(RANK, D_IN + 1))})),
        (Roles(heads="local"), Adapter({}, {"h": torch.ones(4)})),
        (Roles(B="local"), Adapter({"other": pair(KEPT, A=False)})),
    ],
    ids=["B", "A", "head", "module"],
)
def test_kept_parts_of_another_model_are_refused(roles: Roles, kept: Adapter) -> None:
    """Of the same rank but another matrix, as the start that came along shows; or a module that does not come."""
    with pytest.raises(KeptStateError):
        receive(downloaded(roles), kept)


# -------------------------------------------------------------------------------------------------- send and keep


def complete() -> Adapter:
    return Adapter({"m": pair(TRAINED)}, {"h": torch.full((3,), TRAINED)})


@every_roles
def test_send_is_the_shared_parts_and_keep_the_local_ones(roles: Roles) -> None:
    """An upload holds exactly what is shared: no module where neither factor is. keep: None where nothing is local."""
    assert values(send(complete(), roles)) == expected(roles, shared=TRAINED)
    assert set(send(complete(), roles).modules) == ({"m"} if "shared" in (roles.B, roles.A) else set())
    assert values(keep(complete(), roles)) == expected(roles, local=TRAINED)
    assert (keep(complete(), roles) is None) == ("local" not in (roles.B, roles.A, roles.heads))


def test_a_trainer_must_give_back_each_local_part_in_its_shape_and_finite() -> None:
    """The server would refuse what is wrong in a shared part, and never sees these."""
    job = begin_round(downloaded(Roles(B="local", heads="local")), ClientMemory())

    def finished(**changed: Any) -> Played:
        return finish_round(job, Trained(replace(job.adapter, **changed), 5, 0.5, 7))

    assert finished().memory.position == 7
    lora = job.adapter.modules["m"]
    for changed, why in (
        ({"modules": {}}, r"factor B .*no shape .*\(5, 2\)"),
        ({"modules": {"m": LoRA(None, lora.A)}}, "factor B .*no shape"),
        ({"modules": {"m": lora.first(1)}}, r"factor B .* has \(5, 1\)"),
        ({"heads": {**job.adapter.heads, "new": torch.zeros(2)}}, r"head 'new' has \(2,\) .*had no shape"),
        ({"modules": {"m": lora.map(lambda t: t * math.nan)}}, "factor B of module 'm' holds NaN"),
    ):
        with pytest.raises(UploadRefused, match=why):
            finished(**changed)


# --------------------------------------------------------------------------------------- clients, and the server


def test_a_client_id_is_a_string_and_ranks_are_integers_from_one() -> None:
    for id in ("", None, 7, b"a"):
        with pytest.raises(HyperparameterError, match=r"client id must be .*; got"):
            Client(id, 4)  # type: ignore[arg-type]
    for rank in (0, -1, 2.0, True, None, "4", math.nan, {"m": 0}, {"m": 4, "n": True}, {"m": 2.5}):
        with pytest.raises(HyperparameterError, match=r"client 'a': ranks must be .*; got"):
            Client("a", rank)  # type: ignore[arg-type]
