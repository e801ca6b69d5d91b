"""A round of the server with a robust rule: the sum, heads, histories, the report; what is refused.

Kinds of evidence: *oracle* (dense float64 sums of what clients were sent and of c times their changes), *attack*,
*contract*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.analysis.audit import regauge
from fedlora.core import checkpoint
from fedlora.core.method import Method, Roles
from fedlora.errors import HyperparameterError, MethodFault, QuorumNotMet
from fedlora.methods.rolora import RoLoRA
from fedlora.server.judged import in_words
from fedlora.server.kept import Kept
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping, Rule
from fedlora.server.state import ServerState
from support.federations import EQUAL, EXAMPLES, MIXED, SHAPES, noise, rounds

PRODUCTS: dict[str, dict[str, Any]] = {
    "glora": {},
    "svd": {"energy": 1.0},
    "flexlora": {},
    "flora": {},
    "fedex-lora": {},
}
ONE_FACTOR: dict[str, dict[str, Any]] = {"ffa-lora": {}, "rolora": {}, "fedsvd": {}, "fedsa-lora": {}}
FOUR = (("a", "b", "c", "d"),) * 4
M = {"a": 0.0, "b": 0.3, "c": 1.0, "d": 2.5}


@dataclass(frozen=True)
class Given(Rule):
    """c_i = m_i p_i, as it is told."""

    name: ClassVar[str] = "given"
    m: tuple[float, ...] = tuple(M.values())

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        return p * torch.tensor(self.m, dtype=torch.float64)


def method(name: str) -> Method[Any]:
    return build(name, **{**PRODUCTS, **ONE_FACTOR}[name])


def server_of(name: str, rule: Rule | None) -> Server:
    return Server(method(name), round=Kept(rule, weighting="examples"))


def ranks_of(name: str) -> dict[str, int]:
    return EQUAL if method(name).one_rank or name in ("ffa-lora", "fedsvd", "fedsa-lora") else MIXED


def products(server: Server, before: ServerState, upload: Upload, module: str) -> tuple[Tensor, Tensor]:
    """(D, R) of a client, dense: with the change of the base weight in both."""
    download = server.download(before, upload.client)
    came = download.adapter.modules[module]
    base = download.base[module].total.delta() if module in download.base else 0.0
    sent = LoRA(**(came.tensors() | upload.adapter.modules[module].tensors()))
    return sent.delta() + base, came.delta() + base


@pytest.mark.parametrize("M", [M, dict(zip("abcd", (2.0, 1.0, 1.0, 1 / 3), strict=True))], ids=["less", "as much"])
@pytest.mark.parametrize("name", [*PRODUCTS, "ffa-lora", "rolora", "fedsvd"])
def test_the_next_update_is_the_sum_of_what_was_sent_out_and_c_times_each_change(
    name: str, M: dict[str, float]
) -> None:
    """sum_i p_i R_i + c_i (D_i - R_i) in dense float64, with c_i / p_i of 0, below 1, 1 and above; heads alike. The c_i
    sum to less than 1, or to 1."""
    for played in rounds(server_of(name, None), ranks_of(name), FOUR):
        server = server_of(name, Given(tuple(M.values())))
        after, p = server.aggregate(played.before, played.uploads), played.weights()
        for module in SHAPES:
            pairs = {u.client.id: products(server, played.before, u, module) for u in played.uploads}
            want = torch.stack([p[c] * (R + M[c] * (D - R)) for c, (D, R) in pairs.items()]).sum(0)
            got = server.global_update(after)[module].delta()
            assert float((got - want).norm() / want.norm()) < 1e-11, (name, played.before.round)
        was = played.before.heads["classifier.bias"]
        heads = {u.client.id: u.adapter.heads["classifier.bias"] for u in played.uploads}
        want = torch.stack([p[c] * (was + M[c] * (h - was)) for c, h in heads.items()]).sum(0)
        torch.testing.assert_close(after.heads["classifier.bias"], want)


def test_of_a_factor_that_travels_alone_it_is_the_sum_of_entries() -> None:
    """FedSA-LoRA sends A only: sum_i p_i A_0 + c_i (A_i - A_0)."""
    played = list(rounds(server_of("fedsa-lora", None), EQUAL, FOUR))[1]
    server, p = server_of("fedsa-lora", Given()), played.weights()
    after = server.aggregate(played.before, played.uploads)
    for module in SHAPES:
        A_0, got = (server.download(s, Client("a", 4)).adapter.modules[module].A for s in (played.before, after))
        A = {u.client.id: u.adapter.modules[module].A for u in played.uploads}
        torch.testing.assert_close(got, sum(p[c] * (A_0 + M[c] * (A[c] - A_0)) for c in p))  # type: ignore[operator]


@pytest.mark.parametrize("name", [*PRODUCTS, *ONE_FACTOR])
def test_a_rule_that_leaves_all_as_it_came_changes_no_bit(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        played = list(rounds(server_of(name, None), ranks_of(name), FOUR, dtype))[-1]
        got, want = (server_of(name, r).aggregate(played.before, played.uploads) for r in (NormClipping(1e9), None))
        assert got.tally is not None and got.tally.judged is not None and in_words(got.tally.judged.plain()) == ""
        one, other = (checkpoint.encoded(replace(state, tally=None)) for state in (got, want))
        assert one[0] == other[0] and all(torch.equal(t, other[1][key]) for key, t in one[1].items())


# ---- byzantine clients -----------------------------------------------------------------------------------------------

RULES: dict[str, Rule] = {
    "clip": NormClipping(), "centered-clipping": CenteredClipping(), "geometric-median": GeometricMedian(),
    "krum": Krum(2), "multi-krum": MultiKrum(2), "mixing": NNM(GeometricMedian(), 2),
}  # fmt: skip
LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign flip": lambda X: -10 * X, "far": lambda X: 1e6 * X, "nothing": lambda X: 0 * X,
    "elsewhere": lambda X: 20 * noise(tuple(X.shape), "elsewhere"),
}  # fmt: skip


def a_round_of_nine(server: Server, lie: Callable[[Tensor], Tensor]) -> tuple[ServerState, list[Upload], Tensor, float]:
    """A state whose readouts are no zeros; nine uploads that agree on a step of norm 1 up to 0.2, of which two lie;
    what all got plus the honest mean; and how far from that the farthest honest one is."""
    start = Adapter({"q": LoRA(torch.zeros(12, 4, dtype=torch.float64), noise((4, 10), "A"))})
    first = Adapter({"q": LoRA(noise((12, 4), "first"), noise((4, 10), "A"))})
    state = server.init(start)
    state = Server(server.method).aggregate(state, [Upload(Client("s0", 4), 1, first)])
    uploads, honest = [], []
    for k in range(9):
        R = server.download(state, Client(f"s{k}", 4)).adapter.modules["q"].delta()
        X = noise((12, 10), "step") / 11 + 0.2 * noise((12, 10), "own", k) / 11
        X = lie(X) if k in (2, 5) else X
        honest += [R + X] * (k not in (2, 5))
        B, s, A = torch.linalg.svd(R + X, full_matrices=False)
        uploads.append(Upload(Client(f"s{k}", 10), 1, Adapter({"q": LoRA(B * s, A)})))
    mean = torch.stack(honest).mean(0)
    return state, uploads, mean, max(float((x - mean).norm()) for x in honest)


@pytest.mark.parametrize("lie", list(LIES))
def test_every_rule_holds_two_of_nine_in_any_coordinates_and_order(lie: str) -> None:
    """The result stays within twice the honest spread, or, if clipped, within half of the step, where the plain mean is
    carried away; in coordinates of condition 1e6 each coefficient is the same, in another order each bit."""
    for name, rule in RULES.items():
        server = Server(build("svd", energy=1.0), round=Kept(rule))
        plain = Server(build("svd", energy=1.0))
        state, uploads, mean, spread = a_round_of_nine(server, LIES[lie])
        after = server.aggregate(state, uploads)
        off = float((server.global_update(after)["q"].delta() - mean).norm())
        carried = float((plain.global_update(plain.aggregate(state, uploads))["q"].delta() - mean).norm())
        assert off < (0.6 if "clip" in name else 2 * spread), (name, off, spread)
        assert lie == "nothing" or carried > 2 * off, (name, carried)
        moved = server.aggregate(state, [regauge(u, 1e6, seed=1) for u in uploads])
        assert after.tally is not None and after.tally.judged is not None
        assert moved.tally is not None and moved.tally.judged is not None
        for client, one in after.tally.judged.clients.items():
            again = moved.tally.judged.clients[client]
            assert again.coefficient == pytest.approx(one.coefficient, abs=1e-6), (name, client)
        turned = server.aggregate(state, uploads[::-1])
        assert turned.tally == after.tally
        assert all(torch.equal(*pair) for pair in zip(
            server.global_update(turned)["q"].factors, server.global_update(after)["q"].factors, strict=True
        ))  # fmt: skip


def test_who_is_left_out_reaches_no_method_and_leaves_no_history() -> None:
    """GLoRA remembers clients: a client of coefficient 0 is none that it has seen."""
    played = next(rounds(server_of("glora", None), MIXED, FOUR))
    after = server_of("glora", Given()).aggregate(played.before, played.uploads)
    for state in after.modules.values():
        assert set(state.history) == {"b", "c", "d"}
    plain = server_of("glora", None).aggregate(played.before, [u for u in played.uploads if u.client.id != "a"])
    assert {m: set(s.history) for m, s in plain.modules.items()} == {
        m: set(s.history) for m, s in after.modules.items()
    }


# ---- the report ------------------------------------------------------------------------------------------------------


def test_what_is_told_of_a_round(tmp_path: Path) -> None:
    """Norms against dense changes; weights; the one that was kept; and all of it comes back from a checkpoint."""
    assert Kept(Krum(0)).weighs_by == "uniform" and Kept().weighs_by == "examples"
    server = Server(method("svd"), round=Kept(Krum(0), weighting="examples"))
    played = list(rounds(server_of("svd", None), MIXED, FOUR))[1]
    after = server.aggregate(played.before, played.uploads)
    assert after.tally is not None and after.tally.judged is not None
    judged = after.tally.judged
    assert judged.rule == "krum" and len(judged.left_out) == 3
    for u in played.uploads:
        parts = [D - R for D, R in (products(server, played.before, u, m) for m in SHAPES)]
        parts += [h - played.before.heads[name] for name, h in u.adapter.heads.items()]
        one = judged.clients[u.client.id]
        assert one.norm == pytest.approx(float(torch.cat([x.flatten() for x in parts]).norm()), rel=1e-9)
        assert one.weight == EXAMPLES[u.client.id] / sum(EXAMPLES.values())
        assert (one.coefficient, bool(one.reason)) in ((1.0, False), (0.0, True))
    assert in_words(judged.plain()) == f"krum left out {', '.join(sorted(judged.left_out))} (3 of 4 clients)"
    checkpoint.save(tmp_path, 1, after)
    loaded = checkpoint.load_newest(tmp_path, ServerState, method("svd").State)
    assert loaded is not None and loaded[1].tally == after.tally


def test_a_module_that_few_hold_is_not_moved_further_than_they_moved_it() -> None:
    """Krum's choice counts once, though the module's weights are shared between its three holders only."""
    server = Server(method("svd"), round=Kept(Given((0.0, 0.0, 5.0, 0.0, 0.0))))
    zero = LoRA(torch.zeros(6, 2, dtype=torch.float64), torch.eye(2, 5, dtype=torch.float64))
    state = server.init(Adapter({"all": zero, "few": zero}))
    uploads = []
    for k in range(5):
        held = ("all", "few") if k in (1, 2, 3) else ("all",)
        lora = LoRA(torch.full((6, 2), 1.0 + k, dtype=torch.float64), torch.eye(2, 5, dtype=torch.float64))
        uploads.append(Upload(Client(f"c{k}", dict.fromkeys(held, 2)), 1, Adapter(dict.fromkeys(held, lora))))
    after = server.global_update(server.aggregate(state, uploads))
    for module in ("all", "few"):
        torch.testing.assert_close(after[module].delta(), uploads[2].adapter.modules["all"].delta())


# ---- refusals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turning(RoLoRA):
    """Both factors travel from its second round on."""

    def roles(self, round: int) -> Roles:
        return Roles() if round else super().roles(round)


def test_what_only_a_round_shows_is_refused_in_the_round() -> None:
    """Roles that make it an average of factors; too few clients; a rule that breaks. The state is unchanged."""
    server = Server(Turning(), round=Kept(NormClipping()))
    played = next(rounds(server_of("svd", None), EQUAL, FOUR))
    with pytest.raises(HyperparameterError, match="averages B and A"):
        server.open(replace(server.init(played.before.start), round=1))
    with pytest.raises(QuorumNotMet, match=r"krum \(f = 1\) needs 5 clients, and 4 came.*unchanged"):
        server_of("svd", Krum(1)).aggregate(played.before, played.uploads)
    with pytest.raises(MethodFault, match="finite coefficient"):
        server_of("svd", Given((-1.0, 1.0, 1.0, 1.0))).aggregate(played.before, played.uploads)
