"""The model card for a run's adapter: what it is, how it was made, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedlora.core.lora import Adapter
from fedlora.errors import counted
from fedlora.runs.attack_words import in_words
from fedlora.runs.config import RunConfig
from fedlora.training.settings import Section
from fedlora.training.templates import BARE, CHAT

if TYPE_CHECKING:
    from fedlora.runs.exported import BaseName

_CARD = """---
library_name: peft
{front}tags:
- lora
- federated-learning
- fedlora
- {method}
{attack_tag}---

# Federated LoRA adapter ({title}, round {round})

{attack}Trained by {clients}, each on its own data, combined by `{method_repr}`.

| | |
|---|---|
{rows}

## Loading it

```python
{snippet}
```

## The base model

{source}

An adapter can reveal text that it was trained on. Check it as you would check a model trained
on that text in one place.
"""
_ATTACKED = "**Do not use this adapter. It was trained under attack, on purpose, for an experiment:** {}.\n\n"
_MOST_CLASSES = 20  # listed in a card

_CLASSIFIER = """import json
from pathlib import Path

import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

here = "."  # the path of this folder
names = json.loads(Path(here, "labels.json").read_text())["id2label"].values()
labels = {"id2label": dict(enumerate(names)), "label2id": {name: k for k, name in enumerate(names)}}
model = AutoPeftModelForSequenceClassification.from_pretrained(here, **labels).eval()
tokenizer = AutoTokenizer.from_pretrained(here)
model.config.pad_token_id = tokenizer.pad_token_id

texts = ["one text", "another text"]PAIRS
with torch.no_grad():
    inputs = tokenizer(texts,SECOND padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    answers = model(**inputs).logits.argmax(-1).tolist()

print([labels["id2label"][k] for k in answers])"""

_LANGUAGE_MODEL = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

here = "."  # the path of this folder
model = AutoPeftModelForCausalLM.from_pretrained(here).eval()
tokenizer = AutoTokenizer.from_pretrained(here)

ASK
answer = model.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=ENDS)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""

_IN_CHAT = """messages = [{"role": "user", "content": "a prompt"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs.pop("token_type_ids", None)"""


def model_card(
    manifest: Mapping[str, Any],
    config: RunConfig,
    base: BaseName,
    adapter: Adapter,
    round: int,
    metrics: Mapping[str, float],
    *,
    by: str | None = None,
    on: str = "test",
    client: str | None = None,
    tokenizer: bool = True,
    privacy: str | None = None,
    validation: Mapping[str, float] | None = None,
) -> str:
    """The README.md for a run's adapter, with front matter for the hub.

    by: who measured; None: the manifest says so. on: "test" or "validation", the data of the metrics. client: the
    owner, for a client's own adapter. tokenizer: whether its files lie beside the card; otherwise the card takes it
    from the base model. privacy: a private run's guarantee, in words; example counts are then omitted. validation: the
    round's scores there, if the metrics are of the test set.
    """
    train, commit = manifest["data"]["train"], manifest["commit"]
    attack = _cell(in_words(manifest["attack"], len(train))) if manifest.get("attack") else None
    ranks = sorted(adapter.ranks.values())
    span = " to ".join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))
    own = config.train.command is not None
    programs, local = ", given to their programs" * own, "by a program of the client's own"
    local = local if own else _settings(config.train)
    apart = config.data.clients or config.data.task == "superni"  # each client has data of its own
    rows = {
        "attack": attack,
        "base model": base.shown,
        "adapted modules": f"{len(adapter.modules)}, rank {span}",
        "client ranks": ", ".join(f"{name}: {rank}" for name, rank in manifest["clients"].items()),
        "training examples": _examples(train) + programs if privacy is None else "withheld, a private run",
        "data": _settings(config.data, "task", "max_train", "max_length", "chat_template"),
        "dealt out by": "" if apart else _settings(config.clients, "partition", "dirichlet_alpha", "profile"),
        "LoRA": _settings(config.lora),
        "local round": local + manifest.get("local_round_unless", ""),
        "rounds": f"{round} of {config.run.rounds} planned, seed {config.run.seed}",
        "validation": _scores(validation or {}),
        f"held-out {on} ({client or by or manifest['evaluation_target']})": _scores(metrics) or "none",
        **_classes(manifest, programs),
        "robust rule": config.robust.build(),
        "differential privacy": privacy,
        "configuration": f"digest {manifest['config_digest']}",
        "code": f"fedlora {manifest['versions'].get('fedlora', 'not installed by pip')}, commit "
        + ("unknown" if commit is None else commit["id"][:12] + " with local changes" * (not commit["clean"])),
    }
    return _CARD.format(
        front=f"base_model: {base.name}\n" if base.name else "",
        method=config.method.name,
        attack_tag="- under-attack\n" if attack else "",
        title=config.method.name if client is None else f"{config.method.name}, {client}'s own",
        round=round,
        attack=_ATTACKED.format(attack) if attack else "",
        clients=counted(len(manifest["clients"]), "client"),
        method_repr=manifest["method"],
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items() if value),
        snippet=snippet(config, manifest.get("answer_ends", ()), tokenizer),
        source=base.source,
    )


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "/" not in name)


def _examples(train: Mapping[str, Mapping[str, Any]]) -> str:
    """The number of training examples; in a federation, as far as sites reported it."""
    known = [part["examples"] for part in train.values() if part.get("examples") is not None]
    more = "" if len(known) == len(train) else f" of {len(known)} that said so,"
    return f"{sum(known):.0f}{more} over {len(train)} clients"


def _classes(manifest: Mapping[str, Any], given: str) -> dict[str, str]:
    """A row by class: training examples, or the names alone."""
    names = [_cell(name) for name in manifest["data"]["label_names"]]
    if not 0 < len(names) <= _MOST_CLASSES:
        return {}
    if not (counts := manifest["data"]["label_counts"]):
        return {"classes": ", ".join(names)}
    each = [f"{name} {sum(row[k] for row in counts.values())}" for k, name in enumerate(names)]
    return {f"training examples by class{given}": ", ".join(each)}


def _cell(text: str) -> str:
    """Text for a table cell, on one line."""
    return " ".join(text.split()).replace("|", r"\|")


def _settings(table: Section, *keys: str) -> str:
    """The table's settings of these keys (default: all) that have a value, by their names."""
    values = table.model_dump(include=set(keys) or None)
    given = (f"{key} {value}" for key, value in values.items() if value not in (None, False, []))
    return _cell(", ".join(given).replace("\n", r"\n"))  # a template keeps its line breaks


def snippet(config: RunConfig, ends: Sequence[int], tokenizer: bool) -> str:
    """Code to load and query the adapter from its folder alone; the tokenizer comes from the base if not there."""
    template = config.data.prompting()
    if config.model.task == "causal-lm":
        put = '"a prompt"' if template == BARE else f'{template!r}.replace("{{prompt}}", "a prompt")'
        bare = f'inputs = tokenizer({put}, return_tensors="pt", return_token_type_ids=False)'
        code = _LANGUAGE_MODEL.replace("ASK", _IN_CHAT if template == CHAT else bare)
        code = code.replace("ENDS", repr(list(ends)) if ends else "tokenizer.eos_token_id")
    else:
        paired = config.data.text_pair is not None or config.data.task in ("qqp", "qnli", "mnli")
        pairs = '\npairs = ["its second sentence", "the other\'s"]' if paired else ""
        code = _CLASSIFIER.replace("PAIRS", pairs).replace("SECOND", " pairs," if paired else "")
        code = code.replace("LENGTH", str(config.data.max_length))
    of_base = 'AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)'
    return code if tokenizer else code.replace("AutoTokenizer.from_pretrained(here)", of_base)
