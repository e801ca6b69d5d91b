"""The list of what may leave. Kind of evidence: contract. Every name that the code writes today is on the list, as
found in the code that writes it, and one that is not is not written.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from fedlora import METHODS, Adapter, Client, LoRA, Server, Upload, build, receive, send
from fedlora.core.messages import Download
from fedlora.core.sent import Attacked
from fedlora.errors import HyperparameterError
from fedlora.privacy import fate_of, filtered, unlisted
from fedlora.privacy.release_list import RELEASES, Fate
from fedlora.privacy.released import items, places
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord, Traffic

RELEASED: set[Fate] = {"released", "privatised", "if-public"}


def keys_of(function: Any, name: str) -> set[str]:
    """The constant keys of the dictionary displays in a function: those that have the key `name`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [
        {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
    ]
    (keys,) = [one for one in found if name in one]
    return keys


def a_record() -> RoundRecord:
    """With all that a round can have, attacked and judged."""
    plain = {"clients": {"a": {"norm": 1.0, "coefficient": 0.5}}}
    judged = SimpleNamespace(plain=lambda: plain)
    state: Any = SimpleNamespace(server=SimpleNamespace(tally=SimpleNamespace(judged=judged)))
    return RoundRecord(
        1, state, {"a": 0.5}, {"a": 1.0}, {"b": "why"}, {"accuracy": 1.0}, {"train": 1.0}, Traffic(), 2.0, (),
        Attacked("scale", {"a": {"norm": 2.0}}),
    )  # fmt: skip


def test_every_item_has_a_fate_and_a_reason_and_is_there_once() -> None:
    assert all(item.fate in get_args(Fate) and len(item.reason) > 10 for item in RELEASES)
    names = [(item.place, item.name) for item in RELEASES]
    assert len(set(names)) == len(names)
    assert {"metrics.jsonl", "summary.json", "manifest.json", "card", "folder", "download", "tracker"} <= set(places())


def test_a_round_s_line_is_on_the_list_and_shows_no_client() -> None:
    """Of `runs.observers.describe` itself: a field that is added there fails here."""
    observers = pytest.importorskip("fedlora.runs.observers")
    line = observers.describe(a_record(), padded_error=0.1, gauge={"glora": 0.0})
    assert unlisted("metrics.jsonl", line) == [] and {"attack", "defence"} <= set(line)
    line["privacy"] = {"epsilon": 1.0}
    assert set(filtered("metrics.jsonl", line)) == {"round", "server_rank", "privacy"}
    assert set(filtered("metrics.jsonl", line, public=True)) == {"round", "server_rank", "privacy", "metrics"}


def test_a_summary_is_on_the_list() -> None:
    """The keys as `runs.finishing` has them."""
    finishing = pytest.importorskip("fedlora.runs.finishing")
    keys = keys_of(finishing.results, "metric") | keys_of(finishing._own_results, "bytes")
    keys |= keys_of(finishing.finish, "exports") | {"attack", "defence"}
    listed = {item.name.split(".")[0] for item in items("summary.json")}
    assert keys <= listed and len(keys) > 15
    for place in ("summary.json", "metrics.jsonl", "manifest.json"):
        assert fate_of(place, "attack") == "dropped" and fate_of(place, "defence") in ("dropped", None)


def test_a_manifest_is_on_the_list() -> None:
    """The keys as `runs.manifest` and `runs.preparation` have them; clients' data leave no trace."""
    manifest = pytest.importorskip("fedlora.runs.manifest")
    preparation = pytest.importorskip("fedlora.runs.preparation")
    inputs = pytest.importorskip("fedlora.runs.inputs")
    keys = keys_of(manifest.manifest, "config_digest") | keys_of(manifest.code_facts, "commit")
    keys |= keys_of(preparation, "evaluation_target")
    listed = {item.name.split(".")[0] for item in items("manifest.json")}
    assert keys <= listed | {"data"} and {"cut", "copies", "versions", "model"} <= keys
    data = {f"data.{key}" for key in keys_of(manifest.manifest, "label_counts") | keys_of(inputs.data_facts, "train")}
    data |= {"data.own_test", "data.template"}
    assert all(fate_of("manifest.json", name) is not None for name in data)
    facts = {
        "data": {"train": {"a": {"examples": 5}}, "labels": ["x"], "label_counts": {"a": [1]}, "test": {}},
        "seed": 1,
    }
    assert unlisted("manifest.json", facts) == []
    assert filtered("manifest.json", facts) == {"data": {"labels": ["x"]}, "seed": 1}
    assert filtered("manifest.json", facts, public=True)["data"] == {"labels": ["x"], "test": {}}


def test_a_card_is_on_the_list() -> None:
    """The fields of its template."""
    card = pytest.importorskip("fedlora.runs.card")
    names = set(re.findall(r"(?<!{){(\w+)}(?!})", card._TEMPLATE))
    listed = {item.name.split(".")[0] for item in items("card")}
    assert names <= listed and len(names) > 15
    assert fate_of("card", "examples") == "dropped"


def test_what_a_tracker_is_told_is_on_the_list() -> None:
    tracking = pytest.importorskip("fedlora.runs.tracking")
    observers = pytest.importorskip("fedlora.runs.observers")
    told = tracking.numbers(observers.describe(a_record(), padded_error=0.1))
    told |= tracking.numbers_of_test({"accuracy": 0.5}, best=True) | tracking.numbers_of_test(
        {"accuracy": 0.5}, best=False
    )
    scores = {"site_metrics": {"a": {"accuracy": 0.5}}, "site_mean": {"accuracy": 0.5}, "norms": {"a": 1.0}}
    told |= tracking.numbers({**scores, "seconds": 1.0})  # of a federation
    assert unlisted("tracker", told) == [] and {"loss/a", "site/a/accuracy", "norm/a", "seconds"} <= set(told)
    assert set(filtered("tracker", told)) == {"server_rank"}
    assert set(filtered("tracker", told, public=True)) == {
        "server_rank", "metrics/accuracy", "test/accuracy", "test_best/accuracy",
    }  # fmt: skip
    private = {**observers.describe(a_record()), **scores, "privacy": {"epsilon": 1.0, "epsilon_planned": 8.0}}
    spent = {"privacy/epsilon", "privacy/epsilon_planned"}
    assert set(tracking.numbers(private)) == {"server_rank", "metrics/accuracy", *spent}


def test_a_download_is_on_the_list() -> None:
    names = {field.name for field in fields(Download)} | {field.name for field in fields(Adapter)}
    listed = {part for item in items("download") for part in item.name.split(".")}
    assert names <= listed


def test_what_the_engine_knows_of_a_round_is_on_the_list() -> None:
    """A record's fields, for the screen; state and uploads are nobody's to see."""
    names = {field.name for field in fields(RoundRecord)} - {"state", "uploads"}
    assert names <= {item.name for item in items("screen")}
    assert {field.name for field in fields(RunState)} == {"round", "server", "clients"}  # a checkpoint: secret
    assert fate_of("folder", "checkpoints") == "secret"


def diagnostics(name: str) -> Mapping[str, Any]:
    server = Server(build(name))
    lora = LoRA(torch.zeros(6, 2), torch.ones(2, 5) + torch.eye(2, 5))
    state = server.init(Adapter({"q": lora}))
    uploads = []
    for client in (Client("a", 2), Client("b", 2)):
        adapter = receive(server.download(state, client), None)
        trained = adapter.map(lambda t: t + 0.1 * torch.ones_like(t))
        uploads.append(Upload(client, 5, send(trained, server.roles(state))))
    return server.diagnostics(server.aggregate(state, uploads))


@pytest.mark.parametrize("name", ["glora", "svd", "flexlora", "ffa-lora"])
def test_a_method_s_numbers_are_on_the_list(name: str) -> None:
    """Of a round of each method that can be private; what was measured on uploads is dropped."""
    assert name in METHODS
    found = diagnostics(name)
    assert unlisted("summary.json", {"diagnostics": found}) == []
    assert unlisted("diagnostics", found["q"]) == []
    left = filtered("summary.json", {"diagnostics": found})["diagnostics"]["q"]
    assert set(left) <= {"rank", "components", "server_rank", "singular_values", "approximation", "deviations"}


def test_a_federation_s_summary_is_on_the_list() -> None:
    """The keys as `flower.rounds.finishing` has them."""
    finishing = pytest.importorskip("fedlora.flower.rounds.finishing")
    common = keys_of(pytest.importorskip("fedlora.runs.finishing").results, "metric") | {"defence"}
    listed = {item.name.split(".")[0] for item in items("federation summary.json")}
    assert keys_of(finishing._summary, "site_test") | common <= listed


# ---- the filter ------------------------------------------------------------------------------------------------------


def test_what_is_not_on_the_list_is_not_written() -> None:
    values = {"round": 1, "surprise": 2, "losses": {"a": 1.0}}
    assert filtered("metrics.jsonl", values) == {"round": 1}
    assert filtered("metrics.jsonl", values, blank=True) == {"round": 1, "losses": {}}  # and no surprise
    assert unlisted("metrics.jsonl", values) == ["surprise"]
    assert fate_of("metrics.jsonl", "surprise") is None


def test_inside_tables_too() -> None:
    """A module's name with dots is one name."""
    found = {"diagnostics": {"layer.0.q": {"rank": 3, "captured": 0.9, "novel": 1}}}
    assert filtered("summary.json", found) == {"diagnostics": {"layer.0.q": {"rank": 3}}}
    assert unlisted("summary.json", found) == ["diagnostics.layer.0.q.novel"]
    assert filtered("summary.json", found, blank=True)["diagnostics"]["layer.0.q"] == {"rank": 3, "captured": None}
    assert filtered("summary.json", {"diagnostics": 5}) == {}  # no table where one is expected
    assert unlisted("summary.json", {"diagnostics": 5}) == ["diagnostics"]
    assert filtered("manifest.json", {"data": None}) == {"data": None}


def test_an_unknown_place_is_refused() -> None:
    for ask in (lambda: filtered("letter", {}), lambda: unlisted("letter", {}), lambda: fate_of("letter", "x")):
        with pytest.raises(HyperparameterError, match="no place 'letter'"):
            ask()


def test_secrets_never_pass() -> None:
    """Whatever the options: over the whole list."""
    for item in RELEASES:
        if item.fate not in RELEASED and "*" not in item.name:
            value: Any = 5
            for name in reversed(item.name.split(".")):
                value = {name: value}
            assert "5" not in str(filtered(item.place, value, public=True, blank=True)), item
