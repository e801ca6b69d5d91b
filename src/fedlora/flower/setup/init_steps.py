"""From the command line to a federation's folder: read the settings, make the start, deal data to the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.data import TextData
from fedlora.data.rows import Rows
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.federation import playable
from fedlora.flower.rounds.membership import number_drawn
from fedlora.flower.rounds.private_federation import check_affordable
from fedlora.flower.setup.dealing import dealt_out
from fedlora.flower.setup.policy_file import Rank
from fedlora.flower.setup.project import Federation, write_federation
from fedlora.flower.setup.start import Start, check_max_length, check_ranks, given_start, made_start
from fedlora.flower.site.site_folder import fill_site
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.facts import model_facts, of_model
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.flower.terms.settings_from_run import read_run_file, refuse_undealt
from fedlora.flower.terms.site_file import Site
from fedlora.runs.config import RunConfig
from fedlora.runs.preparation import prepare


def federation(
    config: Path, overrides: Sequence[str], name: str, clients: Mapping[str, int], labels: Sequence[str] | None,
    start: Path | None, port: int, superlink_port: int,
) -> Federation:  # fmt: skip
    """A federation with sites elsewhere: it writes nothing yet, and reads no site's data.

    Raises:
        ConfigError, AdapterFormatError: the settings, the start or the model have an error.
    """
    network = NetworkSection(name=name, port=port, superlink_port=superlink_port)
    settings = read_run_file(config, overrides, labels, network=network)
    settings = with_members(with_quorum(settings, len(clients)), clients)
    if start is not None:
        begun = given_start(start, settings)
    elif settings.at_server.model is None:
        raise ConfigError(
            f"{config} has no model.path, but the common start needs the base model. Give the path, or an existing "
            f"start: --start DIR."
        )
    else:
        check_max_length(settings, settings.at_server.model, str(config))
        begun = made_start(settings, settings.at_server.model, max(clients.values()))
    check_ranks(begun.shapes, clients)
    made = Federation(settings, clients, begun)
    check_rounds(made)
    if start is None and settings.at_server.model is not None:
        made = replace(made, known=of_model(model_facts(settings.at_server.model, settings)))
    return made


def with_quorum(settings: FederationSettings, sites: int) -> FederationSettings:
    """The settings with a quorum; the default is more than half of a round's participants. Otherwise one early site
    would play all rounds alone. Raises `ConfigError` for one that can never be met."""
    asked = number_drawn(sites, settings.run.participation, settings.server.quorum)
    if settings.server.quorum is not None or settings.privacy is not None:  # a private round has no quorum
        return settings
    server = settings.server.model_copy(update={"quorum": asked // 2 + 1})
    return settings.model_copy(update={"server": server})


def with_members(settings: FederationSettings, clients: Mapping[str, Rank]) -> FederationSettings:
    """A private federation's settings with its final members. Raises `ConfigError` for a site that is not a member."""
    if settings.privacy is None:
        return settings
    largest = max(rank if isinstance(rank, int) else max(rank.values()) for rank in clients.values())
    return settings.model_copy(update={"privacy": settings.privacy.for_members(list(clients), largest).checked()})


def check_rounds(made: Federation) -> None:
    """Raises `FedLoRAError`, before anything is written, if the rounds would refuse this federation: settings or ranks
    that contradict each other, or a [privacy] that cannot hold, would leave only noise, or exceeds its population's
    budget."""
    policy = Policy.of(made.policy, Path("policy.toml"))
    server, plan, _ = playable(made.settings, policy, made.start.adapter)
    if plan is not None:
        check_affordable(made.settings, server, plan)


def trial(folder: Path, config: RunConfig, superlink_port: int) -> None:
    """Make a federation on this machine, with its sites in `folder`/sites and admitted. Raises `ConfigError`."""
    refuse_undealt(config)
    prepared = prepare(config, None)
    dealt = dealt_out(config, prepared, NetworkSection(port=superlink_port, superlink_port=superlink_port))
    clients: dict[str, Rank] = {c.id: c.rank if isinstance(c.rank, int) else dict(c.rank) for c in prepared.clients}
    settings = with_members(with_quorum(dealt.settings, len(clients)), clients)
    made = Federation(settings, clients, Start(prepared.seed_adapter, prepared.spec))
    check_rounds(made)
    facts = model_facts(config.model.path, settings)
    made = replace(made, known=of_model(facts))
    with replacing_folder(folder) as building:
        write_federation(building, folder.resolve(), made)
        there = FederationFolder(building)
        for part, data in dealt.held.items():
            (building / "held").mkdir(mode=0o700, exist_ok=True)
            Rows.of(data).write(building / "held" / f"{part}.jsonl")
        for site, own in dealt.data.items():
            write_site(there, site, own, config, facts)


def write_site(there: FederationFolder, name: str, data: str | TextData, config: RunConfig, facts: Facts) -> None:
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


__all__ = ["check_rounds", "federation", "trial", "with_members", "with_quorum"]
