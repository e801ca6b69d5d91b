"""`fedlora run` with [privacy]: an epsilon that an outsider recomputes, and nothing else that tells of a client.

Kinds of evidence: *end-to-end* (real transformers, the command line in this process, dp-accounting asked directly),
*kill* (before steps on the disk).
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fedlora import Server, build
from fedlora.core import checkpoint
from fedlora.errors import BudgetSpent, CheckpointError, ConfigError, HyperparameterError
from fedlora.privacy import Budget, Ledger, Spending, accounting
from fedlora.runs.checks import check_private
from fedlora.runs.config import parse_config
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from fedlora.runs.private_releases import OnDisk, begin, private_folder, read_private, shown_config
from fedlora.runs.private_run import check_affordable
from fedlora.server.private import Private
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.simulation import simulate
from fedlora.training import LocalTrainer
from support.command_line import Said, invoke, options
from support.federations import EQUAL, seed_adapter
from support.kills import dying_at
from support.projects import configured, make_private_project
from support.states import content
from support.toy_trainer import Toy, clients


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    pytest.importorskip("opendp")
    pytest.importorskip("dp_accounting")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_private_project(tmp_path_factory.mktemp("private"))


class Finished:
    """One run of two rounds by the command line."""

    def __init__(self, place: Path) -> None:
        self.folder, self.ledger = RunFolder(place / "run"), place / "ledger.jsonl"
        self.said = invoke("run", place / "config.toml", "--set", "run.rounds=2", "--out", self.folder.path)


@pytest.fixture(scope="module")
def done(place: Path) -> Finished:
    return Finished(place)


def public_text(run: RunFolder) -> str:
    """All that may be handed out."""
    files = [path for path in run.path.rglob("*") if path.is_file()]
    secret = [run.path / "private", run.path / "checkpoints"]
    return "\n".join(p.read_text(errors="replace") for p in files if not any(p.is_relative_to(s) for s in secret))


# ---- what is promised ------------------------------------------------------------------------------------------------


def test_an_outsider_recomputes_epsilon_from_the_ledger(done: Finished) -> None:
    """The lines of the file as JSON, and dp-accounting itself: nothing of fedlora's accounting."""
    dp = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    lines = [json.loads(line) for line in done.ledger.read_text().splitlines()]
    events = [line for line in lines if line["kind"] == "event"]
    assert [event["round"] for event in events] == [1, 2]
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for event in events:
        assert event["sampling"] == 1.0
        accountant.compose(dp.GaussianDpEvent(event["noise_multiplier"]))
    epsilon = accountant.get_epsilon(1e-3)
    spent = done.folder.read_json("summary.json")["privacy"]
    assert spent["epsilon"] == pytest.approx(epsilon, rel=1e-3) == spent["epsilon_planned"]
    card = (done.folder.path / "adapter" / "README.md").read_text()
    shown = f"{math.ceil(spent['epsilon_planned'] * 1000) / 1000:.3f}"  # no less than it is
    assert f"epsilon {shown} at delta 0.001" in card and "one client's contribution" in card
    shown = json.loads(invoke("privacy", done.ledger, "--json").stdout)
    assert shown["epsilon"] == pytest.approx(epsilon, rel=1e-3) and shown["events"] == 2
    assert [line["privacy"]["ledger"]["events"] for line in done.folder.metrics()] == [1, 2]


def test_nothing_outside_the_secret_folders_tells_of_a_client(done: Finished, place: Path) -> None:
    """Counts, digests, losses, who took part: asked of the data, looked for in all public files."""
    content = prepare(configured(place, "run.rounds=2")).secrets or {}
    text = public_text(done.folder) + done.said.stdout + done.said.stderr
    for facts in content["data"]["train"].values():
        assert facts["sha256"] not in text
    assert str(content["data"]["label_counts"]["site-1"]) not in text
    assert not re.search(rf"{time.strftime('%Y-%m')}-\d\d|{str(time.time())[:5]}\d{{5}}", text), "when a round ended"
    for line in done.folder.metrics():
        assert not (line["losses"] or line["weights"] or line["refused"] or line["bytes"] or line["seconds"])
    assert all((done.folder.path / name).stat().st_mode & 0o077 == 0 for name in ("private", "checkpoints"))


def test_the_names_of_clients_files_do_not_leave(place: Path, tmp_path: Path) -> None:
    """Files with telling names, a tracker that writes the configuration, and a resume that writes it anew: searched for
    in every byte outside the secret folders, and in what the command says."""
    rows = (place / "train.jsonl").read_text().splitlines(keepends=True)
    names = {f"c{k}": f"ward-{k}-oncology.jsonl" for k in range(3)}
    for k, name in enumerate(names.values()):
        (tmp_path / name).write_text("".join(rows[k::3]))
    (tmp_path / "public.jsonl").write_text("".join(rows[:9]))
    text = (place / "config.toml").read_text().replace('"model"', f'"{place / "model"}"')
    files = "".join(f'{client} = "{name}"\n' for client, name in names.items())
    text = text.replace('train = "train.jsonl"\n', "").replace("min_examples = 4\n", "") + f"\n[data.clients]\n{files}"
    (tmp_path / "config.toml").write_text(text)
    tracked = ["--set", "run.report_to=['tensorboard']"] if importlib.util.find_spec("tensorboard") else []
    own = ["--set", "run.rounds=1", "--set", "data.validation=public.jsonl", "--set", "data.test=0.0", *tracked]
    command = ("run", tmp_path / "config.toml", *own, "--out", tmp_path / "run")
    told = [invoke(*command), invoke(*command, "--set", "run.workers=2", "--resume")]
    run = RunFolder(tmp_path / "run")
    assert run.read_json("config.json")["data"]["clients"] == dict.fromkeys(names, "withheld")
    assert shown_config(configured(place)).data.train == "withheld"
    assert run.read_json("config.json")["run"]["workers"] == 2
    assert not [p for p in run.path.rglob("*") if p.is_file() and b"oncology" in p.read_bytes()]
    assert not any("oncology" in said.stdout + said.stderr for said in told)


def test_a_copy_of_a_run_is_told_that_its_own_round_was_released(place: Path, tmp_path: Path) -> None:
    """The folder after its first round of two, copied, ended, and the copy resumed: it stops, and says why."""
    config = configured(place, "run.rounds=2", f"privacy.ledger={tmp_path / 'ledger.jsonl'}", "evaluate.every=2")
    whole, copy = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "copy")
    for record in execute(prepare(config), whole):
        if record.round == 1:
            shutil.copytree(whole.path, copy.path)
    for _ in execute(prepare(config), copy, resume=True):
        raise AssertionError("a second release of round 2")
    why = copy.read_json("summary.json")["stopped_early"]["why"]
    assert "1 more" in why and "copy" in why
    assert len(Ledger(tmp_path / "ledger.jsonl", "three toy sites").read().events) == 2


def test_who_fails_is_told_to_the_operator_and_to_no_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All clients fail in all rounds: the rounds take place, as noise, and are charged. A warning says who and why, in
    one line each; outside the secret folders no file does. What the screen says first does not depend on it."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more memory\n\x1b[2J")

    monkeypatch.setattr(LocalTrainer, "train", broken)
    bad = RunFolder(tmp_path / "bad")
    words = ("run.rounds=2", f"privacy.ledger={tmp_path / 'other.jsonl'}")
    said = invoke("run", place / "config.toml", *(x for w in words for x in ("--set", w)), "--out", bad.path)
    assert bad.read_json("summary.json")["rounds"] == 2
    assert "operator" in said.stderr
    assert caplog.text.count("does not count: RuntimeError: no more memory\\n\\x1b[2J") == 6
    assert "no more memory" not in public_text(bad)


def test_other_data_on_resume_name_no_client(done: Finished, place: Path, tmp_path: Path) -> None:
    """What a run that is not private tells, with counts."""
    folder = RunFolder(shutil.copytree(done.folder.path, tmp_path / "run"))
    rows = (place / "train.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(rows[1:]))
    prepared = prepare(configured(place, "run.rounds=2", f"data.train={tmp_path / 'other.jsonl'}"))
    with pytest.raises(CheckpointError) as told:
        next(execute(prepared, folder, resume=True))
    said = str(told.value)
    assert "other content" in said and "site-" not in said


def test_a_second_run_on_the_same_clients_has_to_ask_for_more(done: Finished, place: Path, main: Any) -> None:
    """The default budget is what the first run needed; the folder is another, the population the same."""
    before = done.ledger.read_bytes()
    said: Said = main("run", place / "config.toml", "--set", "run.rounds=2", "--out", place / "second")
    assert "the budget of ledger.jsonl is" in said.error() and "three toy sites" in said.error()
    assert done.ledger.read_bytes() == before and not (place / "second").exists()
    with pytest.raises(BudgetSpent, match=r"--budget 40 --delta 0\.001"):  # a decision, no setting
        check_affordable(prepare(configured(place, "run.rounds=2", "privacy.budget=40")))


def test_a_run_does_not_go_on_with_another_ledger_or_length(done: Finished, place: Path) -> None:
    done.folder.reopen()
    *lines, _ = done.ledger.read_text().splitlines(keepends=True)
    (place / "old.jsonl").write_text("".join(lines))  # a copy from before the last round
    prepared = prepare(configured(place, "run.rounds=2", f"privacy.ledger={place / 'old.jsonl'}"))
    with pytest.raises(CheckpointError, match=r"1 released rounds .*round 2.* missing from the ledger"):
        next(execute(prepared, done.folder, resume=True))
    with pytest.raises(CheckpointError, match=r"run\.rounds .*2.*5"):
        next(execute(prepare(configured(place, "run.rounds=5")), done.folder, resume=True))
    again = list(execute(prepare(configured(place, "run.rounds=2")), done.folder, resume=True))
    assert again == [] and done.folder.finished()


# ---- a run that stops ------------------------------------------------------------------------------------------------


def test_it_stops_before_the_budget_is_passed_and_leaves_what_it_has(place: Path, tmp_path: Path) -> None:
    """Somebody else charges the population after the first of three rounds: the run ends with that round's model."""
    ledger = tmp_path / "ledger.jsonl"
    config = configured(place, f"privacy.ledger={ledger}", "evaluate.every=3")
    folder, seen = RunFolder(tmp_path / "run"), 0
    for _ in execute(prepare(config), folder):
        seen += 1
        Ledger(ledger, "three toy sites").charge_earlier(Spending(0.5, 1))
    summary = folder.read_json("summary.json")
    assert seen == 1 and summary["rounds"] == 1 and "budget" in summary["stopped_early"]["why"]
    assert len(Ledger(ledger, "three toy sites").read().events) == 1
    assert (folder.path / "adapter" / "adapter_model.safetensors").exists()
    planned = accounting.epsilon(1.0, 3, 1e-3)
    assert summary["privacy"]["epsilon_planned"] == pytest.approx(planned), "of the planned T"
    list(execute(prepare(config), folder, resume=True))
    assert folder.read_json("summary.json")["rounds"] == 1, "nothing has changed"
    Ledger(ledger, "three toy sites").set_budget(Budget(60.0, 1e-3))
    assert [record.round for record in execute(prepare(config), folder, resume=True)] == [2, 3]
    told = folder.read_json("summary.json")["privacy"]
    assert [b["epsilon"] for b in told["ledger"]["budgets"]][1:] == [60.0]
    own = configured(place, f"privacy.ledger={ledger}", "evaluate.every=3", "privacy.budget=50")
    assert not list(execute(prepare(own), folder, resume=True)), "privacy.budget is free to differ"


class Toys:
    """A run of two rounds of toys in a folder, gone on with wherever it is: journal, ledger and checkpoints are the
    real ones. Nothing is accounted, so it is fast."""

    def __init__(self, home: Path) -> None:
        self.folder, self.trainer = RunFolder(home / "run"), Toy()
        self.ledger = Ledger(home / "ledger", "toys")

    def play(self) -> RunState:
        if not (self.folder.path / "private" / "run.json").exists():
            begin(self.folder)
        releases = OnDisk(private_folder(self.folder), read_private(self.folder)[0], self.ledger, None, 2, 1e-3)
        privacy = Private(1.0, 1.0, tuple(EQUAL), 4, releases, dims=4, sampling=0.5)
        server = Server(build("glora"), round=privacy)
        loaded = checkpoint.load_newest(self.folder.checkpoints, RunState, server.method.State)
        state = loaded[1] if loaded else start(server, seed_adapter(4))
        for record in simulate(server, clients(EQUAL), self.trainer, state, rounds=2):
            state = record.state
            checkpoint.save(self.folder.checkpoints, state.round, state, keep=2)
        return state

    def sums(self) -> dict[int, str]:
        """Round -> the digest of its noised sum in the journal."""
        paths = (self.folder.path / "private" / "journal").glob("*.noised")
        return {int(p.name.split("-")[1]): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


@pytest.mark.parametrize("stride", [9, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_killed_at_its_steps_it_releases_each_sum_once(tmp_path: Path, stride: int) -> None:
    """Every ninth step of a run's disk writes (every second in `make exhaustive`): what was released is neither drawn
    nor trained again, each is charged once, and the journal alone gives the same bits with nobody trained."""
    for step in itertools.count(1, stride):
        (home := tmp_path / str(step)).mkdir()
        with dying_at(step) as died:
            Toys(home).play()
        before, run = Toys(home).sums(), Toys(home)
        state = run.play()
        assert run.sums().keys() == {1, 2} and before.items() <= run.sums().items()
        assert not {t + 1 for _, t, _ in run.trainer.calls} & before.keys(), "what was released is not trained again"
        shutil.rmtree(run.folder.checkpoints)
        again = Toys(home)
        assert content(again.play().server) == content(state.server) and not again.trainer.calls
        assert {event.round: event.released for event in run.ledger.read().events} == run.sums()
        assert len(run.ledger.read().events) == 2
        if not died:
            break
    assert step > 54


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_says_signal_and_noise_and_writes_nothing(place: Path) -> None:
    """Oracle: sigma = z C / n in each entry of the mean (the grid adds a millionth), by hand for a 32 x 32 module."""
    words = ("privacy", "--plan", place / "config.toml", *options(("privacy.ledger=planned.jsonl", "run.rounds=4")))
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["sigma"] == pytest.approx(1.0 / 3, rel=1e-5) and found["size"] == 2 * 32 * 32 + 99
    part = found["parts"]["bert.encoder.layer.0.attention.self.query"]
    assert part["noise"] == pytest.approx(32 / 3, rel=1e-5) and part["signal"] == pytest.approx(1 / 2)
    assert part["strongest"] == pytest.approx(2 * math.sqrt(32) / 3, rel=1e-5)
    assert part["lost"] == pytest.approx(math.sqrt(32) / 3 / 2, rel=1e-5), "sigma (a b)^(1/4) / sqrt(T)"
    assert found["epsilon"] == pytest.approx(accounting.epsilon(1.0, 4, 1e-3))
    assert "head classifier.weight" in invoke(*words).stdout and not (place / "planned.jsonl").exists()
    section = configured(place).privacy
    assert section is not None
    asked = section.model_copy(update={"noise_multiplier": None, "epsilon": 8.0})
    assert asked.multiplier(20, 1.0) == pytest.approx(2.147, abs=2e-3), "trust.md: q = 1, T = 20, delta = 1e-3"
    assert asked.multiplier(20, 0.1) < asked.multiplier(20, 1.0), "a secret draw costs less"
    assert asked.model_copy(update={"budget": 20.0}).most(20, 1.0) == Budget(20.0, 1e-3), "what was given, not the cost"


def test_a_budget_that_leaves_nothing_and_a_delta_of_one_in_n_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="promises nothing"):
        prepare(configured(place, "privacy.delta=0.4"))
    config = configured(place, f"privacy.ledger={tmp_path / 'ledger'}", "privacy.noise_multiplier=500")
    with pytest.raises(ConfigError, match="leaves nothing"):
        next(execute(prepare(config), RunFolder(tmp_path / "run")))
    assert not (tmp_path / "run").exists() and not (tmp_path / "ledger").exists()


# ---- what a private run refuses --------------------------------------------------------------------------------------


def tables(place: Path, **changes: Any) -> dict[str, Any]:
    import tomllib

    raw = tomllib.loads((place / "config.toml").read_text())
    for key, value in changes.items():
        table, name = key.split("__")
        raw.setdefault(table, {})[name] = value
        if value is None:
            del raw[table][name]
    return raw


def test_a_method_whose_clients_keep_a_part_is_refused(place: Path) -> None:
    """A run scores and writes each client's own part, which no noise covers."""
    with pytest.raises(ConfigError, match="fedsa-lora every client keeps a part"):
        prepare(configured(place, "method.name=fedsa-lora", "clients.ranks=[4]", "clients.count=3"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"privacy__epsilon": 8.0}, "either privacy.epsilon"),
    ({"run__participation": 0.5, "run__report_to": ["wandb"]}, "when each round ended"),
    ({"run__keep_uploads": "last"}, "run.keep_uploads"),
    ({"run__readouts": True}, "run.readouts"),
    ({"train__command": ["x"]}, "train.command leaves"),
    ({"evaluate__clients_at_end": True}, "clients_at_end"),
    ({"evaluate__target": "clients"}, "evaluate.target"),
    ({"clients__test_fraction": 0.2}, "test_fraction"),
    ({"data__label_names": None}, "data.label_names is missing"),
    ({"server__gauge_stress": 10.0}, "gauge_stress"),
    ({"server__weighting": "examples"}, "most_examples"),
    ({"method__name": "hetlora"}, "votes of its own"),
    ({"method__rho": 0.5}, "svd with that rank"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_what_would_break_the_promise_is_refused(place: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, HyperparameterError), match=words.replace(".", r"\.")):
        config = parse_config(tables(place, **changes))
        check_private(config, config.server.build(config.method.build(), 0))


def test_clients_files_need_public_data_to_measure_on(place: Path) -> None:
    raw = {**tables(place), "data": {"clients": {"one": "a.jsonl", "two": "b.jsonl"}}, "clients": {"ranks": [2]}}
    config = parse_config(raw)
    with pytest.raises(ConfigError, match=r"data\.label_names .*; data\.validation = 0\.1 .*; data\.test = 0\.1 "):
        check_private(config, config.server.build(config.method.build(), 0))
