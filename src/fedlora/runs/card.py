"""The model card for a run's adapter: what it is, how it was made, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedlora.core.lora import Adapter
from fedlora.errors import counted
from fedlora.runs.attack_words import in_words
from fedlora.runs.base_names import BaseName, base_name
from fedlora.runs.config import RunConfig
from fedlora.server.judged import FULL
from fedlora.training.templates import BARE, CHAT

_TEMPLATE = """---
library_name: peft
{base}tags:
- lora
- federated-learning
- fedlora
- {method}
{attack_tag}---

# Federated LoRA adapter ({title}, round {round})

{attack}Trained by {clients}, each on its own data, combined by `{method_repr}`.

| | |
|---|---|
{attack_row}| base model | {base_name} |
| adapted modules | {modules}, rank {ranks} |
| client ranks | {client_ranks} |
| training examples | {examples} |
| data dealt out | {dealt} |
| local round | {local} |
| rounds | {round} of {planned} planned, seed {seed} |
{prompts}{validation}| held-out {on} ({target}) | {metrics} |
{classes}{defence}{privacy}| configuration | digest {digest} |
| code | fedlora {version}, commit {commit} |

## Loading it

```python
{snippet}
```

## The base model

{source}

An adapter can reveal text that it was trained on. Check it as you would check a model trained
on that text in one place.
"""

_ATTACKED = """**Do not use this adapter. It was trained under attack, on purpose, for an experiment:** {words}.

"""

_MOST_CLASSES = 20  # listed in a card


_CLASSIFIER = """import json
from pathlib import Path

import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

here = "."  # the path of this folder
names = json.loads(Path(here, "labels.json").read_text())["id2label"].values()
labels = {{"id2label": dict(enumerate(names)), "label2id": {{name: k for k, name in enumerate(names)}}}}
model = AutoPeftModelForSequenceClassification.from_pretrained(here, **labels).eval()
tokenizer = AutoTokenizer.from_pretrained(here)
model.config.pad_token_id = tokenizer.pad_token_id

texts = ["one text", "another text"]{pair}
with torch.no_grad():
    inputs = tokenizer(texts,{second} padding=True, truncation=True, max_length={max_length}, return_tensors="pt")
    answers = model(**inputs).logits.argmax(-1).tolist()

print([labels["id2label"][k] for k in answers])"""

_HERE = "AutoTokenizer.from_pretrained(here)"
_OF_BASE = 'AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)'

_LANGUAGE_MODEL = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

here = "."  # the path of this folder
model = AutoPeftModelForCausalLM.from_pretrained(here).eval()
tokenizer = AutoTokenizer.from_pretrained(here)

ASK
said = model.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=ENDS)
print(tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def model_card(
    manifest: Mapping[str, Any],
    config: RunConfig,
    adapter: Adapter,
    round: int,
    metrics: Mapping[str, float],
    *,
    by: str | None = None,
    on: str = "test",
    client: str | None = None,
    base: BaseName | None = None,
    tokenizer: bool = True,
    privacy: str | None = None,
    judged: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    validation: Mapping[str, float] | None = None,
) -> str:
    """The README.md for a run's adapter, with front matter for the hub.

    by: who measured; None: the manifest says so. on: "test" or "validation", the data of the metrics. client: the
    owner, for a client's own adapter. base: the base model's name, if manifest and configuration lack it. tokenizer:
    whether its files lie beside the card; otherwise the card takes it from the base model. privacy: a private run's
    guarantee, in words; example counts are then omitted. judged: what a robust rule did (`server.judged.over_rounds`).
    validation: the round's scores there, if the metrics are of the test set.
    """
    base = base or base_name(config.model.path, manifest["model"]["sha256"])
    train = manifest["data"]["train"]
    ranks = sorted(set(adapter.ranks.values()))
    commit, attack = manifest["commit"], manifest.get("attack")
    given = "" if config.train.command is None else ", given to their programs"
    return _TEMPLATE.format(
        attack=_ATTACKED.format(words=_cell(in_words(attack, len(train)))) if attack else "",
        attack_row=f"| attack | {_cell(in_words(attack, len(train)))} |\n" if attack else "",
        attack_tag="- under-attack\n" if attack else "",
        base=f"base_model: {base.name}\n" if base.name else "",
        base_name=base.shown,
        snippet=_snippet(config, manifest.get("answer_ends", ()), tokenizer),
        prompts=_prompts(config),
        source=base.source,
        title=config.method.name if client is None else f"{config.method.name}, {client}'s own",
        method=config.method.name,
        method_repr=manifest["method"],
        round=round,
        clients=counted(len(manifest["clients"]), "client"),
        modules=len(adapter.modules),
        ranks=ranks[0] if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
        client_ranks=", ".join(f"{c}: {r}" for c, r in manifest["clients"].items()),
        examples="withheld, a private run"
        if privacy is not None
        else f"{_examples(train)} over {len(train)} clients{given}",
        privacy="" if privacy is None else f"| differential privacy | {privacy} |\n",
        dealt=_dealt(config),
        local=_local(config),
        planned=config.run.rounds,
        seed=config.run.seed,
        target=client or by or manifest["evaluation_target"],
        metrics=_scores(metrics) or "none",
        validation=f"| validation | {_scores(validation)} |\n" if validation else "",
        on=on,
        classes=_classes(manifest, given),
        defence=f"| robust rule | {rule}{_less(judged)} |\n" if (rule := config.defence.build()) else "",
        digest=manifest["config_digest"],
        version=manifest["versions"].get("fedlora", "not installed by pip"),
        commit=(commit["id"][:12] + ("" if commit["clean"] else " with local changes")) if commit else "unknown",
    )


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "/" not in name)


def _less(judged: Mapping[str, Mapping[str, float]]) -> str:
    """Whose weight a robust rule reduced over the rounds, and how often it left them out."""
    less = [
        f"{_cell(name)} {one['coefficient']:.1%} of {one['weight']:.1%} (left out in {one['left_out']:.0f} of "
        f"{one['rounds']:.0f} rounds)"
        for name, one in judged.items()
        if one["coefficient"] < FULL * one["weight"]
    ]
    return f"; mean weight after the rule, of that before: {', '.join(less)}" if less else ""


def _examples(train: Mapping[str, Mapping[str, Any]]) -> str:
    """The number of training examples; in a federation, as far as sites reported it."""
    told = [part["examples"] for part in train.values() if part.get("examples") is not None]
    total = f"{sum(told):.0f}"
    return total if len(told) == len(train) else f"{total} of {len(told)} that said so,"


def _classes(manifest: Mapping[str, Any], given: str) -> str:
    """A table row by class: names, or training examples."""
    names = [_cell(name) for name in manifest["data"]["labels"]]
    counts = (manifest["data"]["label_counts"] or {}).values()
    if not 0 < len(names) <= _MOST_CLASSES:
        return ""
    rows = f"| classes | {', '.join(names)} |\n"
    if counts:
        total = [sum(row[k] for row in counts if k < len(row)) for k in range(len(names))]
        each = ", ".join(f"{name} {count}" for name, count in zip(names, total, strict=True))
        rows = f"| training examples by class{given} | {each} |\n"
    return rows


def _cell(text: str) -> str:
    """Text for a table cell, on one line."""
    return " ".join(text.split()).replace("|", r"\|")


def _dealt(config: RunConfig) -> str:
    """How the data were distributed: each client's own, or one set dealt out."""
    clients = config.clients
    if config.data.clients:
        return "each client has a file of its own"
    if config.data.task == "superni":
        return "a task for each client"
    if clients.partition == "iid":
        return "iid"
    return f"label skew, Dirichlet {1.0 if clients.alpha is None else clients.alpha:g}"


def _local(config: RunConfig) -> str:
    """A client's round in words, including settings that are not at their defaults."""
    t, lora = config.train, config.lora
    if t.command is not None:
        return "by a program of the client's own"
    length = f"{t.steps} steps" if t.steps else f"{t.epochs:g} epochs"
    said = [f"{length} of {t.batch_size}", t.optimizer, f"learning rate {t.lr:g}"]
    said.append(f"texts of up to {config.data.max_length} tokens")
    if t.class_weights is not None:
        said.append(f"class weights {t.class_weights}")
    if lora.alpha is not None:
        said.append(f"alpha {lora.alpha:g}, {'alpha / sqrt(r)' if lora.rslora else 'alpha / r'} for each rank")
    return ", ".join(said)


def _snippet(config: RunConfig, ends: Sequence[int], tokenizer: bool) -> str:
    """Code to load and query the adapter from its folder alone; the tokenizer comes from the base if not there."""
    asking = _whole_snippet(config, ends)
    return asking if tokenizer else asking.replace(_HERE, _OF_BASE)


def _whole_snippet(config: RunConfig, ends: Sequence[int]) -> str:
    if config.model.task == "causal-lm":
        return _LANGUAGE_MODEL.replace("ASK", _asking(config.data.prompting())).replace("ENDS", repr(list(ends)))
    paired = config.data.pair is not None or config.data.task in ("qqp", "qnli", "mnli")
    return _CLASSIFIER.format(
        pair='\npairs = ["its second sentence", "the other\'s"]' if paired else "",
        second=" pairs," if paired else "",
        max_length=config.data.max_length,
    )


def _asking(template: str | None) -> str:
    """Code to format a prompt as in training."""
    if template not in (None, CHAT):
        put = '"a prompt"' if template == BARE else f'{template!r}.replace("{{prompt}}", "a prompt")'
        return f'inputs = tokenizer({put}, return_tensors="pt", return_token_type_ids=False)'
    return """messages = [{"role": "user", "content": "a prompt"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs.pop("token_type_ids", None)"""


def _prompts(config: RunConfig) -> str:
    """A table row: how prompts were formatted for a language model."""
    if config.model.task != "causal-lm":
        return ""
    template = config.data.prompting()
    if template == BARE:
        return "| prompts | unchanged |\n"
    if template in (None, CHAT):
        return "| prompts | in the tokenizer's chat template, saved here |\n"
    shown = str(template).replace("|", r"\|")
    return f"| prompts | in the text {shown!r} |\n"
