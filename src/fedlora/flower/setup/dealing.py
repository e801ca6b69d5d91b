"""Deals a run's own data to the sites of a trial, by the run's own code, as each site would have it on its machine.

One file for all (data.train, the demo's, a benchmark's) becomes a file for each site, and the server gets what was held
out of it. With data.clients each site has the file named for it, and holds out its own share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.flower.terms.settings_from_run import from_run
from fedlora.runs.client_data import deal
from fedlora.runs.config import RunConfig
from fedlora.runs.data_sections import DataSection
from fedlora.runs.preparation import Prepared

HELD = ("validation", "test")
_COLUMNS = ("text", "pair", "label", "prompt", "response", "messages")


@dataclass(frozen=True, eq=False)
class Trial:
    """A federation on one machine. data: site -> its existing file, or the text to write. held: the server's data for
    measuring, by name, to be written beside its settings."""

    settings: FederationSettings
    data: Mapping[str, str | TextData]
    held: Mapping[str, TextData]


def dealt_out(config: RunConfig, prepared: Prepared, network: NetworkSection, folder: str = "held") -> Trial:
    """A run's configuration as a trial. prepared: from the same. folder: for the server's files, in FED.

    Raises:
        ConfigError: data that cannot be written as a site's file; keys that a federation does not have.
    """
    labels = list(next(iter(prepared.parts.values())).label_names) or None
    if config.data.clients:
        own = dict(config.data.clients)
        return Trial(from_run(config, labels, network=network, dealt=True), own, {})
    if config.data.task == "superni":
        raise ConfigError("data.task = 'superni' scores answers that no file of a site can hold; fedlora run plays it.")
    everything = deal(config, None)
    held = {part: TextData.concat(list(getattr(everything, part).values())) for part in HELD}
    held = {part: data for part, data in held.items() if len(data)}
    plain = {name: DataSection.model_fields[name].default for name in _COLUMNS}
    first = next(iter(prepared.parts.values()))
    if first.pair is not None:
        plain["pair"] = "pair"
    if first.history is not None:
        plain["messages"] = "messages"
    gone = {"validation": 0.0, "test": 0.0, "max_train": None, "max_test": None, "task": None, "train": "dealt out"}
    data = config.data.model_copy(update={**plain, **gone})
    files = {part: f"{folder}/{part}.jsonl" for part in held}
    plain_config = config.model_copy(update={"data": data})
    settings = from_run(plain_config, labels, network=network, dealt=True, at_server=files)
    return Trial(settings, dict(prepared.parts), held)


__all__ = ["Trial", "dealt_out"]
