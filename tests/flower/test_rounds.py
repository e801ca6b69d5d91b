"""Rounds as FedLoRA plays and tells them: fates, limits, the policy read anew, what is written down, order of arrival.

Kinds of evidence: *contract* (what files and lines say), *attack* (claims, norms), *parity* (bit for bit whatever the
order in which replies come).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Error, Message

from fedlora import Adapter, Kept, LoRA, Server, Streamed, build
from fedlora.core import checkpoint
from fedlora.core.messages import Client, Upload
from fedlora.core.trainer import Trained
from fedlora.errors import CheckpointError, ConfigError, QuorumNotMet
from fedlora.flower import rounds as rounds_package
from fedlora.flower.messages.envelope import Receipt, receipt_of
from fedlora.flower.messages.records import record_parcel, to_array
from fedlora.flower.rounds.attempt import EFFECTS, update_norm
from fedlora.flower.rounds.choosing import Choosing
from fedlora.flower.rounds.events import AttemptFailed, Began, Done, Ended, Fate, Fated, PolicyChanged, read_events
from fedlora.flower.rounds.hooks import RoundHooks
from fedlora.flower.rounds.log_lines import lines_of as words_of
from fedlora.flower.rounds.membership import asked_of, draw, least_usable
from fedlora.flower.rounds.playing import played_by_one
from fedlora.flower.rounds.progress import progress_of
from fedlora.flower.rounds.questions import MessageMaker, NotServed, reply_limit
from fedlora.flower.rounds.round_lines import RoundLines, is_finished
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.site.node import Node
from fedlora.flower.terms.policy import Policy
from fedlora.server.rules import Krum
from fedlora.server.sampling import sample_clients
from fedlora.server.server import start
from support.federations import noise
from support.flower_grid import RANKS, FastClock, LocalGrid, Toy, bits, changed, fate_of, federation, nan, seed_adapter
from support.processes import Program


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# ---- everyone has a fate ---------------------------------------------------------------------------------------------


def test_everyone_of_the_policy_has_a_fate_in_every_round(tmp_path: Path) -> None:
    """Six fates; the same in the events, in the line, and in the log. One of the two that are not drawn takes the
    place of the one that is offline."""
    names = ["good", "bad", "ill", "slow", "away", "rest", "spare"]
    ranks = dict.fromkeys(names, 4)
    strategy, grid = federation(
        tmp_path,
        Server(build("glora"), round=Kept(quorum=1)),
        ranks,
        policy=Policy(ranks, retries=0, deadline=50.0),
        record=tmp_path / "out",
        participation=5 / 7,
        seed=(seed := next(s for s in range(999) if {*sample_clients(names, 5 / 7, seed=s, round=0)} == {*names[:5]})),
    )
    grid.offline = {"away"}
    grid.meddle = {
        "bad": nan,
        "ill": lambda asked, reply: Message(Error(2, "out of memory"), reply_to=asked),
        "slow": lambda asked, reply: None,
    }
    strategy.start(grid, num_rounds=1)
    want = {
        "good": "trained",
        "bad": "refused",
        "ill": "failed",
        "slow": "late",
        "away": "offline",
        **dict.fromkeys(("rest", "spare"), "not drawn"),
        **dict.fromkeys(others := sample_clients(["rest", "spare"], 0.5, seed=seed, round=0), "trained"),
    }
    [line] = lines_of(tmp_path / "out")
    assert {name: said["fate"] for name, said in line["fates"].items()} == want
    assert line["fates"]["slow"]["why"] == "no answer within 50 s"
    assert set(line["missing"]) == set(want) - {"good", "rest", "spare"}
    events = read_events(tmp_path / "out" / "events.jsonl")
    began = next(e for e in events if isinstance(e, Began))
    assert set(began.asked) == {"good", "bad", "ill", "slow", *others}
    assert {n: f["fate"] for n, f in began.not_asked.items()} == {n: want[n] for n in set(want) - {*began.asked}}
    fated = {e.client: e for e in events if isinstance(e, Fated)}
    assert {n: e.fate for n, e in fated.items()} == {n: want[n] for n in began.asked}
    good = fated["good"]
    assert good.loss == pytest.approx(0.5) and good.examples == 14 and good.bytes and good.norm and good.norm > 0
    assert isinstance(events[-1], Ended) and events[-1].why == "complete"
    [done] = [e for e in events if isinstance(e, Done)]
    assert {**done.line, "at": 0} == {**line, "at": 0}


def test_a_site_whose_work_did_not_count_is_told_with_its_next_message(tmp_path: Path) -> None:
    """Only the site learns, once, why its work did not count. Before, it learned nothing, and its log said that it had
    trained."""
    ranks = dict.fromkeys(["good", "bad", "ill", "slow"], 4)
    policy = Policy(ranks, retries=0, deadline=50.0)
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(quorum=1)), ranks, policy=policy)

    def told(upto: int) -> dict[str, str]:
        grid.sent.clear()
        strategy.start(grid, num_rounds=upto)
        return {grid.nodes[m.metadata.dst_node_id][0]: why for m in grid.sent if (why := receipt_of(m.content).why)}

    grid.meddle = {
        "bad": nan,
        "ill": lambda asked, reply: Message(Error(2, "out of memory"), reply_to=asked),
        "slow": lambda asked, reply: None,
    }
    assert told(1) == {}
    grid.meddle = {}
    strategy, _ = federation(tmp_path, Server(build("glora"), round=Kept(quorum=1)), ranks, policy=policy, resume=True)
    begins = " did not count: "
    words = told(2)
    assert {name: said.partition(begins)[2].partition(":")[0] for name, said in words.items()} == {
        "bad": "refused", "ill": "failed", "slow": "late",
    }  # fmt: skip
    assert "no answer within 50 s" in words["slow"] and "out of memory" in words["ill"]
    assert told(3) == {}


def test_what_each_fate_does_to_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All train in round 1. Round 2 has every fate of a site that was asked, first in an attempt that does not count.
    Reference: the table in words, of `attempt.Effect`. A Toy has 10 examples and one for each letter of its name."""
    ranks = dict.fromkeys(["good", "none", "bad", "ill", "slow", "left", "lost", "bare"], 4)
    policy = Policy(ranks, retries=0, deadline=50.0)
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(quorum=2)), ranks, policy=policy)
    strategy.start(grid, num_rounds=1)
    before = strategy.flower_state
    grid.meddle = {
        "good": changed(num_examples=33.0),
        "none": abstaining,
        "bad": nan,
        "ill": lambda asked, reply: Message(Error(2, "out of memory"), reply_to=asked),
        "slow": lambda asked, reply: None,
        "left": lambda asked, reply: Message(Error(5, "node unavailable"), reply_to=asked),
    }
    push, download = grid.push_messages, MessageMaker.download

    def lossy(messages: Iterable[Message]) -> Iterable[str]:
        if grid.nodes[(found := list(messages))[0].metadata.dst_node_id][0] == "lost":
            raise ConnectionError("413 Request Entity Too Large")
        return push(found)

    def unserved(maker: MessageMaker, name: str) -> Any:
        if name == "bare":
            raise NotServed("no readout")
        return download(maker, name)

    monkeypatch.setattr(grid, "push_messages", lossy)
    monkeypatch.setattr(MessageMaker, "download", unserved)
    with pytest.raises(QuorumNotMet):
        strategy.start(grid, num_rounds=2)
    after = strategy.flower_state
    assert bits(after.state) == bits(before.state) and after.examples == before.examples
    assert {(r.counted, r.answered) for r in after.receipts.values()} == {(1, 1)}
    strategy.server = replace(strategy.server, round=Kept(quorum=1))
    done = strategy.start(grid, num_rounds=2)
    after, line = strategy.flower_state, strategy.lines.all()[-1]
    assert done.train_metrics_clientapp[2]["clients"] == 1 and set(line["missing"]) == set(ranks) - {"good", "none"}
    assert set(line["norms"]) == set(line["losses"]) == {"good"}
    assert {name: fate_of(strategy, name) for name in ranks} == {
        "good": "trained", "none": "abstained", "bad": "refused", "ill": "failed", "slow": "late", "left": "offline",
        "lost": "not sent", "bare": "not sent",
    }  # fmt: skip
    assert {name: (r.counted, r.answered) for name, r in after.receipts.items()} == {
        "good": (2, 2), "none": (2, 2), "bad": (1, 1), "ill": (1, 1), "slow": (1, 1), "left": (1, 1),
        "lost": (1, 1), "bare": (1, 1),
    }  # fmt: skip
    assert {name for name, client in after.state.clients.items() if client.held is not None} == {
        "good", "none", "lost", "bare"
    }  # fmt: skip
    assert after.examples == {name: 33.0 if name == "good" else 10.0 + len(name) for name in ranks}


def abstaining(asked: Message, reply: Message) -> Message:
    """0 examples, and factors of NaN, which nobody checks then."""
    found: Message = nan(asked, changed(num_examples=0.0)(asked, reply))
    return found


@pytest.mark.parametrize("others", ["abstain", "stand still"])
def test_a_line_is_told_from_memory_as_from_its_file(tmp_path: Path, caplog: Any, others: str) -> None:
    """One of two has a norm, and the other none or 0."""

    class Still(Toy):
        def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
            done = super().train(download, adapter, position)
            return replace(done, adapter=adapter) if download.client.id == "one" and others != "abstain" else done

    ranks = {"one": 2, "two": 2}
    strategy, grid = federation(tmp_path, Server(build("glora")), ranks, trainer=Still(), record=tmp_path / "o")
    grid.meddle = {"one": abstaining} if others == "abstain" else {}
    with caplog.at_level(logging.INFO, "fedlora"):
        strategy.start(grid, num_rounds=1)
    told = [line for event in read_events(tmp_path / "o" / "events.jsonl") for line in words_of(event, 1)]
    assert told and set(told) <= set(caplog.messages)


def test_without_a_quorum_one_good_upload_is_enough(tmp_path: Path) -> None:
    """Unlike `fedlora run`, which the first bad upload stops: no site may end the rounds of the others."""
    policy = Policy(RANKS, retries=0)
    strategy, grid = federation(tmp_path, Server(build("glora")), policy=policy)
    grid.meddle = {"one": nan, "two": nan}
    strategy.start(grid, num_rounds=1)
    assert strategy.round == 1 and fate_of(strategy, "two") == "refused"
    grid.meddle = dict.fromkeys(RANKS, nan)
    with pytest.raises(QuorumNotMet, match="0 usable uploads, the quorum is 1"):
        strategy.start(grid, num_rounds=2)


def test_all_are_told_where_an_attempt_did_not_count(tmp_path: Path) -> None:
    """And none of them what became of another one."""
    ranks = dict.fromkeys(["one", "two", "evil"], 4)
    strategy, grid = federation(
        tmp_path / "a",
        Server(build("glora"), round=Kept(quorum=3)),
        ranks,
        policy=Policy(ranks, retries=1, deadline=9.0),
    )
    grid.meddle = {"evil": nan}
    with pytest.raises(QuorumNotMet):
        strategy.start(grid, num_rounds=1)
    told = [receipt_of(m.content).why for m in grid.sent]
    assert told[:3] == [""] * 3 and all("too few uploads" in said for said in told[3:5])
    assert "refused" in told[5] and not any("evil" in said or "refused" in said for said in told[:5])


def test_others_take_the_places_of_those_who_are_offline_or_give_nothing(tmp_path: Path) -> None:
    """Two of four are drawn: one is away and one is refused, for ever. Before, the same two were drawn in each attempt
    of each start, and two others were online and never asked."""
    ranks = dict.fromkeys(["one", "two", "three", "four"], 4)
    away, bad = sample_clients([*ranks], 0.5, seed=0, round=0)
    strategy, grid = federation(
        tmp_path, Server(build("glora"), round=Kept(quorum=2)), ranks, policy=Policy(ranks, retries=1, deadline=9.0),
        participation=0.5,
    )  # fmt: skip
    grid.offline, grid.meddle = {away}, {bad: nan}
    strategy.start(grid, num_rounds=1)
    fates = {name: fate_of(strategy, name) for name in ranks}
    assert fates == {**dict.fromkeys(ranks, "trained"), away: "offline", bad: "refused"}


def test_an_attempt_that_did_not_count_says_each_reason_once_in_words(tmp_path: Path) -> None:
    """One is refused, which the quorum's error says, and one is away, which it does not."""
    ranks = dict.fromkeys(["one", "bad", "away"], 4)
    strategy, grid = federation(
        tmp_path, Server(build("glora"), round=Kept(quorum=3)), ranks, policy=Policy(ranks, retries=0, deadline=9.0)
    )
    grid.offline, grid.meddle = {"away"}, {"bad": nan}
    with pytest.raises(QuorumNotMet) as failed:
        strategy.start(grid, num_rounds=1)
    assert str(failed.value).count("bad: ") == 1
    assert str(failed.value).endswith("The state is unchanged. Not there: away: it is not online.")


def test_a_site_s_own_lines_say_what_the_server_told_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from flwr.app import ConfigRecord, RecordDict

    from fedlora.flower.apps import _say_receipt

    why = "round 1: ... did not count: late"
    _say_receipt(RecordDict({"config": ConfigRecord({"receipt": Receipt(why=why).text()})}))
    _say_receipt(RecordDict({"config": ConfigRecord({"protocol": "fedlora/1"})}))
    assert capfd.readouterr().err.splitlines() == ["the server says: round 1: ... did not count: late"]


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (-1e300, "loss is -1e+300"),
        (-1e-9, "loss is -1e-09"),
        (1e300, "loss is 1e+300, above 1,000,000"),
        (float("inf"), "loss is inf"),
        (float("nan"), "loss is nan"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_by_name(tmp_path: Path, loss: float, why: str) -> None:
    """Before, -1e300 was the mean of everybody's, in 304 digits."""
    ranks = {"one": 4, "two": 4, "cork": 4}
    strategy, grid = federation(tmp_path, Server(build("glora")), ranks, record=tmp_path / "out")
    grid.meddle = {"cork": changed(loss=loss)}
    strategy.start(grid, num_rounds=1)
    [line] = lines_of(tmp_path / "out")
    assert line["fates"]["cork"]["fate"] == "refused" and why in line["fates"]["cork"]["why"]
    assert set(line["losses"]) == {"one", "two"} == set(strategy.flower_state.examples)


def test_a_round_is_tried_again_and_every_attempt_is_written_down(tmp_path: Path) -> None:
    strategy, grid = federation(
        tmp_path,
        Server(build("glora"), round=Kept(quorum=3)),
        policy=Policy(RANKS, retries=1, deadline=9.0),
        record=tmp_path / "o",
    )
    grid.offline = {"two"}
    with pytest.raises(QuorumNotMet, match=r"two.*not online"):
        strategy.start(grid, num_rounds=1)
    events = read_events(tmp_path / "o" / "events.jsonl")
    assert [(e.attempt, e.NAME) for e in events if isinstance(e, Began | AttemptFailed)] == [
        (1, "began"), (1, "again"), (2, "began"), (2, "again"),
    ]  # fmt: skip
    assert isinstance(events[-1], Ended) and (events[-1].round, events[-1].why) == (0, "quorum")
    assert not (tmp_path / "o" / "rounds.jsonl").exists() or not lines_of(tmp_path / "o")


def test_a_client_that_the_method_cannot_serve_costs_itself_the_round(tmp_path: Path) -> None:
    """FedIT needs one rank. A policy with another one is refused; if a site has one all the same, the run goes on
    without it, and says why."""
    ranks = {"one": 4, "two": 4, "three": 2}
    with pytest.raises(ConfigError, match=r"fedit cannot serve.*\(one 4, two 4, three 2\)"):
        federation(tmp_path, Server(build("fedit"), round=Kept(quorum=1)), ranks)
    one_rank = dict.fromkeys(ranks, 4)
    strategy, grid = federation(tmp_path, Server(build("fedit"), round=Kept(quorum=1)), one_rank, record=tmp_path / "o")
    strategy.policy = Policy(ranks)
    try:
        strategy.start(grid, num_rounds=1)
    except QuorumNotMet as error:
        pytest.fail(str(error))
    [line] = lines_of(tmp_path / "o")
    assert {n: f["fate"] for n, f in line["fates"].items()}["one"] == "trained"
    assert line["fates"]["three"]["fate"] == "not sent" and "fedit" in line["fates"]["three"]["why"]


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_weights_are_the_shares_of_examples(tmp_path: Path) -> None:
    strategy, grid = federation(tmp_path, Server(build("glora")), record=tmp_path / "o")
    strategy.start(grid, num_rounds=1)
    [line] = lines_of(tmp_path / "o")
    assert line["weights"] == pytest.approx({"one": 13 / 41, "two": 13 / 41, "three": 15 / 41})


def test_the_norm_is_that_of_the_dense_difference_in_any_gauge() -> None:
    """Reference: ||B A - B_0 A_0||_F computed densely, summed over modules in squares."""
    server = Server(build("glora"))
    download = server.download(start(server, seed_adapter()).server, Client("one", 3))
    modules = {
        m: LoRA(noise((lora.factors[0].shape[0], 3), m, "B"), noise((3, lora.factors[1].shape[1]), m, "A"))
        for m, lora in download.adapter.modules.items()
    }
    want = sum(
        float(((lora.delta() - download.adapter.modules[m].delta().double()) ** 2).sum()) for m, lora in modules.items()
    )
    upload = Upload(Client("one", 3), 1, Adapter(modules))
    assert update_norm(upload, download) == pytest.approx(want**0.5, rel=1e-6)
    Q = noise((3, 3), "Q") + 3 * torch.eye(3)
    turned = {m: LoRA(lora.factors[0] @ Q, torch.linalg.inv(Q) @ lora.factors[1]) for m, lora in modules.items()}
    again = update_norm(Upload(Client("one", 3), 1, Adapter(turned)), download)
    assert again == pytest.approx(want**0.5, rel=1e-6)


def test_a_factor_that_did_not_travel_is_the_downloads_or_left_out() -> None:
    for method, factor in (("ffa-lora", "B"), ("fedsa-lora", "A")):
        server = Server(build(method))
        download = server.download(start(server, seed_adapter()).server, Client("one", 4))
        modules = {
            m: LoRA(**{"B": None, "A": None, factor: 1.0 + (lora.tensors().get(factor))})
            for m, lora in download.adapter.modules.items()
        }
        norm = update_norm(Upload(Client("one", 4), 1, Adapter(modules)), download)
        if method == "ffa-lora":  # A is frozen, and the server has it
            want = sum(
                float(((modules[m].B @ lora.A - lora.delta()) ** 2).sum())
                for m, lora in download.adapter.modules.items()
            )
        else:  # B never leaves: the change of A alone, of 1 in each place
            want = sum(lora.A.numel() for lora in modules.values() if lora.A is not None)
        assert norm == pytest.approx(want**0.5, rel=1e-5)


def test_what_a_reply_may_take_follows_from_ranks_and_heads() -> None:
    """By hand: rank 2 on (12, 9) and (7, 10) is 2 (12 + 9 + 7 + 10) = 76 numbers, the head 15, of 4 bytes each."""
    state = start(Server(build("glora")), seed_adapter()).server
    limit = reply_limit(Client("one", 2), state, Policy({"one": 2}))
    assert limit.bytes == 2 * 4 * (76 + 15) + 2**20
    assert reply_limit(Client("one", 2), state, Policy({"one": 2}, max_upload_mb=0.5)).bytes == 2**19


def test_a_reply_over_the_policys_limit_is_refused_and_costs_nobody_else(tmp_path: Path) -> None:
    strategy, grid = federation(
        tmp_path,
        Server(build("glora"), round=Kept(quorum=1)),
        record=tmp_path / "o",
        policy=Policy(RANKS, retries=0, max_upload_mb=1),
    )

    def large(asked: Message, reply: Message) -> Message:
        found = dict(reply.content["arrays"])
        found["B/a.q"] = to_array(torch.zeros(2**19))
        reply.content["arrays"] = ArrayRecord(found)
        return reply

    grid.meddle = {"three": large}
    strategy.start(grid, num_rounds=1)
    [line] = lines_of(tmp_path / "o")
    assert "1,048,576 are allowed" in line["missing"]["three"] and set(line["weights"]) == {"one", "two"}


# ---- the policy is read anew -----------------------------------------------------------------------------------------


def write_policy(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_who_is_added_removed_or_of_another_rank_takes_effect_at_the_next_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also at a rank above the start's (4)."""
    from support.flower_grid import Toy

    path = write_policy(tmp_path / "policy.toml", "retries = 0\n[clients]\none = 2\ntwo = 4\nthree = 3\n")

    def after(line: Any) -> None:
        if line["round"] == 1:
            write_policy(path, "deadline = 77.0\n[clients]\none = 3\ntwo = 4\nfour = 6\n")
        if line["round"] == 2:
            write_policy(path, "[clients\nbroken")
        if line["round"] == 4:
            write_policy(path, "[clients]\none = 3\n'half.rank' = {nowhere = 3}\n")

    nodes = {name: Node(name, Toy(), tmp_path / "nodes" / name) for name in ("one", "two", "three", "four")}
    with caplog.at_level(logging.INFO, "fedlora"):
        strategy, grid = federation(
            tmp_path, Server(build("glora")), nodes=nodes, record=tmp_path / "o", policy_file=path, after_round=after
        )
        strategy.start(grid, num_rounds=5)
    lines = lines_of(tmp_path / "o")
    assert set(lines[0]["fates"]) == {"one", "two", "three"}
    assert set(lines[1]["fates"]) == set(lines[2]["fates"]) == {"one", "two", "four"}  # a broken file changes nothing
    assert all(f["fate"] == "trained" for line in lines for f in line["fates"].values())
    events = read_events(tmp_path / "o" / "events.jsonl")
    changes = [e for e in events if isinstance(e, PolicyChanged)]
    assert (changes[0].round, dict(changes[0].added), changes[0].removed, dict(changes[0].changed)) == (
        2, {"four": 6}, ("three",), {"one": (2, 3)},
    )  # fmt: skip
    assert [e.deadline for e in events if isinstance(e, Began)][1] == 77.0
    assert [c.round for c in changes] == [2, 3, 5]  # the same broken file is told once
    assert "is not TOML" in changes[1].why and "until this run ends" in caplog.text and "nowhere" in changes[2].why
    assert re.search("(?s)four .*rank 6.*three .*no longer.*one .*rank 3 .*2", caplog.text)


def test_a_policy_with_fewer_clients_than_the_quorum_is_not_taken(tmp_path: Path) -> None:
    path = write_policy(tmp_path / "policy.toml", "[clients]\none = 2\n")
    strategy, grid = federation(
        tmp_path, Server(build("glora"), round=Kept(quorum=2)), record=tmp_path / "o", policy_file=path
    )
    strategy.start(grid, num_rounds=1)
    [line] = lines_of(tmp_path / "o")
    assert set(line["fates"]) == set(RANKS)
    with pytest.raises(ConfigError, match=r"quorum = 2 .*one site"):
        federation(tmp_path / "b", Server(build("glora"), round=Kept(quorum=2)), {"one": 2})


def cancelled(asked: Message, reply: Message) -> Message:
    """Factors whose terms cancel: finite, and of the right shapes, so that only the numbers can be refused."""
    found = dict(reply.content["arrays"])
    for factor, signs in (("B/a.q", (1e15, -1e15)), ("A/a.q", (1.0, 1.0))):
        rows, columns = found[factor].shape
        sized = torch.zeros(rows, columns)
        (sized.mT if factor.startswith("B") else sized)[:2] = torch.tensor(signs)[:, None]
        found[factor] = to_array(sized)
    reply.content["arrays"] = ArrayRecord(found)
    return reply


def test_terms_that_cancel_are_refused_as_they_come_and_blamed(tmp_path: Path) -> None:
    strategy, grid = federation(
        tmp_path, Server(build("glora"), round=Kept(quorum=3)), policy=Policy(RANKS, retries=0), record=tmp_path / "o"
    )
    grid.meddle = {"two": cancelled}
    with pytest.raises(QuorumNotMet, match="2 usable uploads, the quorum is 3"):
        strategy.start(grid, num_rounds=1)
    fates = [event for event in read_events(tmp_path / "o" / "events.jsonl") if isinstance(event, Fated)]
    assert [event.fate for event in fates if event.client == "two"] == ["refused"]
    assert "cannot be measured" in strategy.flower_state.receipts["two"].why


@pytest.mark.parametrize(
    ("quorum", "rule", "participation", "want"),
    [
        (None, None, 1.0, 1),
        (3, None, 1.0, 3),
        (3, Krum(f=1), 1.0, 5),  # 2 f + 3
        (6, Krum(f=1), 1.0, 6),
        (3, Krum(f=1), 4 / 6, 0),  # four are drawn, too few for a liar among them
    ],
)
def test_what_a_round_needs(quorum: Any, rule: Any, participation: float, want: int) -> None:
    """By hand, of six clients, and of Krum's bound."""
    assert least_usable(Policy(dict.fromkeys("abcdef", 4)), quorum, rule, participation) == want


def test_who_was_tried_least_is_asked_first() -> None:
    """By hand: b, c, d are drawn of four, b was late in an earlier attempt, and c is offline. a stands in for c, and b
    is asked again, because there is nobody else; so is a after an attempt of its own."""
    ranks = dict.fromkeys("abcd", 4)
    seed = next(k for k in range(99) if sample_clients([*ranks], 0.75, seed=k, round=0) == ["b", "c", "d"])

    def found_of(online: str, tried: dict[str, int]) -> Any:
        policy = Policy(ranks)
        return asked_of(policy, online, draw(policy, online, 3, seed=seed, finished=0, tried=tried))

    for tried in ({"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}):
        found = found_of("abd", tried)
        assert found.asked == ("a", "b", "d") and found.not_asked["c"][0] == "offline"
    for tried, asked in (({"b": 1}, "acd"), ({"b": 1, "d": 1}, "abcd"), ({"a": 1, "b": 1}, "bcd")):
        found = found_of("abcd", tried)
        assert set(found.asked) <= set(asked) and len(found.asked) == 3


def test_a_round_that_began_with_bad_sites_is_played_once_others_are_tried(tmp_path: Path) -> None:
    """Two of ten abstain, for ever, and a round draws two, of which it needs both. Each start may make two attempts.
    Before, a start forgot what the one before had tried, and some rounds were never played. The line says of each site
    that was asked what became of it, also in an earlier attempt."""
    ranks = dict.fromkeys((f"s{k}" for k in range(10)), 4)
    strategy, grid = federation(
        tmp_path,
        Server(build("glora"), round=Kept(quorum=2)),
        ranks,
        policy=Policy(ranks, retries=1),
        participation=0.2,
    )
    grid.meddle = dict.fromkeys(["s6", "s7"], abstaining)
    for number in range(1, 21):
        for _ in range(2):
            with contextlib.suppress(QuorumNotMet):
                strategy.start(grid, num_rounds=number)
        assert strategy.round == number
        line, begun = strategy.lines.all()[-1], f"{strategy.flower_state.run}-{number}-"
        asked = {message.metadata.dst_node_id for message in grid.sent if message.metadata.group_id.startswith(begun)}
        told = {name for name, one in line["fates"].items() if one["fate"] != "not drawn"}
        assert told == {grid.nodes[node][0] for node in asked}


def test_your_own_draw_and_a_loop_that_closes_early(tmp_path: Path) -> None:
    """The hooks draw two of three, and the loop takes one answer and closes. By hand: one trained, the other is late
    and named. Before, the close ended in a KeyError."""

    class Two(RoundHooks):
        def draw(self, strategy: Any, intake: Any, online: Any) -> Any:
            return ("one", "three")

    class Stranger(RoundHooks):
        def draw(self, strategy: Any, intake: Any, online: Any) -> Any:
            return ("one", "four")

    strategy, grid = federation(tmp_path / "s", Server(build("glora"), round=Kept(quorum=1)), hooks=Stranger())
    with pytest.raises(ConfigError, match="'four'"):
        strategy.start(grid, num_rounds=1)
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(quorum=1)), hooks=Two())

    def first_only(grid: Any, attempt: Any) -> None:
        attempt.take(next(strategy._exchange(grid, attempt.questions(), attempt.round, "training")))

    strategy._collect_answers = first_only  # type: ignore[method-assign]
    strategy.start(grid, num_rounds=1)
    [line] = strategy.lines.all()
    assert {name: one["fate"] for name, one in line["fates"].items()} == {
        "one": "trained", "two": "not drawn", "three": "late"
    }  # fmt: skip
    assert list(line["missing"]) == ["three"] and "closed" in line["missing"]["three"]
    assert EFFECTS.keys() == {*get_args(Fate)}  # without an effect a fate would end the rounds


def test_a_round_takes_as_long_as_all_its_attempts(tmp_path: Path) -> None:
    """By hand: the first attempt waits 50 s for an answer, and the second is answered at once. Before, 0 s."""
    clock = FastClock()
    policy = Policy(RANKS, retries=1, deadline=50.0)
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(quorum=3)), policy=policy, clock=clock)
    grid.meddle = {"two": lambda asked, reply: None if len(grid.sent) <= 3 else reply}
    strategy.start(grid, num_rounds=1)
    [line] = strategy.lines.all()
    assert line["attempt"] == 2 and 50 <= line["seconds"] < 60


def test_a_policy_that_changed_while_no_server_ran_takes_effect_at_the_next_round(tmp_path: Path) -> None:
    """A removal, another rank, a return; also if the first server with the new policy died before its checkpoint."""

    def played(clients: dict[str, int], upto: int, meddle: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        policy = Policy(clients, retries=0)
        strategy, grid = federation(
            tmp_path, Server(build("glora"), round=Kept(quorum=1)), policy=policy, record=tmp_path / "o", resume=True
        )
        grid.meddle = meddle
        strategy.start(grid, num_rounds=upto)
        parcels = [record_parcel(message.content)[0] for message in grid.sent]
        return strategy, {parcel.client.id: parcel.client.rank for parcel in parcels}

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    played({"one": 2, "two": 4, "three": 3}, 1, {"three": nan})
    with pytest.raises(KeyboardInterrupt):
        played({"one": 2, "two": 3}, 2, {"one": die})
    assert played({"one": 2, "two": 3}, 2, {})[1] == {"one": 2, "two": 3}
    assert played({"one": 2, "two": 3, "three": 3}, 3, {})[1] == {"one": 2, "two": 3, "three": 3}
    changes = [e for e in read_events(tmp_path / "o" / "events.jsonl") if isinstance(e, PolicyChanged)]
    assert [(e.round, dict(e.added), e.removed, dict(e.changed)) for e in changes] == [
        *[(2, {}, ("three",), {"two": (4, 3)})] * 2,
        (3, {"three": 3}, (), {}),
    ]


def test_the_deadline_given_to_start_is_that_of_all_messages(tmp_path: Path) -> None:
    """Of those that train and of those that measure; Flower's own loop has one `timeout` too."""
    choosing = Choosing("accuracy", "sites", lambda round: True)
    strategy, grid = federation(tmp_path, Server(build("glora")), record=tmp_path / "o", choosing=choosing)
    strategy.start(grid, num_rounds=1, timeout=77.0)
    assert {(message.metadata.message_type, message.metadata.ttl) for message in grid.sent} == {
        ("train", 77.0),
        ("evaluate", 77.0),
    }
    assert [e.deadline for e in read_events(tmp_path / "o" / "events.jsonl") if isinstance(e, Began)] == [77.0]


class Always:
    """Measures the same score of everything."""

    def count(self, client: str) -> int:
        return 5

    def measure_adapter(self, adapter: Adapter, client: str | None = None) -> dict[str, float]:
        return {"accuracy": 0.5}


@pytest.mark.parametrize("kill", ["in step 5", "never"])
def test_a_restart_measures_the_sites_that_the_round_had(tmp_path: Path, kill: str) -> None:
    """Their nodes come back after five seconds. Reference: a run that was not killed. Before, the restart measured
    whoever was online at that moment: nobody."""
    clock, killed = FastClock(), RuntimeError("killed")

    class Back(LocalGrid):
        def get_node_ids(self) -> list[int]:
            return [*super().get_node_ids()] if clock.now >= 5 else []

    def played(after: Any) -> Any:
        choosing = Choosing("accuracy", "sites", lambda round: True)
        nodes = {name: Node(name, Toy(), tmp_path / name, evaluators={"validation": Always()}) for name in RANKS}
        strategy, grid = federation(
            tmp_path, Server(build("glora")), record=tmp_path / "o", choosing=choosing, after_round=after, nodes=nodes,
            resume=True, clock=clock,
        )  # fmt: skip
        grid.__class__ = Back
        strategy.start(grid, num_rounds=1)
        return strategy.lines.all()[-1]

    def dies(line: Any) -> None:
        clock.now = 0.0
        raise killed

    clock.now = 5.0
    if kill == "in step 5":
        with pytest.raises(RuntimeError):
            played(dies)
    line = played(None)
    assert {name: one["accuracy"] for name, one in line["site_metrics"].items()} == dict.fromkeys(RANKS, 0.5)


@pytest.mark.parametrize("when", ["line", "checkpoint"])
def test_the_end_is_told_as_it_is_stored(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the last line of round 2, the event of that round is there; before, it was lost for good if the
    kill came after it. And a checkpoint that the disk refuses is no finished round."""
    strategy, grid = federation(tmp_path, Server(build("glora")), record=tmp_path / "o")
    strategy.start(grid, num_rounds=1)
    if when == "line":
        put = strategy.lines.put

        def last(line: Any) -> None:
            if is_finished(line):
                raise Killed
            put(line)

        monkeypatch.setattr(strategy.lines, "put", last)
    else:
        save = checkpoint.save

        def full(folder: Path, *args: Any, **more: Any) -> Any:
            if folder == tmp_path / "server":
                raise CheckpointError("full")
            return save(folder, *args, **more)

        monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises((Killed, CheckpointError)):
        strategy.start(grid, num_rounds=2)
    events = read_events(tmp_path / "o" / "events.jsonl")
    assert [event.round for event in events if isinstance(event, Done)] == ([1, 2] if when == "line" else [1])
    assert events[-1].round == (2 if when == "line" else 1) == strategy.round
    monkeypatch.undo()
    again, grid = federation(tmp_path, Server(build("glora")), record=tmp_path / "o", resume=True)
    again.start(grid, num_rounds=2)
    told = progress_of(read_events(tmp_path / "o" / "events.jsonl"))
    assert told.round == 2 and [*told.lines] == [1, 2] and told.fate_counts["one", "trained"] == 2


def test_a_site_that_is_removed_while_a_round_trains_does_not_measure_it(tmp_path: Path) -> None:
    """Before, it was still sent the new model."""
    path = write_policy(tmp_path / "policy.toml", "[clients]\none = 2\ntwo = 4\nthree = 3\n")
    choosing = Choosing("accuracy", "sites", lambda round: True)
    strategy, grid = federation(
        tmp_path, Server(build("glora"), round=Kept(quorum=1)), policy_file=path, choosing=choosing
    )

    def goes(asked: Message, reply: Message) -> Message:
        write_policy(path, "[clients]\none = 2\ntwo = 4\n")
        return reply

    grid.meddle = {"three": goes}
    strategy.start(grid, num_rounds=1)
    measured = [grid.nodes[m.metadata.dst_node_id][0] for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert measured == ["one", "two"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Before, its messages had one name, and its checkpoints another."""
    strategy, _ = federation(tmp_path, Server(build("glora")))
    with pytest.raises(ConfigError, match="other"):
        FedLoRA(
            strategy.server, strategy.policy, strategy.flower_state.state, run="other", resume=strategy.flower_state
        )


# ---- what is written down --------------------------------------------------------------------------------------------


class Killed(BaseException): ...


@pytest.mark.parametrize("when", ["in the round", "before the checkpoint", "after the checkpoint"])
def test_a_round_that_is_played_again_has_one_line(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at three places of round 3 and resumed: the lines are those of a run that was not killed."""
    whole, grid = federation(tmp_path / "whole", Server(build("glora")), record=tmp_path / "whole" / "o")
    whole.start(grid, num_rounds=4)
    finished: list[int] = []

    def after(line: Any) -> dict[str, Any]:
        if when == "after the checkpoint" and line["round"] == 3 and 3 not in finished:
            finished.append(3)
            raise Killed
        return {"metrics": {"accuracy": line["round"] / 10}}

    out = tmp_path / "o"
    strategy, grid = federation(tmp_path, Server(build("glora")), record=out, after_round=after)
    strategy.start(grid, num_rounds=2)

    def die(*args: Any) -> None:
        raise Killed

    if when == "in the round":
        grid.meddle = {"two": die}
    elif when == "before the checkpoint":
        monkeypatch.setattr(strategy, "_save", die)
    with pytest.raises(Killed):
        strategy.start(grid, num_rounds=4)
    assert [line["round"] for line in lines_of(out)] == ([1, 2] if when == "in the round" else [1, 2, 3])
    again, grid = federation(tmp_path, Server(build("glora")), record=out, resume=True, after_round=after)
    again.start(grid, num_rounds=4)
    lines = lines_of(out)
    assert [line["metrics"] for line in lines] == [{"accuracy": n / 10} for n in (1, 2, 3, 4)]
    for mine, theirs in zip(lines, lines_of(tmp_path / "whole" / "o"), strict=True):
        assert {**mine, "seconds": 0, "metrics": 0} == {**theirs, "seconds": 0, "metrics": 0}
    assert bits(again.flower_state.state.server) == bits(whole.flower_state.state.server)


def test_a_round_that_is_finished_after_a_crash_is_finished_under_the_policy_as_it_is(tmp_path: Path) -> None:
    """Before, the sites measured by what the server knew of the members before the crash."""
    members: list[set[str]] = []

    def after(line: Any) -> dict[str, Any]:
        members.append({*strategy.flower_state.members})
        if len(members) == 1:
            raise Killed
        return {}

    for clients in (RANKS, {name: RANKS[name] for name in ("one", "two")}):
        strategy, grid = federation(
            tmp_path, Server(build("glora")), policy=Policy(clients), record=tmp_path / "o", resume=bool(members),
            after_round=after,
        )  # fmt: skip
        with contextlib.suppress(Killed):
            strategy.start(grid, num_rounds=1)
    assert members == [{"one", "two", "three"}, {"one", "two"}]


def test_lines_are_whole_once_each_and_valid_whatever_was_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(
        '{"round": 1, "loss": NaN}\n{"round": 1, "x": 2}\nnull\n{"round": 3}\n{"round": 2}\n{"round": 4, "t'
    )
    lines = RoundLines(path, upto=2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"round": 1, "x": 2}, {"round": 2}]
    lines.put({"round": 3, "loss": float("nan"), "why": "a\nb"})
    lines.put({"round": 2, "again": True})
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert "NaN" not in path.read_text() and lines.get(2) == {"round": 2, "again": True} and lines.get(9) is None


def test_a_full_disk_leaves_the_lines_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = RoundLines(tmp_path / "r")
    lines.put({"round": 1})
    before = (tmp_path / "r").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        lines.put({"round": 2})
    monkeypatch.undo()
    assert (tmp_path / "r").read_bytes() == before and [dict(line) for line in lines.all()] == [{"round": 1}]


def test_a_round_goes_on_where_its_events_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "o" / "events.jsonl").mkdir(parents=True)
    strategy, grid = federation(tmp_path, Server(build("glora")), record=tmp_path / "o")
    strategy.start(grid, num_rounds=1)
    assert strategy.round == 1 and "could not be written" in caplog.text


def test_after_round_may_end_the_run(tmp_path: Path) -> None:
    strategy, grid = federation(
        tmp_path, Server(build("glora")), record=tmp_path / "o",
        after_round=lambda line: strategy.stop("stopped early") if line["round"] == 2 else None,
    )  # fmt: skip
    strategy.start(grid, num_rounds=9)
    assert strategy.round == 2
    last = read_events(tmp_path / "o" / "events.jsonl")[-1]
    assert isinstance(last, Ended) and (last.round, last.why) == (2, "stopped early")


def test_what_ended_a_run_is_written_down(tmp_path: Path) -> None:
    def fail(line: Any) -> None:
        raise RuntimeError("the disk is on fire\x1b")

    strategy, grid = federation(tmp_path, Server(build("glora")), record=tmp_path / "o", after_round=fail)
    with pytest.raises(RuntimeError):
        strategy.start(grid, num_rounds=2)
    last = read_events(tmp_path / "o" / "events.jsonl")[-1]
    assert isinstance(last, Ended) and last.why.startswith("failed: RuntimeError: ") and "\\x1b" in last.why


def test_a_line_a_round_is_printed_in_a_process_that_has_no_handler(
    tmp_path: Path, program: Callable[..., Program]
) -> None:
    """As a ServerApp's, where Flower gives a handler to its own logger only."""
    script = tmp_path / "app.py"
    script.write_text(f"""
from pathlib import Path
from fedlora import Kept, Server, build
from support.flower_grid import federation
strategy, grid = federation(Path({str(tmp_path / "f")!r}), Server(build("glora"), round=Kept(quorum=1)))
grid.offline = {{"two"}}
strategy.start(grid, num_rounds=2)
""")
    done = program(script).ended()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:12] for line in lines[:2]] == ["round 1 of 2", "round 2 of 2"]
    assert all(words in lines[0] for words in ("loss 0.500", "one 0.50", "two offline", "three 0.50"))


# ---- order and bits --------------------------------------------------------------------------------------------------


class Shuffled(LocalGrid):
    """Replies come in any order, some of them seconds later than others."""

    rng = random.Random(0)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.rng.shuffle(self.waiting)
        count = self.rng.randint(0, len(self.waiting))
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        return found


@pytest.mark.parametrize(
    "method",
    ["glora", "fedex-lora", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fedit", "hetlora"))],
)
def test_the_order_in_which_replies_come_changes_no_bit(tmp_path: Path, method: str) -> None:
    """Checkpoints and lines of three rounds, against replies in the order of the policy."""
    names = [f"c{k}" for k in range(6)]
    ranks = (
        dict.fromkeys(names, 4) if method in ("fedit", "fedex-lora") else {n: 2 + k % 3 for k, n in enumerate(names)}
    )
    seen = []
    for seed in range(4):
        out = tmp_path / str(seed)
        server = Server(build(method), round=Kept(quorum=1))
        strategy, grid = federation(out, server, ranks, record=out / "o", policy=Policy(ranks, retries=0))
        shuffled = Shuffled(dict(grid.nodes.values()))
        shuffled.rng = random.Random(seed)
        shuffled.meddle = {"c2": nan, "c4": lambda asked, reply: Message(Error(2, "boom"), reply_to=asked)}
        strategy.start(shuffled if seed else grid_with(grid, shuffled.meddle), num_rounds=3)
        lines = [{**line, "seconds": 0} for line in lines_of(out / "o")]
        stored = {p.name: p.read_bytes() for p in (out / "server").glob("*.safetensors")}
        seen.append((bits(strategy.flower_state.state.server), lines, stored))
    assert all(each == seen[0] for each in seen[1:])


def test_the_way_of_an_upload_leads_through_files_that_are_there() -> None:
    """`fedlora.flower.rounds` lists them, below src/fedlora/flower."""
    here = Path(str(rounds_package.__file__)).parents[1]
    named = re.findall(r"^([\w./]+\.py) ", str(rounds_package.__doc__), re.MULTILINE)
    assert len(named) > 9 and [name for name in named if not (here / name).is_file()] == []


def test_in_a_streamed_round_uploads_are_added_up_as_they_come(tmp_path: Path) -> None:
    """The round is the plain one up to the rounding of float32, but for histories, which no sum has."""
    ranks = {f"c{k}": 2 + k % 3 for k in range(8)}
    updates = []
    for round in (Kept(quorum=1), Streamed(quorum=1)):
        server, policy = Server(build("svd", energy=1.0), round=round), Policy(ranks, retries=0)
        strategy, grid = federation(tmp_path / type(round).__name__, server, ranks, policy=policy)
        grid.meddle = {"c2": nan}
        strategy.start(grid, num_rounds=1)
        assert set(strategy.lines.all()[-1]["missing"]) == {"c2"}
        updates.append(server.global_update(strategy.flower_state.state.server))
    for name, lora in updates[0].items():
        torch.testing.assert_close(updates[1][name].delta(), lora.delta(), rtol=1e-4, atol=1e-5)


def grid_with(grid: LocalGrid, meddle: Any) -> LocalGrid:
    grid.meddle = meddle
    return grid


# ---- one at a time ---------------------------------------------------------------------------------------------------


def test_two_runs_of_one_federation_are_refused_by_the_others_process(
    tmp_path: Path, program: Callable[..., Program]
) -> None:
    """Another process has it (a lock is a process's); killed, it lets go."""
    code = f"""
import time
from pathlib import Path
from fedlora.flower.rounds.playing import played_by_one
with played_by_one(Path({str(tmp_path)!r}) / "server"):
    print("held", flush=True); time.sleep(60)
"""
    (tmp_path / "holds.py").write_text(code)
    other, end = program(tmp_path / "holds.py"), time.monotonic() + 60
    try:
        while not (other.said / "out").exists() or "held" not in (other.said / "out").read_text():
            assert time.monotonic() < end and other.process.is_alive()
            time.sleep(0.01)
        said = rf"by process {other.process.pid}\."
        with pytest.raises(ConfigError, match=said), played_by_one(tmp_path / "server"):
            pytest.fail("both have it")
    finally:
        other.process.kill()
        other.process.join()
    with played_by_one(tmp_path / "server"):
        assert str(os.getpid()) in (tmp_path / "server" / ".lock").read_text()
    with played_by_one(tmp_path / "server"):
        pass


def test_a_folder_that_cannot_be_locked_says_so(tmp_path: Path) -> None:
    """An error of the system, which may pass: not one of the folder's own files, which is exit code 2."""
    (tmp_path / "server").write_text("a file")
    with pytest.raises(OSError, match="server"), played_by_one(tmp_path / "server"):
        pass
