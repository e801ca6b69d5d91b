"""`fedlora flower init`: everything that a federation's server needs, in one folder. `places` names its files.

It contains no site's data and no site's private key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from fedlora.adapters.io import AdapterSpec, read_adapter, write_adapter
from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import playable
from fedlora.flower.server.private import check_affordable
from fedlora.flower.server.state import number_drawn
from fedlora.flower.terms import certificates
from fedlora.flower.terms.facts import Facts, model_facts, targets_of, versions_here
from fedlora.flower.terms.joining import Address, JoinFile
from fedlora.flower.terms.policy import Policy, policy_text
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.flower.terms.site_file import absolute
from fedlora.given_files import read_given
from fedlora.runs.config import override_in
from fedlora.runs.exported import base_name, named
from fedlora.training.digests import model_content

_HEAD = """\
# What server and sites agree on: a run's file with an id and [network]. Sites have it in join.toml: after a change here
# `fedlora flower renew`, and give them the new one. After the first round only run.rounds may change, [network], and
# paths of the server's own.
"""


def make_federation(
    folder: Path, config: Path, overrides: Sequence[str], network: NetworkSection, clients: Mapping[str, int],
    start: Path | None,
) -> FederationSettings:  # fmt: skip
    """A federation's folder from a file as for `fedlora run`; no site's data is read. start: a PEFT directory.

    Raises:
        ConfigError, AdapterFormatError: the settings, the start or the model have an error. Nothing is left then.
    """
    try:
        raw: Any = tomlkit.parse(read_given(config).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config {config} cannot be read: {error}.") from error
    for override in overrides:
        override_in(raw, override)
    text, settings = agreed_text(raw, config.parent, network, clients)
    if settings.base is None:
        raise ConfigError(f"{config} has no model.name: the common start and the sites' copies are compared with it.")
    begun = made_start(settings, max(clients.values())) if start is None else given_start(start, settings)
    known = checked_federation(settings, clients, begun[0])
    with replacing_folder(folder) as building:
        write_federation(building, text, settings, clients, begun, known)
    return settings


def checked_federation(settings: FederationSettings, clients: Mapping[str, int], start: Adapter) -> Facts:
    """What is known of its base model. Raises `FedLoRAError` if the rounds would refuse this federation: settings or
    ranks that contradict each other, or a [privacy] that cannot hold, would leave only noise, or exceeds its
    population's budget."""
    server, plan, _ = playable(settings, Policy.made({"clients": dict(clients)}, "--sites"), start)
    if plan is not None:
        check_affordable(settings, server, plan)
    return model_facts(str(settings.base), settings, settings.model.revision)


def write_federation(
    building: Path, text: str, settings: FederationSettings, clients: Mapping[str, int],
    start: tuple[Adapter, AdapterSpec], known: Facts,
) -> None:  # fmt: skip
    """Write all files into the empty folder `building`. text: of federation.toml, which says `settings`. clients: site
    -> rank, in order."""
    building.chmod(0o700)
    there = FederationFolder(building)
    files.write(there.settings, text)
    files.write(there.policy, policy_text(clients))
    write_adapter(there.start, *start)
    for place in (there.keys, there.server, there.state, there.proxy):
        place.mkdir(mode=0o700)
    certificates.write_server(there.certificates, settings.network.name)
    write_join(there, settings, known)


def agreed_text(
    raw: dict[str, Any], folder: Path, network: NetworkSection, clients: Mapping[str, int]
) -> tuple[str, FederationSettings]:
    """federation.toml from a run's tables, and what it says: with an id, the server's address, absolute paths, and
    what follows from the sites: a private federation's members, another's quorum. The default quorum is more than half
    of a round's clients; otherwise one early site would play all rounds alone.

    Args:
        raw: is changed; a `tomlkit` document keeps its comments. folder: where relative paths start.

    Raises:
        ConfigError: a mistake in the settings; a quorum that can never be met; a site that is not a member.
    """
    for key in ("id", "network"):  # of the federation whose file this was
        raw.pop(key, None)
    for table, keys in absolute(raw, folder).items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            if raw[table][key] != value:
                raw[table][key] = value
    if private := raw.get("privacy"):
        private.setdefault("members", list(clients))
        private.setdefault("rank", max(clients.values()))
    head = f"{_HEAD}\n{tomlkit.dumps({'id': f'fed-{secrets.token_hex(3)}'})}\n"
    tail = f"\n{tomlkit.dumps({'network': network.model_dump()})}"
    settings = FederationSettings.of(tomlkit.parse(head + tomlkit.dumps(raw) + tail).unwrap(), folder)
    drawn = number_drawn(len(clients), settings.run.participation, settings.server.quorum)
    if settings.privacy is None and settings.server.quorum is None:  # a private round has none
        raw.setdefault("server", {})["quorum"] = drawn // 2 + 1
    text = head + tomlkit.dumps(raw) + tail
    return text, FederationSettings.of(tomlkit.parse(text).unwrap(), folder)


def write_join(there: FederationFolder, settings: FederationSettings, known: Facts) -> None:
    """Write join.toml, which follows from the other files and from what is known of the base model."""
    network, adapter = settings.network, read_adapter(there.start, scaling=settings.lora.unit)[0]
    facts = {**known, **versions_here(), "targets": targets_of(adapter.modules)}
    address = Address(name=network.name, port=network.port, ca=(there.certificates / "ca.crt").read_text("ascii"))
    files.write(
        there.join, JoinFile(federation=settings.id, server=address, agreed=settings.agreed(), facts=facts).text()
    )


def made_start(settings: FederationSettings, rank: int) -> tuple[Adapter, AdapterSpec]:
    """A fresh start of this rank, drawn from run.seed as in `fedlora run`. Loads the base model.

    Raises:
        ConfigError: the model cannot be loaded, or has no such targets.
    """
    section = settings.model.model_copy(update={"device": "cpu"})
    section.check_targets(settings.lora.target_modules)
    loaded = section.load(settings.lora, settings.data.label_names or (), settings.run.seed)
    adapter, spec = loaded.seed_adapter(rank, seed=settings.run.seed)
    return adapter, named(spec, base_name(section.name, model_content(section.location())).name)


def given_start(folder: Path, settings: FederationSettings) -> tuple[Adapter, AdapterSpec]:
    """A given PEFT directory as the start. Its alpha / r becomes that of the settings, and its update stays.

    Raises:
        AdapterFormatError: it is not an adapter with W0 + s B A. ConfigError: its targets or classes differ from
            the settings.
    """
    unit, labels = settings.lora.unit, settings.data.label_names or ()
    adapter, spec = read_adapter(folder, scaling=unit)
    rows = {len(head) for head in adapter.heads.values() if head.ndim}
    if settings.model.task == "sequence-classification" and labels and rows and len(labels) not in rows:
        raise ConfigError(
            f"the start {folder} has a head of {min(rows)} rows, but there are {len(labels)} classes "
            f"({', '.join(map(str, labels))}): it was trained for others."
        )
    return adapter, spec
