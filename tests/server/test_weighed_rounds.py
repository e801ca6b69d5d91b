"""A robust rule in a round of the server: what becomes of uploads, of heads, of the tally; what is refused.

Kinds of evidence: *oracle* (dense float64 sums of what clients were sent and of m times their changes), *contract*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.core import checkpoint
from fedlora.core.method import Method, Roles
from fedlora.errors import HyperparameterError
from fedlora.methods.rolora import RoLoRA
from fedlora.server.judged import told
from fedlora.server.robust_rules import Clip, GeometricMedian, Krum, MultiKrum, Rule, Weighed
from fedlora.server.state import ServerState
from support.federations import EQUAL, EXAMPLES, MIXED, SHAPES, rounds, seed_adapter

ANY_RANK = {"glora": {}, "glora energy": {"basis": "energy"}, "svd": {"energy": 1.0}, "flexlora": {}, "flora": {}}
ONE_FACTOR = {"ffa-lora": {}, "rolora": {}, "fedsvd": {}}
FACTORS = {"fedit": {}, "padded-average": {}, "hetlora": {"weights": "examples"}, "fedrot-lora": {}, "lora-fair": {}}
FOUR = (("a", "b", "c", "d"),) * 4
METHODS: dict[str, dict[str, Any]] = {**ANY_RANK, **ONE_FACTOR, **FACTORS, "fedex-lora": {}, "fedsa-lora": {}}


@dataclass(frozen=True)
class Given(Rule):
    """Multipliers as they are told, client by client."""

    name = "given"
    m: tuple[float, ...]

    def least(self, clients: int) -> int:
        return 1

    def weigh(self, geometry: Any, p: Tensor) -> Weighed:
        return Weighed(p * torch.tensor(self.m, dtype=torch.float64))


def method(name: str) -> Method[Any]:
    return build(name.split()[0], **METHODS[name])


def products(server: Server, before: ServerState, upload: Upload, module: str) -> tuple[Tensor, Tensor]:
    """(D, R) of a client, dense: with the change of the base weight in both."""
    download = server.download(before, upload.client)
    came = download.adapter.modules[module]
    base = download.base[module].total.delta() if module in download.base else 0.0
    sent = LoRA(**(came.tensors() | upload.adapter.modules[module].tensors()))
    return sent.delta() + base, came.delta() + base


@pytest.mark.parametrize("name", [*ANY_RANK, *ONE_FACTOR, "fedex-lora"])
def test_exact_methods_keep_the_reweighted_sum_exactly(name: str) -> None:
    """sum_i p_i (R_i + m_i (D_i - R_i)) in dense float64, with multipliers 0, below 1, 1 and above; heads alike."""
    given = (0.0, 0.3, 1.0, 2.5)
    server = Server(method(name), rule=Given(given), weighting="examples")
    ranks = EQUAL if name == "fedex-lora" else MIXED
    for played in rounds(Server(method(name)), ranks, FOUR):
        after = server.aggregate(played.before, played.uploads)
        p = [EXAMPLES[u.client.id] / sum(EXAMPLES.values()) for u in played.uploads]
        for module in SHAPES:
            pairs = [products(server, played.before, u, module) for u in played.uploads]
            want = sum(w * (R + m * (D - R)) for w, m, (D, R) in zip(p, given, pairs, strict=True))
            got = server.global_update(after)[module].delta()
            assert float((got - want).norm() / want.norm()) < 1e-11, (name, played.before.round)
        heads = [u.adapter.heads["classifier.bias"] for u in played.uploads]
        was = played.before.heads["classifier.bias"]
        want = sum(w * (was + m * (h - was)) for w, m, h in zip(p, given, heads, strict=True))
        torch.testing.assert_close(after.heads["classifier.bias"], want)


@pytest.mark.parametrize("name", [*FACTORS, "fedsa-lora"])
def test_methods_that_average_factors_get_them_moved(name: str) -> None:
    """The same server without a rule, on uploads whose travelling factors are B_0 + m (B_i - B_0), A alike."""
    given = (0.0, 0.3, 1.0, 2.5)
    plain = Server(method(name))
    played = list(rounds(plain, EQUAL, FOUR))[1]
    rule = Given(given, factor_averages=name in FACTORS)
    got = Server(method(name), rule=rule, weighting="examples").aggregate(played.before, played.uploads)
    moved = []
    for m, u in zip(given, played.uploads, strict=True):
        came = plain.download(played.before, u.client).adapter
        modules = {}
        for module, lora in u.adapter.modules.items():
            was = came.modules[module].tensors()
            parts = {f: was[f] + m * (t - was[f]) for f, t in lora.tensors().items()}
            modules[module] = LoRA(parts.get("B"), parts.get("A"))
        heads = {h: played.before.heads[h] + m * (t - played.before.heads[h]) for h, t in u.adapter.heads.items()}
        moved.append(replace(u, adapter=Adapter(modules, heads)))
    want = plain.aggregate(played.before, moved)
    for module in SHAPES:
        for client in EQUAL:
            ours, theirs = (plain.download(s, Client(client, 4)).adapter.modules[module] for s in (got, want))
            for factor, tensor in ours.tensors().items():
                torch.testing.assert_close(tensor, theirs.tensors()[factor], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_rule_that_leaves_all_as_it_came_changes_no_bit(name: str) -> None:
    rule = Clip(threshold=1e9, factor_averages=name in FACTORS)
    for dtype in (torch.float64, torch.float32):
        played = list(rounds(Server(method(name)), EQUAL, FOUR, dtype))[-1]
        got = Server(method(name), rule=rule, weighting="examples").aggregate(played.before, played.uploads)
        want = Server(method(name)).aggregate(played.before, played.uploads)
        assert got.tally is not None and got.tally.judged is not None and want.tally is not None
        assert {one.after / one.before for one in got.tally.judged.clients.values()} == {1.0}
        for state in (got, want):
            bare = replace(state, tally=None)
            assert _tensors(bare) == _tensors(replace(want, tally=None))


def _tensors(state: ServerState) -> Any:
    tensors: dict[str, Tensor] = {}
    tree = checkpoint._encode(state, "", tensors)
    return tree, {key: t.numpy().tobytes() for key, t in tensors.items()}


def test_the_base_is_what_the_client_itself_was_sent() -> None:
    """GLoRA's readouts differ by client: a client that sends back its own has not moved, and nothing moves with it."""
    server = Server(build("glora"), rule=GeometricMedian())
    played = list(rounds(Server(build("glora")), MIXED, FOUR))[-1]
    back = [Upload(u.client, u.num_examples, server.download(played.before, u.client).adapter) for u in played.uploads]
    judged = server.aggregate(played.before, back).tally.judged  # type: ignore[union-attr]
    assert judged is not None and [one.norm for one in judged.clients.values()] == [0.0] * 4


def test_what_is_told_of_a_round() -> None:
    """Norms and distances against dense changes; weights before and after; who was left out, and why; a checkpoint."""
    server = Server(build("svd", energy=1.0), rule=Krum(liars=0), weighting="examples")
    played = list(rounds(Server(build("svd", energy=1.0)), MIXED, FOUR))[1]
    after = server.aggregate(played.before, played.uploads)
    assert after.tally is not None and after.tally.judged is not None
    judged, changes = after.tally.judged, {}
    for u in played.uploads:
        parts = [D - R for D, R in (products(server, played.before, u, m) for m in SHAPES)]
        heads = [h - played.before.heads[name] for name, h in u.adapter.heads.items()]
        changes[u.client.id] = torch.cat([x.flatten() for x in [*parts, *heads]])
    (chosen,) = set(EXAMPLES) - set(judged.left_out)
    for name, one in judged.clients.items():
        assert one.norm == pytest.approx(float(changes[name].norm()), rel=1e-9)
        assert one.distance == pytest.approx(float((changes[name] - changes[chosen]).norm()), rel=1e-7, abs=1e-6)
        assert one.before == EXAMPLES[name] / sum(EXAMPLES.values())
        assert one.after == (pytest.approx(1.0) if name == chosen else 0.0)
        assert ("its 4 nearest is" in one.why) == (name != chosen)
    assert told(judged.plain()) == f"krum leaves out {', '.join(sorted(judged.left_out))} (3 of 4)"


def test_the_tally_of_a_rule_is_stored_and_read_back(tmp_path: Path) -> None:
    """As a whole."""
    played = next(rounds(Server(build("svd")), EQUAL, FOUR))
    state = Server(build("svd"), rule=MultiKrum(liars=0)).aggregate(played.before, played.uploads)
    checkpoint.save(tmp_path, 1, state)
    loaded = checkpoint.load_newest(tmp_path, ServerState, build("svd").State)
    assert loaded is not None and loaded[1].tally == state.tally


def test_a_module_that_few_hold_is_not_moved_further_than_they_moved_it() -> None:
    """Krum's choice counts once, though the module's weights are shared between its two holders only."""
    server = Server(build("svd", energy=1.0), rule=Given((0.0, 0.0, 5.0, 0.0, 0.0)))
    start = {
        m: LoRA(torch.zeros(6, 2, dtype=torch.float64), torch.eye(2, 5, dtype=torch.float64)) for m in ("all", "few")
    }
    state = server.init(Adapter(start))
    uploads = []
    for k in range(5):
        held = ("all", "few") if k in (2, 3) else ("all",)
        B = torch.full((6, 2), 1.0 + k, dtype=torch.float64)
        lora = LoRA(B, torch.eye(2, 5, dtype=torch.float64))
        uploads.append(Upload(Client(f"c{k}", dict.fromkeys(held, 2)), 1, Adapter(dict.fromkeys(held, lora))))
    after = server.global_update(server.aggregate(state, uploads))
    want = uploads[2].adapter.modules["all"].delta()
    torch.testing.assert_close(after["all"].delta(), want)
    torch.testing.assert_close(after["few"].delta(), want)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hparams", "why"),
    [
        ("glora", {"rho": 0.5}, "buy directions"),
        ("glora", {"rho": 0.5, "preset": "paper"}, "buy directions"),
        ("glora", {"weighting": "rank-partition"}, "weighs clients again"),
        ("flexlora", {"preset": "raflora"}, "high rank"),
        ("hetlora", {}, "sends more counts more"),
    ],
)
def test_methods_whose_options_undo_a_rule_are_refused(name: str, hparams: dict[str, Any], why: str) -> None:
    with pytest.raises(HyperparameterError, match=why):
        Server(build(name, **hparams), rule=Clip(factor_averages=name == "hetlora"))


def test_an_average_of_factors_is_refused_under_a_rule_but_by_name() -> None:
    """All methods. `factor_averages` is needed if both factors travel without a product; otherwise it is refused."""
    for name in METHODS:
        refused = name in FACTORS
        with pytest.raises(HyperparameterError, match="averages the factors B and A" if refused else "has no effect"):
            Server(method(name), rule=Clip(factor_averages=not refused))
        Server(method(name), rule=Clip(factor_averages=refused))


@dataclass(frozen=True)
class Turning(RoLoRA):
    """Both factors travel from its second round on."""

    def roles(self, round: int) -> Roles:
        return Roles() if round else super().roles(round)


def test_a_round_whose_roles_make_it_an_average_of_factors_is_refused_when_it_begins() -> None:
    server = Server(Turning(), rule=Clip())
    state = server.init(seed_adapter(4))
    server.terms(state)
    with pytest.raises(HyperparameterError, match="factor_averages = true"):
        server.terms(replace(state, round=1))


def test_where_uploads_are_not_there_together_there_is_no_rule() -> None:
    with pytest.raises(HyperparameterError, match=r"clip compares the changes.*forgets them"):
        Server(build("svd"), rule=Clip(), memory=10.0)


def test_a_projector_basis_below_the_union_rank_is_refused_in_the_round() -> None:
    """rank = 17 holds the uploads of ranks 2, 3, 5 and 6, and not the 9 columns that clients were sent
    beside them; energy may cut."""
    played = list(rounds(Server(build("glora")), MIXED, FOUR))[-1]
    cutting = Server(build("glora", rank=17), rule=Clip(threshold=0.1))
    with pytest.raises(HyperparameterError, match="rank = 17 cuts the 25 directions"):
        cutting.aggregate(played.before, played.uploads)
    Server(build("glora", rank=17), rule=Clip(threshold=1e9)).aggregate(played.before, played.uploads)
    Server(build("glora", rank=3, basis="energy"), rule=Clip(threshold=0.1)).aggregate(played.before, played.uploads)


def test_a_tiny_change_in_new_directions_buys_none() -> None:
    """Subspace insertion: a liar's change of norm 1e-6 in new directions does not move the model."""
    server = Server(build("glora"), rule=Clip())
    played = list(rounds(Server(build("glora")), EQUAL, FOUR))[-1]
    sent = server.download(played.before, Client("liar", 4)).adapter
    tiny = Adapter({m: LoRA(lora.B + 1e-6, lora.A) for m, lora in sent.modules.items()}, sent.heads)  # type: ignore[operator]
    still = [Upload(Client("liar", 4), 20, sent), *played.uploads]
    moved = [Upload(Client("liar", 4), 20, tiny), *played.uploads]
    a, b = (server.global_update(server.aggregate(played.before, u)) for u in (still, moved))
    for module in SHAPES:
        assert float((a[module].delta() - b[module].delta()).norm()) < 1e-4
