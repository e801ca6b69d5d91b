"""A site's measurement of its own readout. Kinds of evidence: *contract* (what is measured is what the next round would
train, and what stays at the site is the same), *attack* (answers that no site of ours gives).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, MetricRecord, RecordDict

from fedlora import Adapter, Client, Server, build
from fedlora.core.parcels import pack
from fedlora.errors import ConfigError
from fedlora.flower.envelope import Receipt
from fedlora.flower.records import PROTOCOL, RecordError, parcel_record
from fedlora.flower.scores import SiteRound, SiteScores, as_question, asked_part, averaged, record_measured
from fedlora.flower.site.node import Node
from support.flower_grid import RANKS, RUN, Message, Toy, Watching, bits, federation, play
from support.toy_federations import Ruler, toy_federation


@pytest.mark.parametrize("method", ["glora", "fedsa-lora", "ffa-lora", "fedex-lora", "rolora"])
def test_a_site_measures_what_it_would_start_its_next_round_with(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each round, the adapter that the next one trains. That measuring moves no bit: test_travels_once."""
    seen, trainer, measured = dict[str, list[Any]](), Watching(), Ruler.measure_adapter

    def noting(self: Ruler, adapter: Adapter, client: str) -> Any:
        seen.setdefault(client, []).append(bits(replace(adapter, base=None)))
        return measured(self, adapter, client)

    monkeypatch.setattr(Ruler, "measure_adapter", noting)
    strategy, grid = toy_federation(tmp_path, Server(build(method)), dict.fromkeys(RANKS, 4), trainer=trainer)
    play(strategy, grid, 3)
    assert set(strategy.lines()[0]["site_metrics"]["one"]) == {"accuracy", "loss", "examples"}  # NaN stays home
    for name in RANKS:
        assert [trainer.got[name, number] for number in (1, 2)] == seen[name][:2], "of the third nobody trains"


def test_who_holds_nothing_out_says_so(tmp_path: Path) -> None:
    strategy, grid = federation(tmp_path, Server(build("fedsa-lora")), dict.fromkeys(RANKS, 4))
    play(strategy, grid, 1)
    download = strategy.server.download(strategy.state.server, Client("one", 4))
    with pytest.raises(ConfigError, match="'one' holds no test"):
        Node("one", Toy(), tmp_path / "nodes" / "one").measure(
            as_question(parcel_record(pack(download, None), RUN, receipt=Receipt(1)), "test")
        )
    with pytest.raises(RecordError, match="this one says None"):
        asked_part(RecordDict({"config": ConfigRecord({"protocol": PROTOCOL})}))


# ---- what the server believes ----------------------------------------------------------------------------------------


def answer(change: Callable[[dict[str, Any], dict[str, Any]], None] = lambda c, m: None) -> RecordDict:
    said = json.dumps({"run": RUN, "round": 2, "measure": "validation"}, sort_keys=True)
    config: dict[str, Any] = {"protocol": PROTOCOL, "measured": said, "kept": []}
    metrics: dict[str, Any] = {"num-examples": 5, "score-accuracy": 0.5, "score-loss": 0.7}
    change(config, metrics)
    return RecordDict({"config": ConfigRecord(config), "metrics": MetricRecord(metrics)})


FORGED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "no examples": (lambda c, m: m.pop("num-examples"), "None examples"),
    "none of them": (lambda c, m: m.update({"num-examples": 0}), "0 examples"),
    "a part of one": (lambda c, m: m.update({"num-examples": 0.5}), "0.5 examples"),
    "too many": (lambda c, m: m.update({"num-examples": 10**15}), "examples; a whole number"),
    "NaN": (lambda c, m: m.update({"score-accuracy": float("nan")}), "accuracy is nan"),
    "infinite": (lambda c, m: m.update({"score-loss": float("inf")}), "loss is inf"),
    "too good": (lambda c, m: m.update({"score-accuracy": 1.5}), "its accuracy is 1.5; it lies between 0 and 1"),
    "a loss that drowns all others'": (lambda c, m: m.update({"score-loss": 1e300}), r"loss is 1e\+300.* 1e\+06"),
    "a perplexity too": (lambda c, m: m.update({"score-perplexity": 1e10}), r"perplexity is 1e\+10.* 1e\+09"),
    "negative": (lambda c, m: m.update({"score-loss": -1.0}), "its loss is -1"),
    "a list": (lambda c, m: m.update({"score-accuracy": [0.5, 0.6]}), "accuracy is .*not a number"),
    "other numbers": (lambda c, m: m.update({"score-patient-17": 0.5}), "'score-patient-17', which nobody asked for"),
    "without the metric": (lambda c, m: m.pop("score-accuracy"), "it has no accuracy"),
    "another round": (lambda c, m: c.update({"measured": c["measured"].replace("2", "1")}), "was asked for"),
    "another run": (lambda c, m: c.update({"measured": c["measured"].replace(RUN, "other")}), "was asked for"),
    "on test": (lambda c, m: c.update({"measured": c["measured"].replace("validation", "test")}), "was asked for"),
    "another protocol": (lambda c, m: c.update({"protocol": "fedlora/0"}), PROTOCOL),
}


def test_an_honest_answer_is_believed() -> None:
    found = record_measured(answer(), run=RUN, round=2, part="validation", metric="accuracy")
    assert found == SiteScores({"accuracy": 0.5, "loss": 0.7}, 5)


@pytest.mark.parametrize("name", FORGED)
def test_an_answer_that_cannot_be_is_refused_by_name(name: str) -> None:
    change, why = FORGED[name]
    with pytest.raises(RecordError, match=why):
        record_measured(answer(change), run=RUN, round=2, part="validation", metric="accuracy")


def test_the_mean_is_weighted_by_examples() -> None:
    """(0.5 * 10 + 1.0 * 30) / 40, by hand; a score that one of them lacks has no mean. A stock client's claim counts as
    in training: two of 10 and more have the plain mean where 10 count."""
    said = {"a": SiteScores({"accuracy": 0.5, "loss": 1.0}, 10), "b": SiteScores({"accuracy": 1.0}, 30)}
    assert SiteRound(said).mean() == {"accuracy": pytest.approx(0.875), "examples": 40} and SiteRound().mean() == {}
    stock = [MetricRecord({"num-examples": 1e308, "x": 1.0}), MetricRecord({"num-examples": 10, "x": 0.5})]
    assert averaged([stock[0], *stock], 10.0) == {"x": pytest.approx(2.5 / 3)}


def test_who_does_not_answer_is_named_and_stops_nobody(tmp_path: Path) -> None:
    """One is away, one forges, one fails, one is silent; the last one counts, and its 7 + 2 examples."""
    ranks = dict.fromkeys(["ok", "away", "forger", "broken", "silent"], 4)
    strategy, grid = toy_federation(tmp_path, Server(build("glora")), ranks)
    grid.offline = {"away"}

    def measured(meddle: Callable[[Message, Message], Any]) -> Callable[[Message, Message], Any]:
        return lambda asked, reply: meddle(asked, reply) if asked.metadata.message_type == "evaluate" else reply

    def forged(asked: Message, reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord({**dict(reply.content["metrics"]), "score-accuracy": 1.5})
        return reply

    grid.meddle = {
        "forger": measured(forged), "silent": measured(lambda asked, reply: None),
        "broken": measured(lambda asked, reply: Message(Error(2, "out of memory"), reply_to=asked)),
    }  # fmt: skip
    play(strategy, grid, 1)
    [line] = strategy.lines()
    assert list(line["site_metrics"]) == ["ok"] and line["site_mean"] == pytest.approx(line["site_metrics"]["ok"])
    assert line["site_mean"]["examples"] == 9 and set(line["site_unmeasured"]) == {"away", "forger", "broken", "silent"}
    for name, why in (("away", "not online"), ("forger", "1.5"), ("broken", "out of memory"), ("silent", "no answer")):
        assert why in line["site_unmeasured"][name]
