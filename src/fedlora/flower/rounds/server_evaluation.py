"""The server's own measurements: its model on its held-out files, if it has a base model.

The evaluator is that of `fedlora run`, made as in its preparation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlora.core.lora import Adapter
from fedlora.runs.client_data import read_files
from fedlora.runs.config import RunConfig
from fedlora.runs.warm_start import check_fits
from fedlora.training.digests import model_content
from fedlora.training.measure import ModelEvaluator
from fedlora.training.templates import find_template


@dataclass(frozen=True, eq=False)
class AtServer:
    """The server's memory besides the adapters; empty if it has no base model.

    validation, test: evaluators of its files, None if there are none. examples: a digest of the validation examples.
    digests: SHA-256 of the model's files. ends: tokens that end an answer.
    """

    validation: ModelEvaluator | None = None
    test: ModelEvaluator | None = None
    examples: str | None = None
    tokenizer: Any = None
    digests: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()


def load_at_server(config: RunConfig, start: Adapter) -> AtServer:
    """The server's own base model and files, loaded and checked against the common start.

    Args:
        config: `FederationSettings.for_server`: data.validation and data.test are files of the server's, or 0.

    Raises:
        ConfigError, DataError: a file cannot be read; the start does not fit the model.
    """
    files = {part: path for part in ("validation", "test") if isinstance(path := getattr(config.data, part), str)}
    text = read_files(config, list(dict.fromkeys(files.values()))) if files else {}
    labels = config.data.labels or next((data.label_names for data in text.values()), ())
    config.model.check_targets(config.lora.targets)
    model = config.model.load(config.lora, labels, config.run.seed)
    mine, _ = model.seed_adapter(1, seed=config.run.seed)
    check_fits(mine, start, f"start/, beside at_server.model = {config.model.path!r},")
    template = config.data.prompting() if config.model.task == "causal-lm" else None
    ends: tuple[int, ...] = ()
    if config.model.task == "causal-lm":
        ends = find_template(template, model.tokenizer).ends
    made = {
        part: config.evaluate.evaluator(
            model, {"": text[path]}, (), target="server", own={}, max_length=config.data.max_length,
            bf16=config.model.bf16, template=template,
        )
        for part, path in files.items()
    }  # fmt: skip
    return AtServer(
        validation=made.get("validation"),
        test=made.get("test"),
        examples=text[files["validation"]].digest() if "validation" in files else None,
        tokenizer=model.tokenizer,
        digests=model_content(config.model.location()),
        ends=ends,
    )
