"""A run's configuration: read from TOML into one frozen value, with canonical JSON and a digest.

Each key is a field of one of `sections`, with its default; an unknown key is an error that suggests the nearest one.
`--set a.b=c` on the command line sets the same keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedlora.core.messages import Client
from fedlora.data import TextData
from fedlora.data.demo import PACKAGED
from fedlora.data.hub import ADAPTER_FILES, local_folder, repository_and_revision
from fedlora.errors import ConfigError, complaints, refuse
from fedlora.given_files import parse_toml, read_toml
from fedlora.runs.attack_section import AttackSection
from fedlora.runs.data_sections import ClientsSection, DataSection
from fedlora.runs.privacy_section import SIMULATED, PrivacySection
from fedlora.runs.reading import checked, partly, set_in, tables_in
from fedlora.runs.robust import RobustSection
from fedlora.runs.sections import EvaluateSection, MethodSection, ModelSection, RunSection, ServerSection, TrainTable
from fedlora.training.measure import ModelEvaluator, Target
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, Section


class RunConfig(Section):
    """A whole run.

    Example:
        >>> config = load_config(Path("config.toml"))
        >>> config.method.name, config.run.rounds
        ('glora', 3)
    """

    model: ModelSection
    data: DataSection
    run: RunSection = RunSection()
    lora: LoRASettings = LoRASettings()
    method: MethodSection = MethodSection()
    server: ServerSection = ServerSection()
    robust: RobustSection = RobustSection()
    clients: ClientsSection = ClientsSection()
    train: TrainTable = TrainTable()
    evaluate: EvaluateSection = EvaluateSection()
    attack: AttackSection = AttackSection()
    privacy: PrivacySection | None = None

    @property
    def template(self) -> str | None:
        """Around a language model's prompts (data.chat_template); None for a classifier."""
        return self.data.prompting() if self.model.task == "causal-lm" else None

    def evaluator(
        self, model: AdaptedModel, sets: Mapping[str, TextData], clients: Sequence[Client], *, target: Target,
        own: Mapping[str, TextData],
    ) -> ModelEvaluator | None:  # fmt: skip
        """The evaluator for these held-out sets; None if they are empty."""
        if not any(len(part) for part in sets.values()):
            return None
        e = self.evaluate
        return ModelEvaluator(
            model, sets, clients, target=target, metric=e.metric, own=own, max_length=self.data.max_length,
            max_new_tokens=e.max_new_tokens, batch_size=e.batch_size, bf16=self.model.bf16, template=self.template,
        )  # fmt: skip

    def canonical(self) -> str:
        """JSON that is the same for equal configurations, with every field."""
        fields = self.model_dump(mode="json")
        fields["method"] = dict(sorted(fields["method"].items()))
        return json.dumps(fields)  # in field order; the order of data.clients determines their ranks


KEYS = tuple(  # "table.key" of every key that a configuration may have
    f"{table}.{name}"
    for table, field in RunConfig.model_fields.items()
    for section in tables_in(field.annotation)
    for name in section.model_fields
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a TOML file, with `a.b=c` overrides applied; its data paths made absolute.

    Raises:
        ConfigError: the file is missing or not TOML, or has unknown keys, wrong types or impossible values, all at
            once: with them, a method that cannot be made and files that are not there.

    Example:
        >>> load_config(Path("config.toml"), ["run.rounds=1", "method.name=svd"]).method.name
        'svd'
    """
    raw = read_toml(path, "the config")
    wrong = list(complaints(*(partial(override_in, raw, override) for override in overrides)))
    config, lines = partly(RunConfig, raw)
    if config is not None and config.privacy is not None and config.privacy.population == SIMULATED:
        lines.append(f"privacy.population = {SIMULATED!r} is an experiment's: name the people whose data these are")
    if config is not None and not wrong and not lines:
        return located(config, path.parent)
    if config is not None:
        from fedlora.runs.checks import of_parts  # imports what a run needs; only for a file that cannot be run

        lines += complaints(lambda: refuse(of_parts(located(config, path.parent))))
    raise ConfigError("; ".join([*(one.rstrip(".") for one in wrong), *lines]))


def parse_config(raw: dict[str, Any]) -> RunConfig:
    """A configuration from nested tables. Raises `ConfigError` with one line per mistake."""
    return checked(RunConfig, raw)


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """The `a.b=c` overrides alone, as nested tables. Raises `ConfigError`."""
    tables: dict[str, Any] = {}
    for override in overrides:
        override_in(tables, override)
    return tables


def override_in(raw: dict[str, Any], text: str) -> None:
    """Apply one `a.b=c` to nested tables. Raises `ConfigError`."""
    key, found, value = text.partition("=")
    if not found or not all(key.split(".")):
        raise ConfigError(f"--set takes KEY=VALUE with dots in KEY, such as run.rounds=5; got {text!r}.")
    set_in(raw, key.strip(), typed(value))


def typed(text: str) -> Any:
    """The value typed after KEY=, as TOML; a bare word is a string, and so is what would set further keys."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def located(config: RunConfig, folder: Path) -> RunConfig:
    """Make the paths of local files absolute, so that a run can be resumed from anywhere. Relative paths start at
    `folder`, the config file's. Raises `ConfigError`."""

    def absolute(path: Any) -> Any:
        return str((folder / path).resolve()) if isinstance(path, str) else path

    data, model, train, private = config.data, config.model, config.train, config.privacy
    parts: dict[str, Any] = {part: absolute(getattr(data, part)) for part in ("validation", "test")}
    parts["train"] = data.train if data.train == "demo" else absolute(data.train)
    parts["clients"] = {client: absolute(path) for client, path in data.clients.items()}
    parts["task_lists"] = [absolute(one) if (folder / one).is_file() else one for one in data.task_lists]
    there: dict[str, Any] = {}
    if model.name not in PACKAGED and (folder / model.name).exists():
        there["name"] = absolute(model.name)
    elif model.name not in PACKAGED and Path(model.name).exists():  # transformers would use that one
        raise ConfigError(
            f"model.name = {model.name!r} is relative to {folder.resolve()}, the folder of its file, which has no such "
            f"model. If you mean the one in the working directory, give its full path."
        )
    if adapter := model.adapter:
        here = (folder / adapter).exists() or repository_and_revision(adapter) is None
        there["adapter"] = absolute(adapter) if here else str(local_folder(adapter, ADAPTER_FILES))
    changes: dict[str, Any] = {"data": data.model_copy(update=parts), "model": model.model_copy(update=there)}
    if train.command is not None:
        changes["train"] = train.model_copy(update={"command": located_command(train.command, folder)})
    if private is not None:
        changes["privacy"] = private.model_copy(update={"ledger": absolute(private.ledger)})
    return config.model_copy(update=changes)


def located_command(command: Sequence[str], folder: Path) -> list[str]:
    """A command with the files among its words absolute; relative ones start at `folder`. A word with a slash may name
    a folder too. Links stay links: the python of a virtual environment is one."""

    def there(word: str) -> bool:
        return (folder / word).is_file() or ("/" in word and (folder / word).exists())

    return [os.path.abspath(folder / word) if there(word) else word for word in command]
