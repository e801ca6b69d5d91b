"""A trial's folder: a run's own data dealt to sites on this machine, each with a folder as on a machine of its own.

One file for all (data.train, the demo's, a benchmark's) becomes a file for each site, and the server gets what was held
out of it. With data.clients each site has the file named for it, and holds out its own share.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.data import TextData
from fedlora.data.rows import Rows
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.setup.policy_file import Rank
from fedlora.flower.setup.project import Federation, check_rounds, with_sites, write_federation
from fedlora.flower.setup.start import Start
from fedlora.flower.site.site_folder import fill_site
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.facts import model_facts, of_model
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.flower.terms.settings_from_run import from_run, refuse_undealt
from fedlora.flower.terms.site_file import Site
from fedlora.runs.client_data import deal
from fedlora.runs.config import RunConfig
from fedlora.runs.data_sections import DataSection
from fedlora.runs.preparation import Prepared, prepare

_COLUMNS = ("text", "pair", "label", "prompt", "response", "messages")


def trial(folder: Path, config: RunConfig, superlink_port: int) -> None:
    """Make a federation on this machine, with its sites in `folder`/sites and admitted.

    Raises:
        ConfigError: data that cannot be written as a site's file; keys that a federation does not have.
    """
    refuse_undealt(config)
    prepared = prepare(config, None)
    held = {} if config.data.clients else _held_out(config)
    clients: dict[str, Rank] = {c.id: c.rank if isinstance(c.rank, int) else dict(c.rank) for c in prepared.clients}
    settings = with_sites(_settings(config, prepared, held, superlink_port), clients)
    made = Federation(settings, clients, Start(prepared.seed_adapter, prepared.spec))
    check_rounds(made)
    facts = model_facts(config.model.path, settings)
    with replacing_folder(folder) as building:
        write_federation(building, folder.resolve(), replace(made, known=of_model(facts)))
        there = FederationFolder(building)
        for part, data in held.items():
            (building / "held").mkdir(mode=0o700, exist_ok=True)
            Rows.of(data).write(building / "held" / f"{part}.jsonl")
        for site, own in (config.data.clients or prepared.parts).items():
            _write_site(there, site, own, config, facts)


def _held_out(config: RunConfig) -> dict[str, TextData]:
    """What the run holds out of its one file, by part."""
    if config.data.task == "superni":
        raise ConfigError("data.task = 'superni' scores answers that no file of a site can hold; fedlora run plays it.")
    dealt = deal(config, None)
    held = {part: TextData.concat(list(getattr(dealt, part).values())) for part in ("validation", "test")}
    return {part: data for part, data in held.items() if len(data)}


def _settings(config: RunConfig, prepared: Prepared, held: Collection[str], superlink_port: int) -> FederationSettings:
    """The run's settings for a federation. Files that were dealt have columns of their own, and nothing held out."""
    first = next(iter(prepared.parts.values()))
    if not config.data.clients:
        plain = {name: DataSection.model_fields[name].default for name in _COLUMNS}
        if first.pair is not None:
            plain["pair"] = "pair"
        if first.history is not None:
            plain["messages"] = "messages"
        gone = {"validation": 0.0, "test": 0.0, "max_train": None, "max_test": None, "task": None, "train": "dealt out"}
        config = config.model_copy(update={"data": config.data.model_copy(update={**plain, **gone})})
    network = NetworkSection(port=superlink_port, superlink_port=superlink_port)
    files_held = {part: f"held/{part}.jsonl" for part in held}
    return from_run(config, list(first.label_names) or None, network=network, dealt=True, at_server=files_held)


def _write_site(there: FederationFolder, name: str, data: str | TextData, config: RunConfig, facts: Facts) -> None:
    """Make a trial's site beside the server: a folder like a real one, and its key and request as `admit` puts them."""
    site = there.site(name)
    for folder in (site.path.parent, site.path):
        folder.mkdir(mode=0o700, exist_ok=True)
    where = data if isinstance(data, str) else "data.jsonl"
    if isinstance(data, TextData):
        Rows.of(data).write(site.path / where)
    device = None if config.model.device == "auto" else config.model.device
    method = config.method.name if ":" in config.method.name else None  # a trial's maker also operates its sites
    said = Site(
        name=name, data=where, model=config.model.path, device=device, method=method, command=config.train.command,
        time_limit=config.train.time_limit,
    )  # fmt: skip
    fill_site(site.path, there.join(name).read_bytes(), said, facts.table())
    files.write(there.request(name), site.request.read_bytes())
    files.write(there.key(name), site.public_key.read_bytes())


__all__ = ["trial"]
