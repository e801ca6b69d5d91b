"""`fedlora.hf`: a script's own trainer in a federation. Kinds of evidence: oracle (our own loop on equal settings gives
the same losses; peft beside the base gives the same logits), end to end (scripts as programs).
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from fedlora import Adapter, AdapterSpec, Client, Server, build, read_adapter
from fedlora.core.messages import Download
from fedlora.core.trainer import Trained
from fedlora.data import TextData
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.hf import federate, hand_back
from fedlora.runs.config import load_config
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.encode import encode
from fedlora.training.loop import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.round_folder import VARIABLE, RoundFacts, RoundFolder, trained_parts
from fedlora.training.settings import LoRASettings, TrainSettings
from support.local_training import drawn
from support.tiny_models import bert, llama, logits
from support.training_data import LABELS, classification, save_encoder, save_model, tokenizer
from support.worked_examples import python_blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),  # of TRL's own settings
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),  # of a script's own Trainer
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),  # of torch.compile's own imports
]
LR, STEPS, SIZE, ROUNDS = 5e-3, 4, 12, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bert"), bert(), classifies=True)


@pytest.fixture
def data() -> dict[str, TextData]:
    return {"a": classification(SIZE, 0), "b": classification(SIZE, 1)}


def model_of(base: Path, rank: int = 8) -> Any:
    names = dict(enumerate(LABELS))
    network = AutoModelForSequenceClassification.from_pretrained(
        base, id2label=names, label2id={v: k for k, v in names.items()}, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
    )  # fmt: skip
    return get_peft_model(
        network, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["query", "value"], task_type="SEQ_CLS")
    )


def trainer_of(model: Any, examples: TextData, out: Path, **more: Any) -> Trainer:
    rows = [dict(row) for row in encode(examples, tokenizer(classifies=True), max_length=16)]
    settings = {
        "per_device_train_batch_size": SIZE, "max_steps": STEPS, "learning_rate": LR, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    args = TrainingArguments(str(out), **{**settings, **more})
    return Trainer(
        model, args, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer(classifies=True))
    )  # fmt: skip


class InThisProcess:
    """`core.trainer.Trainer`: each round as a program's, with its folder, but by a trainer made here."""

    def __init__(self, make: Callable[[str], Trainer], spec: AdapterSpec, folder: Path) -> None:
        self.make, self.spec, self.folder = make, spec, folder

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        name = download.client.id
        folder = RoundFolder(self.folder / f"{name}-{download.round}")
        folder.path.mkdir()
        facts = RoundFacts(
            client=name, round=download.round + 1, rounds=ROUNDS, scaling=2.0, trains=trained_parts(download.roles)
        )  # fmt: skip
        facts = folder.write(facts, adapter, self.spec)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(VARIABLE, str(folder.path))
            federate(self.make(name)).train()
        made, said = folder.read_result(adapter, facts)
        return Trained(made, said.examples, said.loss, position)


@pytest.mark.parametrize("method", ["glora", "fedex-lora"])
def test_three_rounds_of_a_trainer_have_the_losses_of_our_own_loop(
    base: Path, data: dict[str, TextData], tmp_path: Path, method: str
) -> None:
    """Equal settings: batches of all examples, no dropout, AdamW without decay is Adam, a constant rate, clipping at 1.
    Then only the order of sums differs. The methods move ranks (2 and 4 of a model of 8), and the base.
    """
    ranks = {"a": 2, "b": 4} if method == "glora" else {"a": 4, "b": 4}
    server, clients = Server(build(method)), [Client(name, rank) for name, rank in ranks.items()]
    ours = AdaptedModel.load(
        base, "sequence-classification", LoRASettings(target_modules=["query", "value"]), labels=LABELS, dropout=0.0
    )  # fmt: skip
    seed_adapter, spec = ours.seed_adapter(4, seed=0)
    settings = TrainSettings(learning_rate=LR, max_steps=STEPS, batch_size=SIZE, max_length=16)
    local = LocalTrainer(ours, data, settings, seed=0)
    theirs = InThisProcess(lambda name: trainer_of(model_of(base), data[name], tmp_path), spec, tmp_path)
    expected = [dict(r.losses) for r in simulate(server, clients, local, start(server, seed_adapter), rounds=ROUNDS)]
    found = list(simulate(server, clients, theirs, start(server, seed_adapter), rounds=ROUNDS))
    for record, losses in zip(found, expected, strict=True):
        assert record.losses == pytest.approx(losses, abs=2e-5), record.round
    assert found[-1].loss < found[0].loss - 0.05  # it learns
    assert {u.num_examples for u in found[-1].uploads} == {SIZE}


# ---- a script as the program -----------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[1] / "examples" / "keep-your-trainer"
TARGETS = {"classify": ["query", "value"], "loop": ["q_proj", "v_proj"], "chat": ["q_proj", "v_proj"]}


class Site:
    """A client's machine: a small base model, data for an example script, and a round of rank 4 at scaling 1."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.script = folder, script
        self.task = "sequence-classification" if script == "classify" else "causal-lm"
        words = [f"w{k} w{k + 1} w{k + 2}" for k in range(12)]
        if script == "classify":
            save_encoder(folder / "base")
            rows = [{"text": text, "label": "urgent" if k % 2 else "calm"} for k, text in enumerate(words)]
        else:
            save_model(folder / "base", llama(), classifies=False)
            end = "{% if m['role'] == 'assistant' %}[EOS]{% endif %}"
            template = "{% for m in messages %}{{ m['content'] }} " + end + "{% endfor %}"
            (folder / "base" / "chat_template.jinja").write_text(template)
            rows = [{"prompt": text, "response": "w9"} for text in words]
            if script == "chat":
                turns = (("user", "prompt"), ("assistant", "response"))
                rows = [{"messages": [{"role": r, "content": row[c]} for r, c in turns]} for row in rows]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        labels = ("calm", "urgent") if script == "classify" else ()
        self.model = AdaptedModel.load(
            folder / "base", self.task, LoRASettings(target_modules=TARGETS[script], scaling=1.0), labels=labels
        )

    def round(
        self, number: int = 1, moved: bool = False, frozen: str = "", moving: bool = False, labels: Sequence[str] = ()
    ) -> tuple[RoundFolder, RoundFacts, Adapter]:
        """moving: the method changes the base in some round; moved: it has."""
        adapter, spec = self.model.seed_adapter(4, seed=number)
        adapter = replace(adapter, base={})
        if moved:
            adapter = replace(adapter, base=drawn(adapter, 2, seed=3, size=0.5).modules)
        folder = RoundFolder(self.folder / f"round{number}")
        folder.path.mkdir(exist_ok=True)
        facts = RoundFacts(
            client="acme", round=number, rounds=3, scaling=1.0, moves_base=moving or moved,
            trains=[part for part in ("B", "A", "heads") if part != frozen], labels=list(labels),
        )  # fmt: skip
        return folder, folder.write(facts, adapter, spec), adapter

    def play(self, monkeypatch: pytest.MonkeyPatch, folder: RoundFolder | None) -> dict[str, Any]:
        """Run the script, in this process: alone, or as the program of a round. Its globals."""
        monkeypatch.chdir(self.folder)
        monkeypatch.setattr(sys, "argv", [self.script, "--model", "base", "--data", "data.jsonl"])
        monkeypatch.setenv("HF_DATASETS_CACHE", str(self.folder / "cache"))
        monkeypatch.delenv(VARIABLE, raising=False)
        if folder is not None:
            monkeypatch.setenv(VARIABLE, str(folder.path))
        return runpy.run_path(str(EXAMPLES / f"{self.script}.py"))


@pytest.mark.parametrize("script", ["classify", "loop", "chat"])
def test_a_posted_script_runs_alone_and_as_a_client(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Alone it leaves an adapter of its own rank, 8. Started with a round's folder it trains the round's adapter of
    rank 4, from the round's start, and leaves examples and loss; its own output is as before."""
    pytest.importorskip("datasets")
    if script == "chat":
        pytest.importorskip("trl")
    site = Site(tmp_path, script)
    site.play(monkeypatch, None)
    alone, _ = read_adapter(tmp_path / f"{script}-adapter")
    assert set(alone.ranks.values()) == {8}

    folder, facts, begun = site.round(2)
    site.play(monkeypatch, folder)
    made, said = folder.read_result(begun, facts)
    assert set(made.ranks.values()) == {4} and said.examples == 12 and 0 < said.loss < 10
    for name, lora in begun.modules.items():  # a few small steps from the start, not from a new draw
        moved = float((made.modules[name].A - lora.A).norm() / lora.A.norm())
        assert moved < 0.3, name
        assert bool(made.modules[name].B.any())
    assert "fedlora: round 2 of 'acme', rank [4], scaling 1" in capfd.readouterr().err
    assert set(read_adapter(tmp_path / f"{script}-adapter")[0].ranks.values()) == {4}


def of_two_classes(folder: Path, **named: Any) -> Any:
    """The classify site's base with LoRA, as a script makes it."""
    network = AutoModelForSequenceClassification.from_pretrained(folder / "base", **(named or {"num_labels": 2}))
    return get_peft_model(network, LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS"))


def trained_a_little(model: torch.nn.Module) -> None:
    """One B of it."""
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).add_(1.0)


def test_the_base_of_a_round_is_what_peft_makes_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """base/ merged by peft, then start/ loaded by peft: the model on which `federate` trains says the same."""
    site = Site(tmp_path, "loop")
    folder, facts, begun = site.round(1, moved=True, frozen="A")
    assert facts.base is not None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    unmoved = logits(plain)
    merged = PeftModel.from_pretrained(plain, folder.base).merge_and_unload()
    expected = logits(PeftModel.from_pretrained(merged, folder.start).eval())
    assert float((expected - unmoved).abs().max()) > 0.1

    monkeypatch.setenv(VARIABLE, str(folder.path))
    mine = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(target_modules=TARGETS["loop"])
    )  # fmt: skip
    federate(mine)
    torch.testing.assert_close(logits(mine.eval()), expected, rtol=0, atol=1e-5)
    assert {n.split(".")[-3] for n, p in mine.named_parameters() if p.requires_grad} == {"lora_B"}
    trained_a_little(mine)
    hand_back(mine, examples=12, loss=0.5)
    made, said = folder.read_result(begun, facts)
    assert said.base == facts.base and made.base == begun.base
    for name, lora in begun.modules.items():  # what was not trained has the same bits
        assert torch.equal(made.modules[name].A, lora.A)


def test_what_cannot_be_federated_is_refused_by_name(
    base: Path, data: dict[str, TextData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, "classify")
    folder, _, _ = site.round(1)
    monkeypatch.setenv(VARIABLE, str(folder.path))
    one = trainer_of(model_of(base), data["a"], tmp_path)
    with pytest.raises(AdapterFormatError, match=r"classifier.bias: the model has shape \(3,\), but the adapter"):
        federate(one)  # three classes, and the federation has two
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    with pytest.raises(ConfigError, match=r"trains a BertForSequenceClassification. Wrap it with peft.get_peft_model"):
        federate(trainer_of(network, data["a"], tmp_path))
    few = get_peft_model(network, LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(ConfigError, match=r"adapts query \(1 module\), .* query, value \(2 modules\)"):
        federate(trainer_of(few, data["a"], tmp_path))
    lora = LoraConfig(target_modules=["query"])
    both = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base, num_labels=3), lora)
    both.add_adapter("two", lora)
    both.base_model.set_adapter(["default", "two"])
    with pytest.raises(ConfigError, match=r"needs one active adapter; the model has \['default', 'two'\]"):
        federate(both)
    with pytest.raises(ConfigError, match=r"takes a transformers.Trainer or a PEFT model; got a dict"):
        federate({})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP and DeepSpeed shard the adapter"):
        federate(of_two_classes(tmp_path))


def test_classes_in_another_order_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads of different meanings would be averaged. Who does not name the classes is told their order."""
    folder, _, _ = Site(tmp_path, "classify").round(1, labels=["calm", "urgent"])
    monkeypatch.setenv(VARIABLE, str(folder.path))
    with pytest.raises(ConfigError, match=r"\['urgent', 'calm'\].*0 = 'calm', 1 = 'urgent'"):
        federate(of_two_classes(tmp_path, id2label={0: "urgent", 1: "calm"}))
    federate(of_two_classes(tmp_path, id2label={0: "calm", 1: "urgent"}))
    assert "0 = 'calm'" not in capsys.readouterr().err
    federate(of_two_classes(tmp_path))
    assert "0 = 'calm', 1 = 'urgent'" in capsys.readouterr().err


def test_each_round_draws_by_seeds_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 3 is two beyond the script's seeds: of a trainer, of its sampler if that has one of its own, of a loop."""
    site = Site(tmp_path, "classify")
    monkeypatch.setenv(VARIABLE, str(site.round(3)[0].path))
    model = of_two_classes(tmp_path)
    args = TrainingArguments(str(tmp_path / "out"), seed=7, data_seed=5, report_to="none", use_cpu=True)
    trainer = federate(Trainer(model, args))
    assert (torch.initial_seed(), trainer.accelerator.dataloader_config.data_seed) == (9, 7)
    torch.manual_seed(1)
    federate(model)
    assert torch.initial_seed() == 3


def test_resuming_a_checkpoint_of_another_round_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    site = Site(tmp_path, "classify")
    folder, _, _ = site.round(1)
    trainer = site.play(monkeypatch, folder)["trainer"]
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_a_dpo_trainer_is_federated_and_refuses_a_moving_reference_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO compares with the base model under its adapter; methods that move the base would move the reference. That is
    known in the first round, where the base has not moved yet; a reference of one's own does not move."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    site = Site(tmp_path, "loop")
    rows = [{"prompt": f"w{k} w1", "chosen": "w9", "rejected": "w8"} for k in range(8)]

    def trainer(**more: Any) -> Any:
        args = trl.DPOConfig(str(tmp_path / "out"), max_steps=2, report_to="none", bf16=False, use_cpu=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS["loop"], task_type="CAUSAL_LM")
        return trl.DPOTrainer(
            model, args=args, train_dataset=Dataset.from_list(rows), peft_config=lora,
            processing_class=tokenizer(classifies=False), **more,
        )  # fmt: skip

    folder, facts, begun = site.round(1)
    monkeypatch.setenv(VARIABLE, str(folder.path))
    federate(trainer()).train()
    _, said = folder.read_result(begun, facts)
    assert said.examples == 8 and 0.3 < said.loss < 1.2  # log 2 = 0.69 at the start
    for number, moves in ((1, {"moving": True}), (2, {"moved": True}), (3, {"moving": True})):
        moving, _, _ = site.round(number, **moves)
        monkeypatch.setenv(VARIABLE, str(moving.path))
        with pytest.raises(ConfigError, match=r"DPOTrainer .* method moves the base .* ref_model"):
            federate(trainer())


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_a_compiled_model_must_have_trained_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's wrappers are taken off; where they are inside the model and change names, torch.compile is named. Nothing
    is compiled here: that happens at the first forward."""
    site = Site(tmp_path, "classify")
    folder, facts, begun = site.round(1)
    monkeypatch.setenv(VARIABLE, str(folder.path))
    model: Any = torch.nn.DataParallel(torch.compile(of_two_classes(tmp_path)))
    federate(model)
    with pytest.raises(ConfigError, match="nothing was trained"):  # as if the optimiser had been made before `federate`
        hand_back(model, examples=3, loss=0.25)
    assert not folder.result_facts.exists()
    trained_a_little(model)
    hand_back(model, examples=3, loss=0.25)
    made, said = folder.read_result(begun, facts)
    assert (said.examples, said.loss) == (3, 0.25)
    assert all(torch.equal(made.modules[name].A, lora.A) for name, lora in begun.modules.items())
    regions: Any = of_two_classes(tmp_path)
    layers = regions.base_model.model.bert.encoder.layer
    layers[0] = torch.compile(layers[0])
    with pytest.raises(ConfigError, match=r"wrapped by torch.compile"):
        federate(regions)


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_speaks_and_hands_back(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RANK is how torchrun numbers them; each one trains the same model."""
    folder, _, _ = Site(tmp_path, "classify").round(1)
    monkeypatch.setenv(VARIABLE, str(folder.path))
    monkeypatch.setenv("RANK", rank)
    model = federate(of_two_classes(tmp_path))
    trained_a_little(model)
    hand_back(model, examples=3, loss=0.5)
    assert folder.result_facts.exists() == ("fedlora: round 1" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.exhaustive
def test_torchrun_with_two_processes_gives_one_result(tmp_path: Path) -> None:
    """On the CPU, of all examples, from the script as it is posted."""
    pytest.importorskip("datasets")
    site = Site(tmp_path, "classify")
    folder, facts, begun = site.round(1)
    text = (EXAMPLES / "classify.py").read_text()
    text = text.replace('report_to="none"', 'report_to="none", use_cpu=True, ddp_backend="gloo"')
    (tmp_path / "script.py").write_text(text)
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    env = {**os.environ, VARIABLE: str(folder.path), **cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py",
         "--model", "base", "--data", "data.jsonl"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-3000:]
    made, said = folder.read_result(begun, facts)
    assert said.examples == 12 and all(bool(lora.B.any()) for lora in made.modules.values())
    assert launched.stderr.count("fedlora: round 1 of 'acme'") == 1


# ---- the page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "keep-your-trainer.md"


def test_the_pages_program_needs_peft_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block for any program, on a round whose base has moved: what it leaves counts, and no name of fedlora is in
    it. Its stand-in for training adds 1 to each B."""
    (block,) = (text for text in python_blocks(PAGE) if VARIABLE in text)
    assert "fedlora" not in block.replace(VARIABLE, "")
    site = Site(tmp_path, "loop")
    folder, facts, begun = site.round(1, moved=True)

    def train(model: Any, data: object) -> tuple[int, float]:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    assert parameter.requires_grad
                    parameter += 1
        return 7, 0.25

    monkeypatch.setenv(VARIABLE, str(folder.path))
    given = {"load_base": lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "train": train}
    exec(compile(block, str(PAGE), "exec"), given)
    made, said = folder.read_result(begun, facts)
    assert (said.examples, said.loss) == (7, 0.25)
    for name, lora in begun.modules.items():
        assert torch.equal(made.modules[name].B, lora.B + 1) and torch.equal(made.modules[name].A, lora.A)


@pytest.mark.parametrize("script", ["chat", "classify", "loop"])
def test_each_script_has_its_line_and_a_config_that_loads(script: str, tmp_path: Path) -> None:
    """A trainer's script needs two lines of fedlora, a loop three; the config names the LoRA of the script."""
    text, config = (EXAMPLES / f"{script}.py").read_text(), load_config(EXAMPLES / f"{script}.toml")
    own = [line for line in text.splitlines() if re.search("fedlora|federate|hand_back", line)]
    assert len(own) == (3 if script == "loop" else 2)
    assert config.train.command == ["python", str(EXAMPLES / f"{script}.py"), "--data", "{data}"]
    assert config.lora.scaling == 2 and "r=8, lora_alpha=16" in text
    for said in (f"target_modules={json.dumps(config.lora.target_modules)}", f'default="{config.model.name}"'):
        assert said in text
