"""Train once, merge many: one training serves all mergers, each of which is what it is by hand. Kinds: oracle (dense
float64), end-to-end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlora.adapters.agreement import read_uploads
from fedlora.core.lora import Adapter, LoRA
from fedlora.data.text import TextData
from fedlora.errors import CheckpointError, ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.head_alone import head_alone
from fedlora.experiments.merger_settings import resolved, searched_as
from fedlora.experiments.mergers import _uploads
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.runner import run_all
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.tables import score_cells
from fedlora.runs.client_data import deal
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import classification, rows, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
ONCE = """
title = "Once"
question = "?"
rows = "method"
reference = "exact"
merged = "method"
metric = "test, last"

[run.model]
path = "model"
dropout = 0.0
[run.lora]
targets = ["query", "value"]
[run.server]
heads = "frozen"
[run.method]
name = "flexlora"
[run.clients]
count = 3
ranks = [2, 4, 4]
starts = "own"
[run.data]
train = "train.jsonl"
validation = 0.2
test = 0.2
max_length = 16
[run.train]
steps = 4
batch_size = 4
[run.run]
rounds = 1
threads = 1
keep_uploads = "last"
[run.evaluate]
metric = "loss"

[axes.setup]
one = {}
two = { "train.steps" = 3 }
[axes.method]
factors = { name = "padded-average" }
exact = { name = "flexlora" }
half = { name = "glora", rho = 0.5 }
shrunk = { control = "exact mean, shrunk", like = "half" }
least = { control = "least error", like = "half" }
nothing = { control = "no adapter" }
alone = { control = "clients alone" }
head = { control = "head alone" }
heads = { control = "heads apart" }

[tune]
values = [1e-2, 3e-2]
over = ["method"]
at = { setup = "one" }
seeds = [7]

[profiles.mini]
seeds = [0]
axes = { setup = ["two"] }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    save_encoder(folder / "model")
    (folder / "train.jsonl").write_text(rows(classification(150, 0)))
    (folder / "once.toml").write_text(ONCE)
    return folder


@pytest.fixture(scope="module")
def experiment(folder: Path) -> Experiment:
    return load_experiment(folder / "once.toml")


@pytest.fixture(scope="module")
def places(folder: Path, experiment: Experiment) -> Places:
    """After the search and the run that it decided."""
    places = Places(folder / "results", folder / "work", None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedlora.runs.manifest.commit_of_code", lambda: {"id": "a" * 40, "clean": True})
        for _ in range(2):
            for outcome in run_all(places.grid(experiment, "mini", unclean=True).missing, places):
                assert outcome.error is None
    return places


def kept(places: Places, run: PlannedRun) -> list[Path]:
    found = places.folder(run).newest_uploads()
    assert found is not None and found.round == 1
    return found.folders


def test_one_training_serves_all_mergers(experiment: Experiment, places: Places) -> None:
    """By hand: two values of the search on one seed are two runs, with nine mergers each; then at most two trainings
    (one for each value that a merger chose) give nine cells. Nothing is left to do."""
    search = Grid(experiment, "mini").searches
    assert len(search) == 2 and all(set(run.mergers) == set(experiment.axes["method"]) for run in search)
    done = places.finished(unclean=True)
    runs = Grid(experiment, "mini", done).runs
    assert len(runs) == 9 and len({run.digest for run in runs}) <= 2
    assert places.grid(experiment, "mini", unclean=True).missing == []
    assert len(done) == len(search) + len({run.digest for run in runs})
    cells = score_cells(Grid(experiment, "mini", done))
    assert {cell.cell["method"] for cell in cells} == set(experiment.axes["method"])
    assert all(len(cell.scores) == 1 and cell.metric == "loss" for cell in cells)


def test_a_new_merger_costs_no_training(folder: Path, experiment: Experiment, places: Places) -> None:
    """A label added later finds the run folder with its uploads: these are not written again."""
    later = (folder / "once.toml").read_text().replace("[tune]", 'quarter = { name = "glora", rho = 0.25 }\n[tune]')
    (folder / "later.toml").write_text(later)
    more = load_experiment(folder / "later.toml")
    todo = places.grid(more, "mini", unclean=True).missing
    assert {label for run in todo for label in run.mergers} == {"quarter"}
    written = [place.stat().st_mtime_ns for run in todo for place in kept(places, run)]
    assert all(outcome.error is None for outcome in run_all(todo, places))
    assert written == [place.stat().st_mtime_ns for run in todo for place in kept(places, run)]
    done = places.finished(unclean=True)
    assert all(run.result(done) is not None for run in todo)
    assert set(done[todo[0].digest].mergers) == {*experiment.axes["method"], "quarter"}, "the others stay"


def test_uploads_of_another_round_than_the_last_are_refused(
    experiment: Experiment, places: Places, tmp_path: Path
) -> None:
    run = Grid(experiment, "mini").searches[0]
    folder = RunFolder(shutil.copytree(places.folder(run).path, tmp_path / "run"))
    prepared = prepare(run.config)
    assert len(_uploads(prepared, folder)) == 3
    folder.append_metrics({**folder.metrics()[0], "round": 2}, folder.read_json("manifest.json")["run"])
    with pytest.raises(CheckpointError, match=r"2 rounds, .*uploads.*round 1 "):
        _uploads(prepared, folder)
    shutil.rmtree(folder.path / "uploads")
    with pytest.raises(CheckpointError, match="uploads none are kept"):
        _uploads(prepared, folder)


def test_changed_settings_are_another_merger(folder: Path, places: Places) -> None:
    """A label whose settings change is missing again, not read from what the old ones made."""
    (folder / "changed.toml").write_text((folder / "once.toml").read_text().replace("rho = 0.5", "rho = 0.4"))
    todo = places.grid(load_experiment(folder / "changed.toml"), "mini", unclean=True).missing
    assert {label for run in todo for label in run.mergers} == {"half", "shrunk", "least"}


def test_mergers_are_what_they_are_by_dense_algebra(experiment: Experiment, places: Places) -> None:
    """sum p_i B_i A_i of the stored uploads in float64: the exact mean's norm and error 0; factors by padded means; the
    shrunk mean has the norm of its like and the exact mean's direction; rank budget ceil(0.5 * 10) = 5; the least-error
    basis is no worse than GLoRA's at that rank, and Eckart and Young's optimum."""
    run = Grid(experiment, "mini").searches[0]
    facts = places.finished(unclean=True)[run.digest].mergers
    uploads, _ = read_uploads(kept(places, run))  # in the unit of Delta W: twice what travels
    total = sum(u.num_examples for u in uploads)
    means, padded, best = {}, {}, {}
    for name in uploads[0].adapter.modules:
        pairs = [(u.num_examples / total, *(t.double() for t in u.adapter.modules[name].factors)) for u in uploads]
        means[name] = sum(p * B @ A for p, B, A in pairs)
        B = sum(p * torch.nn.functional.pad(B, (0, 4 - B.shape[1])) for p, B, _ in pairs)
        A = sum(p * torch.nn.functional.pad(A, (0, 0, 0, 4 - len(A))) for p, _, A in pairs)
        padded[name] = B @ A
        best[name] = torch.linalg.svdvals(means[name])[5:]
    size = torch.cat([m.flatten() for m in means.values()]).norm() / 2
    off = torch.cat([(padded[n] - means[n]).flatten() for n in means]).norm() / 2
    assert facts["exact"].norm == pytest.approx(float(size), rel=1e-5) and facts["exact"].error < 1e-5
    assert facts["factors"].error == pytest.approx(float(off / size), rel=1e-4)
    assert facts["shrunk"].norm == pytest.approx(facts["half"].norm, rel=1e-5)
    assert facts["half"].rank == 5 and facts["least"].rank <= 5 and facts["exact"].rank == 10
    optimum = float(torch.cat(list(best.values())).norm() / 2 / size)
    assert facts["least"].error == pytest.approx(optimum, rel=1e-3) and facts["least"].error <= facts["half"].error
    assert facts["nothing"].norm == 0 and facts["nothing"].error == 1


def test_the_exact_merger_is_the_run_itself(experiment: Experiment, places: Places) -> None:
    """The run's own server is FlexLoRA: the merger `exact` has its score."""
    for run in Grid(experiment, "mini").searches:
        found = places.finished(unclean=True)[run.digest]
        exact = found.mergers["exact"]
        assert exact.test["loss"] == pytest.approx(found.test.last["loss"], rel=1e-5)
        assert exact.validation["loss"] == pytest.approx(found.validation.last["loss"], rel=1e-5)


def test_heads_apart_are_the_mean_of_each_clients_logits(experiment: Experiment, places: Places) -> None:
    """A head is linear, so the averaged head's logits are the weighted mean of the clients' logits: computed so here,
    by scikit-learn and a softmax by hand (three classes). Each client's own data, weights by number of examples."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    from fedlora.experiments.head_alone import _features

    run = Grid(experiment, "mini").searches[0]
    facts = places.finished(unclean=True)[run.digest].mergers["heads"]
    prepared = prepare(run.config)
    dealt = deal(run.config, None)
    test = TextData.concat(list(dealt.test.values()))
    logits, total = 0.0, sum(len(part) for part in dealt.parts.values())
    for part in dealt.parts.values():
        head = LogisticRegression(C=facts.strength, max_iter=1000).fit(_features(prepared, part), part.labels)
        logits = logits + len(part) / total * (_features(prepared, test) @ head.coef_.T + head.intercept_)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    right = chances[np.arange(len(test)), list(test.labels or ())]
    assert facts.test["loss"] == pytest.approx(float(-np.log(right).mean()), rel=1e-5)
    assert facts.test["accuracy"] == pytest.approx(float((chances.argmax(axis=1) == np.array(test.labels)).mean()))

    # Of a single client they are the head alone.
    (name, whole), *_ = dealt.parts.items()
    one = replace(dealt, parts={name: whole})
    assert head_alone(prepared, one, ["test"], apart={name: 7.0}) == head_alone(prepared, one, ["test"])


def test_a_client_that_lacks_a_class_has_no_head(experiment: Experiment, places: Places) -> None:
    prepared, dealt = (
        prepare(Grid(experiment, "mini").searches[0].config),
        deal(Grid(experiment, "mini").searches[0].config, None),
    )
    name, part = next(iter(dealt.parts.items()))
    single = replace(dealt, parts={name: part.select([k for k, y in enumerate(part.labels) if y == 0])})
    with pytest.raises(ConfigError, match=rf"client {name} .*no example of class 1"):
        head_alone(prepared, single, ["test"], apart={name: 1.0})


def test_own_starts_share_no_rows(experiment: Experiment, places: Places) -> None:
    """A of two clients is drawn apart; with a common start, after so few steps, it is nearly one matrix."""
    cosines = {}
    for starts in ("own", "common"):
        run = Grid(experiment, "mini").searches[0]
        config = run.config.model_copy(update={"clients": run.config.clients.model_copy(update={"starts": starts})})
        made = prepare(config)
        rows_of = []
        for client in made.clients[1:]:  # of rank 4 both
            from fedlora.client import begin_round
            from fedlora.core.messages import ClientMemory

            job = begin_round(made.server.download(made.server.init(made.seed_adapter), client), ClientMemory())
            trained = made.trainer.train(job.download, job.adapter, job.position)
            rows_of.append(torch.cat([m.factors[1].flatten() for m in trained.adapter.modules.values()]))
        cosines[starts] = float(torch.cosine_similarity(*rows_of, dim=0))
    assert cosines["common"] > 0.8 and abs(cosines["own"]) < 0.5, cosines


def test_controls_go_by_the_rate_of_what_they_are_held_against(experiment: Experiment, places: Places) -> None:
    done = places.finished(unclean=True)
    rate = {c["method"]: Grid(experiment, "mini", done).choice(c).value for c in experiment.cells("mini")}
    assert rate["shrunk"] == rate["least"] == rate["half"]
    assert rate["nothing"] == rate["alone"] == rate["head"] == rate["exact"]
    axis = experiment.axes["method"]
    assert searched_as(axis, "shrunk", "exact") == "half" and searched_as(axis, "head", "exact") == "exact"


@pytest.mark.parametrize(
    ("mergers", "says"),
    [
        ({"a": {"rho": 0.5}}, "'a' names no method"),
        ({"a": {"control": "magic"}}, "not a control: 'magic'"),
        ({"a": {"control": "no adapter", "like": "b"}, "b": {"name": "svd"}}, "takes control alone"),
        ({"a": {"control": "least error"}}, "takes control and like"),
        ({"a": {"control": "least error", "like": "b"}}, "which is not a method"),
        ({"a": {"control": "least error", "like": "b"}, "b": {"name": "svd"}}, "rank budget of a glora"),
        ({"a": {"name": "glora", "roh": 0.5}}, "roh"),
    ],
)
def test_wrong_mergers_are_refused(mergers: dict[str, dict[str, object]], says: str) -> None:
    with pytest.raises(Exception, match=says):
        resolved(mergers)


def test_runs_that_cannot_be_merged_are_refused(folder: Path) -> None:
    wrong = ONCE.replace('heads = "frozen"', "").replace("rounds = 1", "rounds = 2")
    (folder / "wrong.toml").write_text(wrong)
    with pytest.raises(ConfigError, match=r"need run.rounds = 1 and server.heads"):
        _ = Grid(load_experiment(folder / "wrong.toml"), "mini").searches
    (folder / "wrong.toml").write_text(ONCE.replace('merged = "method"', 'merged = "methods"'))
    with pytest.raises(ConfigError, match="'methods' is not an axis"):
        load_experiment(folder / "wrong.toml")


def test_own_starts_refuse_trained_adapters() -> None:
    from fedlora.training.local import own_start

    with pytest.raises(ConfigError, match="B != 0"):
        own_start(Adapter({"q": LoRA(torch.ones(3, 2), torch.ones(2, 4))}), 0, "a")
    fresh = Adapter({"q": LoRA(torch.zeros(3, 2), torch.zeros(2, 4))})
    A = own_start(fresh, 0, "a").modules["q"].factors[1]
    assert float(A.abs().max()) <= 0.5 and not torch.equal(A, own_start(fresh, 0, "b").modules["q"].factors[1])
    assert torch.equal(A, own_start(fresh, 0, "a").modules["q"].factors[1])


def added(folder: Path, name: str, more: str) -> Experiment:
    """The experiment with another label."""
    (folder / f"{name}.toml").write_text((folder / "once.toml").read_text().replace("[tune]", f"{more}\n[tune]"))
    return load_experiment(folder / f"{name}.toml")


def test_a_merger_of_other_code_has_that_code_s_commit(
    folder: Path, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training at commit a; a label of a changed checkout lands apart and changes no clean file; one of the clean
    commit c lands there, with both commits. Nothing is trained or measured again."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    mine = Places(copy / "results", copy / "work", None)
    before = {path.name: path.read_bytes() for path in mine.results.glob("*.jsonl")}
    old = dict(mine.finished())
    monkeypatch.setattr("fedlora.runs.execution.execute", lambda *_, **__: pytest.fail("run again"))
    monkeypatch.setattr("fedlora.runs.manifest.commit_of_code", lambda: {"id": "b" * 40, "clean": False})
    fifth = added(copy, "fifth", 'fifth = { name = "glora", rho = 0.2 }')
    todo = mine.grid(fifth, "mini", unclean=True).missing
    assert todo and all(outcome.error is None for outcome in run_all(todo, mine))
    assert before == {path.name: path.read_bytes() for path in mine.results.glob("*.jsonl")}
    settings = {"name": "glora", "rho": 0.2}
    for run in todo:
        assert mine.finished()[run.digest].merged("fifth", settings) is None
        changed = mine.finished(unclean=True)[run.digest].merged("fifth", settings)
        assert changed is not None and not changed.clean
        assert changed.commits(7) == ["aaaaaaa", "bbbbbbb with changes"]
    assert all(run.searching is False for run in mine.grid(fifth, "mini", unclean=True).missing), (
        "the search is done, changed or not"
    )

    monkeypatch.setattr("fedlora.runs.manifest.commit_of_code", lambda: {"id": "c" * 40, "clean": True})
    sixth = added(copy, "sixth", 'fifth = { name = "glora", rho = 0.4 }')  # the label of the other file, another merger
    todo = mine.grid(sixth, "mini", unclean=True).missing
    assert todo and all(outcome.error is None for outcome in run_all(todo, mine))
    for run in todo:
        clean = mine.finished()[run.digest]
        now, then = (clean.merged("fifth", {"name": "glora", "rho": rho}) for rho in (0.4, 0.2))
        assert now is not None and now.clean and now.commits(7) == ["aaaaaaa", "ccccccc"] and then is None
        kept = mine.finished(unclean=True)[run.digest]
        assert kept.merged("fifth", settings) is not None and kept.merged("half", {"name": "glora", "rho": 0.5})
        was = old[run.digest]
        assert (clean.test, clean.validation, clean.commit) == (was.test, was.validation, was.commit)
