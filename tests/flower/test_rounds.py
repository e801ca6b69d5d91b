"""Rounds as FedLoRA plays and tells them: fates, limits, what is written down, order of arrival, who may play.

Kinds of evidence: *contract* (what files and lines say), *parity* (bit for bit whatever the order of replies).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message

from fedlora import Kept, Server, build
from fedlora.core.messages import Client
from fedlora.errors import CheckpointError, ConfigError, QuorumNotMet
from fedlora.flower.envelope import receipt_of
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.records import to_array
from fedlora.flower.server.journal import read_now, read_rounds
from fedlora.flower.server.state import least_usable, reply_limit
from fedlora.flower.terms.policy import Policy
from fedlora.server.rules import Krum
from fedlora.server.sampling import sample_clients
from fedlora.server.server import start
from support.flower_grid import (
    RANKS,
    FastClock,
    LocalGrid,
    bits,
    changed,
    fates,
    federation,
    last_line,
    nan,
    play,
    seed_adapter,
)


def one_good() -> Server:
    return Server(build("glora"), round=Kept(quorum=1))


def boom(asked: Message, reply: Message) -> Message:
    return Message(Error(2, "out of memory"), reply_to=asked)


def never(asked: Message, reply: Message) -> None:
    return None


# ---- everyone has a fate ---------------------------------------------------------------------------------------------


def test_everyone_has_a_fate_in_every_round(tmp_path: Path) -> None:
    """Six fates; as many are asked as are drawn, of those that are online."""
    ranks = dict.fromkeys(["good", "bad", "ill", "slow", "away", "rest", "spare"], 4)
    strategy, grid = federation(tmp_path, one_good(), ranks, fraction_train=4 / 7, seed=3)
    online = [name for name in ranks if name != "away"]
    asked = sample_clients(online, 4 / 6, seed=3, round=0)
    meddling: dict[str, Any] = dict(zip(asked, (nan, boom, never), strict=False))
    grid.offline, grid.meddle = {"away"}, meddling
    mine = ConfigRecord({"mine": 7})
    strategy.start(BoundedGrid(grid, clock=FastClock()), num_rounds=1, timeout=50.0, train_config=mine)
    assert all(message.content["config"]["mine"] == 7 for message in grid.sent)
    want = dict.fromkeys(online, "not drawn") | dict(zip(asked, ("refused", "failed", "late", "trained"), strict=True))
    assert fates(strategy) == want | {"away": "offline"}
    line = read_rounds(tmp_path / "server" / "rounds.jsonl")[0]
    assert line["fates"][asked[2]]["why"] == "no answer within 50 s" and line["loss"] == pytest.approx(0.5)
    assert list(line["weights"]) == list(line["losses"]) == [asked[3]]
    now = read_now(tmp_path / "server" / "now.json")
    assert (
        now["round"] == 1 and {*now["asked"]} == {*asked} == {*now["answered"]} and now["ended"]["kind"] == "complete"
    )


def test_a_site_whose_work_did_not_count_is_told_with_its_next_message(tmp_path: Path) -> None:
    ranks = dict.fromkeys(["good", "bad", "ill", "slow"], 4)

    def told(rounds: int, **meddle: Any) -> dict[str, str]:
        strategy, grid = federation(tmp_path, one_good(), ranks)
        grid.meddle = meddle
        play(strategy, grid, rounds)
        return {grid.nodes[m.metadata.dst_node_id][0]: why for m in grid.sent if (why := receipt_of(m.content).why)}

    assert told(1, bad=nan, ill=boom, slow=never) == {}
    words = told(2)
    assert {name: said.split(" did not count: ")[1].split(":")[0] for name, said in words.items()} == {
        "bad": "refused", "ill": "failed", "slow": "late",
    }  # fmt: skip
    assert "no answer within 3600 s" in words["slow"] and "out of memory" in words["ill"] and told(3) == {}


def test_too_few_answers_end_the_run_by_name_and_it_is_played_again(tmp_path: Path) -> None:
    """Never a run that ends well without training: the error names who was missing, each once; the state is stored."""
    server = Server(build("glora"), round=Kept(quorum=3))
    strategy, grid = federation(tmp_path, server)
    play(strategy, grid, 1)
    before, sent = bits(strategy.state), len(grid.sent)
    grid.meddle, grid.offline = {"two": nan}, {"one"}
    with pytest.raises(QuorumNotMet, match=r"quorum is 3.*two.*Not there: one: .*not online") as failed:
        play(strategy, grid, 2)
    assert str(failed.value).count("two: ") == 1 and bits(strategy.state) == before and len(grid.sent) == sent + 2
    assert read_now(tmp_path / "server" / "now.json")["ended"]["kind"] == "quorum"
    again, grid = federation(tmp_path, server)
    play(again, grid, 2)
    assert again.round == 2 and set(fates(again).values()) == {"trained"}


def test_a_client_that_the_method_cannot_serve_costs_itself_the_round(tmp_path: Path) -> None:
    """FedIT needs one rank. Other ranks are refused at the start; if a site gets one later, the others go on."""
    server, ranks = Server(build("fedit"), round=Kept(quorum=1)), {"one": 4, "two": 4, "three": 2}
    strategy, grid = federation(tmp_path / "a", server, ranks)
    with pytest.raises(ConfigError, match=r"fedit .* 2 of three"):
        play(strategy, grid, 1)
    strategy, grid = federation(tmp_path / "b", server, dict.fromkeys(ranks, 4))
    play(strategy, grid, 1)
    strategy.policy = Policy(clients=ranks)
    play(strategy, grid, 2)
    assert fates(strategy) == {"one": "trained", "two": "trained", "three": "not sent"}
    assert {*read_now(tmp_path / "b" / "server" / "now.json")["answered"]} == {*ranks}, "nobody waits for three"


# ---- numbers by hand -------------------------------------------------------------------------------------------------


def test_weights_are_the_shares_of_examples(tmp_path: Path) -> None:
    strategy, grid = federation(tmp_path, Server(build("glora")))
    grid.meddle = {"three": changed(loss=0.0)}
    play(strategy, grid, 1)
    assert last_line(strategy)["weights"] == pytest.approx({"one": 13 / 41, "two": 13 / 41, "three": 15 / 41})
    assert last_line(strategy)["losses"] == {"one": 0.5, "two": 0.5, "three": 0.0}


def test_what_a_reply_may_take_follows_from_ranks_and_heads(tmp_path: Path) -> None:
    """By hand: rank 2 on (12, 9) and (7, 10) is 2 (12 + 9 + 7 + 10) = 76 numbers, the head 15, of 4 bytes each."""
    state = start(Server(build("glora")), seed_adapter()).server
    assert reply_limit([Client("one", 2)], state).bytes == 2 * 4 * (76 + 15) + 2**20

    def large(asked: Message, reply: Message) -> Message:
        found = dict(reply.content["arrays"])
        found["B/a.q"] = to_array(torch.zeros(2**19))
        reply.content["arrays"] = ArrayRecord(found)
        return reply

    strategy, grid = federation(tmp_path, one_good())
    grid.meddle = {"three": large}
    play(strategy, grid, 1)
    assert fates(strategy) == {"one": "trained", "two": "trained", "three": "refused"}


@pytest.mark.parametrize(
    ("quorum", "rule", "participation", "want"),
    [
        (None, None, 1.0, 1),
        (3, None, 1.0, 3),
        (3, Krum(f=1), 1.0, 5),  # 2 f + 3
        (6, Krum(f=1), 1.0, 6),
        (3, Krum(f=1), 4 / 6, 0),  # four are drawn, too few for a byzantine client among them
    ],
)
def test_what_a_round_needs(quorum: Any, rule: Any, participation: float, want: int) -> None:
    """By hand, of six clients, and of Krum's bound."""
    assert least_usable(Policy(clients=dict.fromkeys("abcdef", 4)), quorum, rule, participation) == want


# ---- a robust rule ---------------------------------------------------------------------------------------------------

FIVE = dict.fromkeys("abcde", 4)


def test_rounds_say_what_the_rule_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In rounds.jsonl and in the log; a client that is left out has trained and is not refused."""
    caplog.set_level(logging.INFO, logger="fedlora")
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(Krum(1))), FIVE)
    play(strategy, grid, 2)
    for line in strategy.journal.lines():
        clients = line["robust"]["clients"]
        assert set(clients) == set(FIVE) and line["robust"]["rule"] == "krum (f = 1)"
        assert [one["coefficient"] for one in clients.values()].count(0.0) == 4
        assert {said["fate"] for said in line["fates"].values()} == {"trained"}
    told = [receipt.why for receipt in strategy.kept.receipts.values() if receipt.why]
    assert len(told) == 4 and all("no weight" in why and " away from " in why for why in told)
    assert "round 1: krum left out" in caplog.text


def test_too_few_clients_are_refused_before_and_in_a_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"krum \(f = 2\) needs 7 clients, but a round has 5"):
        play(*federation(tmp_path, Server(build("glora"), round=Kept(Krum(2))), FIVE), 1)
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(Krum(1))), FIVE)
    grid.offline = {"b"}
    with pytest.raises(QuorumNotMet, match=r"krum \(f = 1\) needs 5 clients, and 4 came"):
        play(strategy, grid, 1)
    assert strategy.round == 0


# ---- order and bits --------------------------------------------------------------------------------------------------


class Shuffled(LocalGrid):
    """Replies come in any order, some of them seconds later than others."""

    rng = random.Random(0)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.rng.shuffle(self.waiting)
        count = self.rng.randint(0, len(self.waiting))
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        return found


@pytest.mark.parametrize("method", ["glora", "fedex-lora"])
def test_the_order_in_which_replies_come_changes_no_bit(tmp_path: Path, method: str) -> None:
    """Checkpoints' states and lines of three rounds, against replies in the order of the clients."""
    ranks = {f"c{k}": 4 if method == "fedex-lora" else 2 + k % 3 for k in range(6)}
    seen = []
    for seed in range(4):
        strategy, grid = federation(tmp_path / str(seed), Server(build(method), round=Kept(quorum=1)), ranks)
        shuffled = Shuffled(dict(grid.nodes.values())) if seed else grid
        Shuffled.rng, shuffled.meddle = random.Random(seed), {"c2": nan, "c4": boom}
        play(strategy, shuffled, 3)
        seen.append((bits(strategy.state), [{**line, "seconds": 0} for line in strategy.journal.lines()]))
    assert all(each == seen[0] for each in seen[1:])


# ---- whose folder it is ----------------------------------------------------------------------------------------------


def test_a_folder_goes_on_with_its_own_run_alone(tmp_path: Path) -> None:
    """Another method, option, name or module is another run; what may change between rounds is not."""
    server, ranks = Server(build("glora", rho=1.0)), dict.fromkeys(RANKS, 4)
    play(*federation(tmp_path, server, ranks), 3)
    before = {path.name: path.read_bytes() for path in (tmp_path / "server" / "checkpoints").iterdir()}
    others: list[tuple[Any, Any]] = [(Server(build("svd")), ranks), (Server(build("glora", rho=0.5)), ranks)]
    for other, its in [*others, (server, dict.fromkeys(RANKS, 8))]:
        with pytest.raises(CheckpointError, match="another run"):
            play(*federation(tmp_path, other, its), 4)
    assert {p.name: p.read_bytes() for p in (tmp_path / "server" / "checkpoints").iterdir()} == before
    same, grid = federation(tmp_path, Server(build("glora", rho=1.0), round=Kept(weighting="uniform")), ranks)
    play(same, grid, 3)
    assert same.round == 3 and not grid.sent


def test_after_a_restart_should_stop_sees_the_rounds_of_this_start(tmp_path: Path) -> None:
    """A rule that reads its round's loss is not asked about a round that an earlier start played."""

    def diverged(round: int, result: Any) -> bool:
        return float(result.train_metrics_clientapp[round]["train_loss"]) > 1e9

    for rounds in (1, 2):
        strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(quorum=1)))
        play(strategy, grid, rounds, should_stop=diverged)
        assert strategy.round == rounds


def test_arrays_without_the_trained_heads_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`evaluate_fn` on a classifier would measure an untrained head; the start's head moves in toy rounds."""
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(quorum=1)))
    play(strategy, grid, 1)
    assert strategy.state.server.heads and "not the whole model" in caplog.text
