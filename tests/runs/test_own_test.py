"""Own test sets of clients that share one file. Kinds of evidence: *contract* (nothing is trained on that is tested),
*end-to-end* (each client's score on its own examples, counted by peft)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedlora.data.splits import inputs
from fedlora.errors import ConfigError
from fedlora.runs.client_data import deal
from fedlora.runs.config import parse_config
from support.projects import accuracy, configured, make_project, peft_model, ran
from support.training_data import classification, rows

OWN = ("clients.test_fraction=0.25", "clients.min_examples=12")


def test_a_share_of_what_each_client_was_dealt_is_its_own_test(project: Path) -> None:
    """Beside the same parts without own tests: theirs are those, cut in two; nothing is lost, doubled or shared."""
    plain = deal(configured(project, "clients.min_examples=12"), None)
    own = deal(configured(project, *OWN), None)
    assert set(own.own_test) == set(own.parts) == {"site-1", "site-2", "site-3"}
    assert own.test[""].digest() == plain.test[""].digest(), "the common test set is as it was"
    for client, part in plain.parts.items():
        halves = [own.parts[client], own.own_test[client]]
        assert Counter(t for half in halves for t in half.text) == Counter(part.text)
        assert abs(len(halves[1]) - 0.25 * len(part)) < 2
    trained = {one for part in own.parts.values() for one in inputs(part)}
    held = [one for part in own.own_test.values() for one in inputs(part)]
    assert not trained & set(held)


def test_what_two_clients_hold_copies_of_is_no_test_of_either(tmp_path: Path) -> None:
    """Twelve sentences of the 150 are copied, in other cases and spacing; wherever the copies go, nobody is tested on a
    sentence that anybody trains on, and no example is lost."""
    project, data = make_project(tmp_path), classification(150, 0)
    shouted = tuple("  " + text.upper().replace(" ", "  ") for text in data.text[:12])
    copies = replace(data, text=shouted, labels=(data.labels or ())[:12])
    (project / "train.jsonl").write_text(rows(data) + rows(copies))
    dealt = deal(configured(project, OWN[0], "clients.partition=iid"), None)
    trained = {one for part in dealt.parts.values() for one in inputs(part)}
    assert not trained & {one for part in dealt.own_test.values() for one in inputs(part)}
    sets = (dealt.parts, dealt.own_test, dealt.test, dealt.validation)
    assert sum(len(part) for each in sets for part in each.values()) == 162
    holders = Counter(one for part in dealt.parts.values() for one in set(inputs(part)))
    assert max(holders.values()) > 1, "the case is as constructed: a copy went to another client"


def test_the_summary_has_each_client_on_its_own_test_set(project: Path, tmp_path: Path) -> None:
    """Counted example by example by peft, from the readouts; the server's model on the common set, which without
    data.test is all own ones together."""
    config = configured(
        project, *OWN, "data.test=0", "evaluate.clients_at_end=true", "run.readouts=true", "run.rounds=1"
    )
    folder, dealt = ran(config, tmp_path / "run"), deal(config, None)
    s, manifest = folder.read_json("summary.json"), folder.read_json("manifest.json")
    for client, part in dealt.own_test.items():
        network = peft_model(project, folder.path / "clients" / client)
        assert s["clients_at_end"][client]["accuracy"] == pytest.approx(accuracy(network, part))
        assert manifest["data"]["own_test"][client] == {"examples": len(part), "sha256": part.digest()}
    assert Counter(dealt.test[""].text) == Counter(t for part in dealt.own_test.values() for t in part.text)
    network = peft_model(project, folder.path / "adapter")
    assert s["test"]["last"]["accuracy"] == pytest.approx(accuracy(network, dealt.test[""]))


def test_a_client_with_too_few_examples_is_named_with_numbers(project: Path) -> None:
    """At alpha = 0.2 some client has few; a hundredth of them is none. Clients with files of their own have test sets
    already."""
    with pytest.raises(ConfigError, match=r"test_fraction = 0\.01 .*'site-\d' .* \d+ examples.* 100 or more"):
        deal(configured(project, "clients.test_fraction=0.01"), None)
    raw = {"model": {"name": "m"}, "data": {"clients": {"a": "a.jsonl"}}, "clients": {"test_fraction": 0.2}}
    with pytest.raises(ConfigError, match=r"clients\.test_fraction = 0\.2 .*data\.clients"):
        deal(parse_config(raw), None)
