"""A plan beside what its runs do: examples, tokens, texts, answers and bytes, counted where the model is called.

Kind of evidence: *oracle*. The planned numbers come from data, seeds and shapes; the counted ones from every batch that
reaches the network and every parcel of the engine.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedlora.experiments.checks import problems
from fedlora.experiments.costs import Workloads
from fedlora.experiments.grid import Grid
from fedlora.experiments.measured import Paces, measured
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.runner import run_all
from fedlora.experiments.spec import load_experiment
from fedlora.runs.observers import diagnosed
from support.known_warnings import FUTURE_NAMES
from support.tiny_models import llama
from support.training_data import classification, instructions, rows, save_encoder, save_model

pytestmark = FUTURE_NAMES

COMMON = """title = "t"
question = "q"
[run.clients]
count = 4
ranks = {ranks}
[run.train]
batch_size = 4
steps = 0
epochs = 1.5
[run.run]
rounds = 3
participation = 0.5
[run.evaluate]
every = 3
{more}
[profiles.mini]
seeds = [0, 1]
"""
CLASSES = COMMON.replace("{more}", """clients_at_end = true
[run.model]
path = "model"
[run.data]
train = "train.jsonl"
max_length = 7
[axes.method]
GLoRA = { "method.name" = "glora" }
FFA = { "method.name" = "ffa-lora" }
""").replace("{ranks}", "[1, 2, 2, 3]")  # fmt: skip
WORDS = COMMON.replace("{more}", """metric = "rouge-l"
max_new_tokens = 3
samples = 2
[run.model]
path = "model"
task = "causal-lm"
[run.lora]
targets = ["q_proj", "v_proj"]
[run.data]
train = "train.jsonl"
template = "{prompt}"
max_length = 12
[axes.method]
FLoRA = { "method.name" = "flora" }
""").replace("{ranks}", '[2]\npartition = "iid"')  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What reaches the network, by a count around each call."""
    from fedlora.runs import samples
    from fedlora.training import loop, measure

    found: Counter[str] = Counter()
    for module, what in ((loop, "trained"), (measure, "scored")):

        def collate(examples: Any, *rest: Any, made: Any = module.collate, what: str = what) -> Any:
            batch = made(examples, *rest)
            found[what] += len(examples)
            found[f"tokens {what}"] += int(batch["attention_mask"].sum())
            return batch

        monkeypatch.setattr(module, "collate", collate)
    for module in (measure, samples):

        def greedy(model: Any, prompts: Any, made: Any = module.greedy, **more: Any) -> Any:
            found["answers"] += len(prompts)
            return made(model, prompts, **more)

        monkeypatch.setattr(module, "greedy", greedy)
    return found


def grid(folder: Path, text: str) -> tuple[list[PlannedRun], Places]:
    (folder / "mine.toml").write_text(text)
    experiment = load_experiment(folder / "mine.toml")
    return Grid(experiment, "mini").runs, Places(folder / "results", folder / "work", None)


@pytest.mark.parametrize("kind", ["classes", "words"])
def test_what_is_planned_is_what_the_runner_does(kind: str, tmp_path: Path, counted: Counter[str]) -> None:
    """To the token and the byte; FLoRA's moved base is bounded."""
    if kind == "classes":
        save_encoder(tmp_path / "model")
        (tmp_path / "train.jsonl").write_text(rows(classification(60, 0, length=(3, 9))))
    else:
        save_model(tmp_path / "model", llama(), classifies=False)
        asked = instructions(60, 0)
        pairs = zip(asked.text, asked.responses or (), strict=True)
        lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in pairs]
        (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    runs, places = grid(tmp_path, CLASSES if kind == "classes" else WORDS)
    count = Workloads(None)
    work = [count.of(run.config) for run in runs]
    assert problems(runs, places, 1, count) == [] and not any(each.whys for each in work) and not counted
    outcomes = list(run_all(runs, places))
    assert [one.error for one in outcomes] == [None] * len(runs) and len(runs) == (4 if kind == "classes" else 2)
    assert sum(each.trained or 0 for each in work) == counted["trained"] > 0
    assert sum(each.tokens or 0 for each in work) == counted["tokens trained"] > 4 * counted["trained"]
    assert sum(each.scored or 0 for each in work) == counted["scored"] > 0
    assert sum(each.answers or 0 for each in work) == counted["answers"] and (counted["answers"] > 0) == (
        kind == "words"
    )
    done = places.finished()
    for run, each in zip(runs, work, strict=True):
        assert each.bytes is not None
        sent = done[run.digest].bytes["total"]
        assert sent == each.bytes.total if not each.bytes.most else sent <= each.bytes.total < 2 * sent


def test_a_pace_is_measured_and_nothing_is_written(tmp_path: Path) -> None:
    """Twice the rounds take more seconds; one kind of run is timed once. No folder appears."""
    save_encoder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(rows(classification(60, 0)))
    runs, _ = grid(tmp_path, CLASSES)
    before, paces, count = {*tmp_path.iterdir()}, Paces(None), Workloads(None)
    config = runs[0].config
    longer = config.model_copy(update={"run": config.run.model_copy(update={"rounds": 30})})
    seconds = [paces.seconds(each, count.of(each)) for each in (config, longer, runs[1].config)]
    assert (
        0 < (seconds[0] or 0) < (seconds[1] or 0) < 600 and len(paces._known) == 1 and {*tmp_path.iterdir()} == before
    )


def test_the_check_after_the_last_round_is_part_of_what_a_run_does_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a second here. Table 2's toy runs took a third longer than planned, because nobody had timed it."""

    def slow(*given: Any, last: bool, **more: Any) -> Any:
        time.sleep(1.0 if last else 0.0)
        return diagnosed(*given, last=last, **more)

    monkeypatch.setattr("fedlora.experiments.measured.diagnosed", slow)
    save_encoder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(rows(classification(60, 0)))
    runs, _ = grid(tmp_path, CLASSES)
    assert measured(runs[0].config, None).once > 1.0


CLASSIFIED = classification(60, 0)
WRONG = {  # cell -> its changes, and a word of what is wrong
    "typo": ({"train.lrr": 1}, "did you mean 'lr'"),
    "four bits": ({"model.four_bit": True, "model.device": "cpu"}, "four_bit needs a GPU"),
    "program": ({"train.command": ["no-such-program"]}, "'no-such-program' is no program"),
    "script": ({"train.command": ["python", "nowhere.py"]}, "'nowhere.py' is no file"),
    "targets": ({"lora.targets": ["nowhere"]}, "'nowhere'"),
    "metric": ({"evaluate.metric": "rouge-l"}, "'rouge-l' is for generated text"),
    "liars": ({"attack.kind": "sign-flip", "attack.clients": ["nobody"]}, "'nobody'"),
    "file": ({"data.validation": "gone.jsonl"}, "gone.jsonl does not exist"),
    "everybody": ({"server.quorum": 9}, "server.quorum = 9 can never be met"),
    "private": (
        {"privacy.clip": 1.0, "privacy.epsilon": 5.0, "privacy.delta": 0.01, "data.labels": CLASSIFIED.label_names},
        "[privacy]",
    ),
}


def test_a_place_that_cannot_be_written_is_told_before_anything_trains(tmp_path: Path, main: Any) -> None:
    """Before, each run was trained and then failed. A table of the paper that the file beside the experiments lacks is
    named."""
    save_encoder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(rows(CLASSIFIED))
    raw = tomllib.loads(CLASSES)
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({**raw, "paper": "mytable"}))
    (tmp_path / "file").write_text("")
    work = ["--work", str(tmp_path / "work")]
    found = main("experiment", "run", str(tmp_path / "mine.toml"), "--results", str(tmp_path / "file" / "r"), *work)
    assert found.code == 2 and "--results" in found.err and not (tmp_path / "work").exists()
    found = main("experiment", "table", str(tmp_path / "mine.toml"), "--results", str(tmp_path / "r"), *work)
    assert found.code == 2 and "mytable" in found.err and "paper_numbers.toml" in found.err


def test_all_that_is_wrong_is_one_list_the_same_of_plan_and_run(tmp_path: Path, main: Any) -> None:
    """One thing is wrong in each of these cells, on different levels; the plan counts the cell that is sound."""
    save_encoder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(rows(CLASSIFIED))
    cells = {"sound": ({}, ""), **WRONG}
    fixed = {key: value for key, value in tomllib.loads(CLASSES).items() if key not in ("axes", "profiles")}
    fixed["run"] = {**{name: fixed["run"][name] for name in ("model", "data")}, "clients": {"count": 4, "ranks": [2]}}
    what = {label: changes for label, (changes, _) in cells.items()}
    whole = {**fixed, "rows": "what", "axes": {"what": what}, "profiles": {"mini": {"seeds": [0, 1]}}}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(whole))
    where = [str(tmp_path / "mine.toml"), "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    run, plan = main("experiment", "run", *where), main("experiment", "run", *where, "--plan")
    assert (run.code, plan.code) == (2, 1) and not (tmp_path / "work").exists()
    lines, planned = run.err.splitlines(), plan.err.splitlines()
    assert lines[:-1] == planned[:-1] and len(lines) == len(WRONG) + 1 and f"{len(WRONG)} things are wrong" in lines[-1]
    for label, (_, words) in WRONG.items():
        assert [line for line in lines if words in line and (line.startswith(label) or label == "file")]
    assert "of 20 runs)" in next(line for line in plan.out.splitlines() if "│ mine" in line)  # 2 of 12 cells are none
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "config.json").unlink()  # which is told once, and not for each method
    bare = main("experiment", "run", *where, "--only", "what=sound")
    assert "2 things are wrong" in bare.err and "has no weights" in bare.err
