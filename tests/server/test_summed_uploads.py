"""Uploads added up and forgotten (`Server(memory=...)`).

Kind of evidence: oracle (the same server with all uploads kept; dense float64 means of the stored factors), property
(order of arrival), and the uploads' own life time.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.core.method import Roles
from fedlora.core.summing import FromMeans, FromSums
from fedlora.errors import HyperparameterError, QuorumNotMet, RankTie, UploadRefused
from fedlora.server.product_sums import ProductSums
from support.federations import noise
from support.processes import Program

D_OUT, D_IN, RANK = 64, 48, 4
ONE = 4 * 2 * RANK * (D_OUT + D_IN)  # bytes of one upload's two modules
MODULES = ("a", "b")
SUMMING = {
    "glora": {"history_limit": 5}, "glora, cut": {"history_limit": 30, "rank": 10}, "svd": {}, "flexlora": {},
    "glora, a share": {"history_limit": 0, "rho": 0.3, "canonical": "B", "budget": "revealed"},
    "glora, energy": {"history_limit": 8, "rank": 10, "basis": "energy", "history_lag": 1},
    "glora, alike": {"history_limit": 8, "rank": 10, "gamma": 0.0},
}  # fmt: skip

AVERAGING = ("fedit", "fedsa-lora", "fedsvd", "ffa-lora", "padded-average", "rolora")


def lora(k: int, module: str, rank: int = RANK, dtype: torch.dtype = torch.float32) -> LoRA:
    """In a space of dimension 20 that all clients share, and a tail of 1e-2 outside of it."""
    space = torch.linalg.qr(noise((D_OUT, 20), module, "space"))[0]
    B = space @ noise((20, rank), module, k, "mix") + 1e-2 * noise((D_OUT, rank), module, k, "tail")
    return LoRA(B.to(dtype), noise((rank, D_IN), module, k, "A").to(dtype))


def uploads(count: int, *, dtype: torch.dtype = torch.float32, heads: bool = True) -> list[Upload]:
    """Of ranks 2 to 4."""
    return [
        Upload(
            Client(f"c{k:03}", 2 + k % 3),
            3 + k % 5,
            Adapter(
                {name: lora(k, name, 2 + k % 3, dtype) for name in MODULES},
                {"head": noise((3, 7), k, dtype=torch.float32)} if heads else {},
            ),
        )
        for k in range(count)
    ]


def pair(case: str = "glora", *, room: float = 3, **options: Any) -> tuple[Server, Server]:
    """(a server whose memory holds so many uploads, and as much again; the same one without a limit)."""
    server = Server(build(case.partition(",")[0], **SUMMING[case]), **options)
    return replace(server, memory=2 * room * ONE / 2**20), server


def start(s: Server) -> ServerState:
    seed = {name: LoRA(torch.zeros(D_OUT, RANK), torch.ones(RANK, D_IN)) for name in MODULES}
    return s.init(Adapter(seed, {"head": torch.zeros(3, 7)}))


def mean(us: list[Upload], module: str) -> Tensor:
    total = sum(u.num_examples for u in us)
    each = [u.num_examples / total * u.adapter.modules[module].map(Tensor.double).delta() for u in us]
    return torch.stack(each).sum(dim=0)


def apart(got: Tensor, want: Tensor) -> float:
    return float(torch.linalg.matrix_norm(got.double() - want.double()) / torch.linalg.matrix_norm(want.double()))


def update(s: Server, state: ServerState, module: str) -> Tensor:
    return s.global_update(state)[module].map(Tensor.double).delta()


def test_while_they_fit_the_bits_are_the_same() -> None:
    limited, free = pair(room=3)
    us = uploads(2)
    a, b = (s.aggregate(start(s), us) for s in (limited, free))
    for module in MODULES:
        assert torch.equal(update(limited, a, module), update(free, b, module))
        assert limited.diagnostics(a)[module] == free.diagnostics(b)[module]
    assert torch.equal(a.heads["head"], b.heads["head"])


@pytest.mark.parametrize("case", SUMMING)
def test_the_result_is_that_of_uploads_that_are_kept(case: str) -> None:
    """Update, what the method says of it, heads, weights, and what each client gets, twice in a row."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        limited, free = pair(case, weighting="uniform" if case == "glora, alike" else "examples")
        got, want = start(limited), start(free)
        for turn in range(2):
            us = uploads(20 + turn, dtype=dtype)
            got, want = limited.aggregate(got, us), free.aggregate(want, us[::-1])
            for module in MODULES:
                assert got.modules[module].round == want.modules[module].round == turn + 1
                assert apart(update(limited, got, module), update(free, want, module)) < 2e-7
                same(limited.diagnostics(got)[module], free.diagnostics(want)[module])
            assert got.tally is not None and want.tally is not None and got.tally.weights == want.tally.weights
            torch.testing.assert_close(got.heads["head"], want.heads["head"])
            for k in (0, 7, 19):
                client = Client(f"c{k:03}", 3)
                ours, theirs = (s.download(x, client).adapter.modules["a"] for s, x in ((limited, got), (free, want)))
                assert ours.rank == 3 and apart(ours.delta(), theirs.delta()) < 1e-5
                assert ours.factors[0].dtype == theirs.factors[0].dtype


@pytest.mark.quick(6)
@pytest.mark.parametrize("missing", ["renormalise", "zero"])
@pytest.mark.parametrize("method", AVERAGING)
def test_averages_of_factors_are_those_of_uploads_that_are_kept(method: str, missing: Any) -> None:
    """Three rounds (rolora's turns), ranks 2 to 4 where the method takes them, every third client without "b". What is
    held is a pair of each rank, however many clients."""
    limited = Server(build(method), missing=missing, memory=6 * ONE / 2**20)
    free = replace(limited, memory=None)
    got, want = start(limited), start(free)
    for turn in range(3):
        opened: Any = limited.open(got)
        roles = limited.roles(got)
        us = [sent(u, roles, one_rank=method in ("fedit", "fedsa-lora")) for u in uploads(40)]
        for u in us:
            opened.add(u)
        assert 0 < opened.summed <= 3 * 2 * ONE  # float64, of ranks 2, 3 and 4
        got, want = opened.close(), free.aggregate(want, us)
        assert got.tally == want.tally
        assert {state.round for x in (got, want) for state in x.modules.values()} == {turn + 1}
        client = Client("anybody", RANK)
        ours, theirs = limited.download(got, client), free.download(want, client)
        for module in MODULES:
            for a, b in zip(*(x.adapter.modules[module].tensors().values() for x in (ours, theirs)), strict=True):
                assert apart(a, b) < 1e-7 and a.dtype == b.dtype
        for name, head in want.heads.items():
            torch.testing.assert_close(got.heads[name], head)


@pytest.mark.parametrize("count", [3, 50, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_any_number_of_clients_gives_what_uploads_that_are_kept_give(count: int) -> None:
    """Every method that sums can serve, a memory of one upload: to rounding, 2e-6 of the update (kept, svd, flexlora
    and averages of factors add up in float32; glora does not, and is within 2e-7)."""
    for case in (*(SUMMING if count < 2000 else ("glora, cut", "svd")), *AVERAGING):
        name = case.partition(",")[0]
        free = Server(build(name, **SUMMING.get(case, {})))
        limited, begun = replace(free, memory=2.1 * ONE / 2**20), start(free)
        us = [sent(u, free.roles(begun), one_rank=name in ("fedit", "fedsa-lora")) for u in uploads(count)]
        got, want = (s.aggregate(begun, us) for s in (limited, free))
        for module in MODULES:
            client = Client("c001", RANK)
            ours, theirs = (free.download(x, client).adapter.modules[module] for x in (got, want))
            whole = ours.B is not None
            off = apart(ours.delta(), theirs.delta()) if whole else apart(ours.tensors()["A"], theirs.tensors()["A"])
            assert off < (2e-7 if name == "glora" else 2e-6), (case, module, off)


def sent(u: Upload, roles: Roles, *, one_rank: bool) -> Upload:
    """What of it travels in a round of these roles; every third client holds "a" alone."""
    number = int(u.client.id[1:])
    rank = RANK if one_rank else int(str(u.client.rank))
    held = MODULES if number % 3 else MODULES[:1]
    pairs = {name: lora(number, name, rank) for name in held}
    shared = {"B": roles.B == "shared", "A": roles.A == "shared"}
    travels = {n: LoRA(x.B if shared["B"] else None, x.A if shared["A"] else None) for n, x in pairs.items()}
    heads = u.adapter.heads if roles.heads == "shared" else {}
    return replace(u, client=Client(u.client.id, dict.fromkeys(held, rank)), adapter=Adapter(travels, heads))


def test_ranks_that_an_average_cannot_take_are_refused_as_where_uploads_are_kept() -> None:
    """Ranks 2, 3, 4, and the start has 4: each is refused for its own rank, before anything of it is added up."""
    s = Server(build("fedit"), memory=6 * ONE / 2**20, quorum=1)
    refused = s.aggregate(start(s), uploads(20)).tally.refused
    assert {c: why[why.index(" has ", why.index(c)) :][:6] for c, why in refused.items()} == {
        f"c{k:03}": f" has {2 + k % 3}" for k in range(20) if k % 3 < 2
    }


def same(got: Mapping[str, object], want: Mapping[str, object]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if name == "union_rank" and got[name] is None:
            continue  # None: nothing is cut, so nobody voted
        if isinstance(value, float) and name in ("dropped", "rounding", "error"):
            assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-6)
        elif isinstance(value, float):
            assert got[name] == pytest.approx(value, rel=1e-6)
        elif isinstance(value, list):
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6 * max(value))
        else:
            assert got[name] == value, name


def test_the_error_that_is_said_is_the_error_against_the_dense_mean() -> None:
    """Of a cut to 10 of more directions, and of none: at least the truth, and within a hundredth of it or of float32's
    rounding."""
    for case in ("glora, cut", "glora"):
        s, _ = pair(case)
        us = uploads(40)
        after = s.aggregate(start(s), us)
        for module in MODULES:
            true, said = apart(update(s, after, module), mean(us, module)), s.diagnostics(after)[module]["error"]
            assert isinstance(said, float) and true <= said <= 1.01 * true + 2e-7


def test_any_order_of_arrival_gives_the_same_to_rounding() -> None:
    us, (s, _) = uploads(25), pair("glora, cut")
    one, other = (s.aggregate(start(s), some) for some in (us, us[::-1]))
    for module in MODULES:
        assert apart(update(s, one, module), update(s, other, module)) < 1e-12 or torch.equal(
            update(s, one, module).float(), update(s, other, module).float()
        )


def test_uploads_are_forgotten_before_the_round_is_over_and_nothing_is_left_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are larger than the memory here, so they lie in files; no name of theirs is ever seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    s, _ = pair("glora, cut")
    opened: Any = s.open(start(s))
    alive = []
    for k in range(20):
        (upload,) = uploads(k + 1, heads=True)[k:]
        opened.add(upload)
        alive.append(weakref.ref(upload))
        assert opened.nbytes <= 3 * ONE
        del upload
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 6
    sums = len(MODULES) * 8 * D_OUT * (2 * D_OUT + D_IN)
    assert opened.summed == sums > 3 * ONE
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 3 * len(MODULES) and all(line.endswith("(deleted)") for line in mapped)
    assert not list(tmp_path.iterdir())
    opened.close()
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_kill_in_the_middle_of_a_round_leaves_nothing_and_the_round_is_played_again(
    tmp_path: Path, program: Callable[..., Program]
) -> None:
    """SIGKILL while a file of sums is being made, which is when it could have a name; the state before is a value, so
    the next process makes of it what an unharmed one does."""
    (tmp_path / "there").mkdir()
    (tmp_path / "child.py").write_text(
        "import os, signal, sys, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from server.test_summed_uploads import pair, start, uploads\n"
        "s, _ = pair('glora, cut')\n"
        "opened, made = s.open(start(s)), os.posix_fallocate\n"
        "def dies(*given, left=[4]):\n"
        "    made(*given)\n"
        "    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.posix_fallocate = dies\n"
        "for upload in uploads(20):\n"
        "    opened.add(upload)\n"
    )
    killed = program(tmp_path / "child.py", tmp_path / "there").ended()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not list((tmp_path / "there").iterdir())
    limited, free = pair("glora, cut")
    after, want = (s.aggregate(start(s), uploads(20)) for s in (limited, free))
    assert apart(update(limited, after, "a"), update(free, want, "a")) < 1e-6


def test_a_disk_that_has_no_room_is_told_before_anything_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda path: full)
    s, _ = pair("glora, cut")
    with pytest.raises(HyperparameterError, match="TMPDIR"):
        s.open(start(s))
    roomy, _ = pair("glora, cut", room=100)  # the sums fit in memory
    roomy.open(start(roomy))


def test_a_disk_that_fills_meanwhile_loses_the_round_and_not_the_process() -> None:
    """Room is taken before anything is written: a hole in a mapped file would end the process by SIGBUS. The system's
    own limit stands for the disk: the mean's file fits (24,576 bytes), the votes' (32,768) does not."""
    s, _ = pair("glora, cut")
    before, us = start(s), uploads(20)
    opened, (soft, hard) = s.open(before), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(HyperparameterError, match=r"File too large.*TMPDIR"):
            for u in us:
                opened.add(u)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert s.aggregate(before, us).round == 1  # there is room again


def test_a_round_that_was_interrupted_or_closed_takes_and_closes_nothing_more() -> None:
    """A caller who continued after an exception (Ctrl-C in a notebook, a time limit, a full disk) got a mean without
    the uploads that were being added up, although their clients counted. Each step is interrupted once."""
    for step in range(3):
        s, _ = pair("glora, cut")
        opened, us = s.open(start(s)), uploads(20)
        real, left = ProductSums.add, [step]

        def interrupted(self: ProductSums, *given: Any, real: Any = real, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            real(self, *given)

        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ProductSums, "add", interrupted)
            for u in us:
                opened.add(u)
        for call in (lambda o=opened, u=us[-1]: o.add(u), opened.close):
            with pytest.raises(HyperparameterError, match=r"server\.open"):
                call()
    s, _ = pair("glora, cut")
    opened = s.open(start(s))
    for u in uploads(20):
        opened.add(u)
    assert opened.close().round == 1
    with pytest.raises(HyperparameterError, match=r"server\.open"):
        opened.close()


def test_several_threads_may_add() -> None:
    s, _ = pair("glora, cut")
    us = uploads(60)
    opened, want = s.open(start(s)), s.aggregate(start(s), us)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(opened.add, us))
    assert apart(update(s, opened.close(), "a"), update(s, want, "a")) < 1e-6


def test_an_upload_that_is_written_to_before_it_is_added_up_is_named() -> None:
    """One buffer for all clients, in which the next one trains: each upload that is held would be the last one's."""
    s, _ = pair()
    us, opened = uploads(20), s.open(start(s))
    with pytest.raises(HyperparameterError, match=r"'c000' was changed .*Tensor\.clone"):
        for u in us:
            opened.add(u)
            next(iter(us[0].adapter.modules["a"].tensors().values())).add_(1.0)


def test_uploads_that_were_added_up_still_count_once_and_towards_the_quorum() -> None:
    s, _ = pair(quorum=12)
    opened = s.open(start(s))
    us = uploads(11)
    for upload in us:
        opened.add(upload)
    with pytest.raises(UploadRefused, match="second upload"):
        opened.add(us[0])
    with pytest.raises(QuorumNotMet, match="11 usable uploads"):
        opened.close()


@pytest.mark.parametrize("missing", ["renormalise", "zero"])
@pytest.mark.parametrize("case", ["glora, cut", "glora, alike"])
def test_a_module_that_some_lack(case: str, missing: str) -> None:
    """Weights over its holders, or over everybody: as where uploads are kept."""
    limited, free = pair(case, missing=missing)
    lacking = [
        replace(u, client=Client(u.client.id, {"a": u.client.rank}), adapter=replace(u.adapter, modules={
            "a": u.adapter.modules["a"]})) if k % 3 == 0 else u
        for k, u in enumerate(uploads(20))
    ]  # fmt: skip
    got, want = (s.aggregate(start(s), lacking) for s in (limited, free))
    for module in MODULES:
        assert apart(update(limited, got, module), update(free, want, module)) < 1e-6


def test_tied_votes_at_the_cut_are_told_as_where_uploads_are_kept() -> None:
    """Two clients of equal weight with orthogonal columns, R = 5 of 8: equal eigenvalues are cut."""
    eye = torch.eye(D_OUT)
    us = [
        Upload(Client(name, 4), 1, Adapter({m: LoRA(eye[:, k : k + 4].clone(), noise((4, D_IN), m, k).float())
                                           for m in MODULES}, {"head": torch.zeros(3, 7)}))
        for k, name in ((0, "x"), (4, "y"))
    ]  # fmt: skip
    found = torch.zeros(())
    for tie, memory in (("energy", True), ("error", True), ("energy", False)):
        method = build("glora", rank=5, tie=tie, history_limit=0)
        s = Server(method, memory=2.1 * ONE / 2**20 if memory else None)
        opened: Any = s.open(start(s))
        for u in us:
            opened.add(u)
        if tie == "error":
            with pytest.raises(RankTie):
                opened.close()
        else:
            after = opened.close()
            assert s.diagnostics(after)["a"]["tied"] is True
            found = update(s, after, "a") if memory else found
            assert apart(update(s, after, "a"), found) < 1e-6


def test_impossible_limits_say_what_would_do() -> None:
    for apart in ("fedex-lora", "fedrot-lora", "flora", "hetlora", "lora-fair"):
        with pytest.raises(HyperparameterError, match=f"memory = 10 MB.*{apart}.*4 r .*fedit, .*rolora"):
            Server(build(apart), memory=10)
    with pytest.raises(HyperparameterError, match="coordinates = 'factors'"):
        Server(build("padded-average", coordinates="subspace"), memory=10)
    with pytest.raises(HyperparameterError, match="positive number of megabytes"):
        Server(build("svd"), memory=0)
    tight, _ = pair(room=0.5)
    with pytest.raises(HyperparameterError, match=r"a client of rank 4.* Give at least 0.0\d+ MB"):
        tight.open(start(tight))
    for wrong in ({"weighting": "rank-partition", "history_limit": 0}, {}):
        with pytest.raises(HyperparameterError, match="history_limit" if not wrong else "all uploads at once"):
            Server(build("glora", **wrong), memory=10)


def test_which_methods_can_forget_uploads() -> None:
    """As docs/explanation/scale.md and the refusal say."""
    assert [name for name in sorted(METHODS) if isinstance(build(name), FromSums)] == ["flexlora", "glora", "svd"]
    assert {name for name in METHODS if isinstance(build(name), FromMeans)} == set(AVERAGING)


def test_many_additions_make_no_directions() -> None:
    """400 clients in 6 dimensions, added up 130 times: the rank that was there, and the dense mean."""
    space = torch.linalg.qr(noise((D_OUT, 6), "narrow"))[0].float()
    us = [
        Upload(Client(f"c{k:03}", RANK), 1 + k % 3, Adapter({m: LoRA(space @ noise((6, RANK), m, k).float(), lora(
            k, m).factors[1]) for m in MODULES}, {"head": torch.zeros(3, 7)}))
        for k in range(400)
    ]  # fmt: skip
    for case in ("glora, cut", "glora"):
        s, _ = pair(case)
        after = s.aggregate(start(s), us)
        for module in MODULES:
            assert s.diagnostics(after)[module]["rank"] == 6
            assert apart(update(s, after, module), mean(us, module)) < 3e-7


@pytest.mark.parametrize("n", [1e300, 1e-100, 10**300])
def test_counts_that_sums_cannot_carry_are_refused(n: float) -> None:
    s, _ = pair()
    with pytest.raises(UploadRefused, match=r"num_examples = .*1e-12 to 1e12"):
        s.open(start(s)).add(replace(uploads(1)[0], num_examples=n))
