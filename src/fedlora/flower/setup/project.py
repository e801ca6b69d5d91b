"""`fedlora flower init`: everything that a federation's server needs, in one folder. `places` names its files.

It contains no site's data and no site's private key, except in a trial on one machine, whose sites have folders here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedlora.adapters.io import read_adapter, write_adapter
from fedlora.core.folders import replacing_folder
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import playable
from fedlora.flower.server.private import check_affordable
from fedlora.flower.server.state import number_drawn
from fedlora.flower.serving.superlink import LOOPBACK
from fedlora.flower.setup.policy_file import Rank, policy_text
from fedlora.flower.setup.proxy import nginx_configuration
from fedlora.flower.setup.start import Start, check_max_length, check_ranks, given_start, made_start
from fedlora.flower.terms import certificates
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.facts import agreed, model_facts, of_model, server_facts, write_agreed
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.flower.terms.settings_from_run import read_run_file


@dataclass(frozen=True, eq=False)
class Federation:
    """The source of a folder. clients: site -> rank, in order. known: the facts about the base model."""

    settings: FederationSettings
    clients: Mapping[str, Rank]
    start: Start
    known: Facts = field(default_factory=Facts)

    @classmethod
    def stored(cls, there: FederationFolder, settings: FederationSettings, clients: Mapping[str, Rank]) -> Federation:
        """That of a folder, for these clients. Raises `ConfigError`."""
        start = Start(*read_adapter(there.start, scaling=settings.lora.unit))
        return cls(settings, clients, start, agreed(there.agreement))

    @property
    def policy(self) -> str:
        """The text of its first policy.toml."""
        return policy_text(self.clients, private=self.settings.privacy is not None)


def federation(
    config: Path, overrides: Sequence[str], name: str, clients: Mapping[str, int], labels: Sequence[str] | None,
    start: Path | None, port: int, superlink_port: int,
) -> Federation:  # fmt: skip
    """A federation with sites elsewhere: it writes nothing yet, and reads no site's data.

    Raises:
        ConfigError, AdapterFormatError: the settings, the start or the model have an error.
    """
    network = NetworkSection(name=name, port=port, superlink_port=superlink_port)
    settings = with_sites(read_run_file(config, overrides, labels, network=network), clients)
    model = settings.at_server.model
    if start is not None:
        begun = given_start(start, settings)
    elif model is None:
        raise ConfigError(
            f"{config} has no model.path, but the common start needs the base model. Give the path, or an existing "
            f"start: --start DIR."
        )
    else:
        check_max_length(settings, model, str(config))
        begun = made_start(settings, model, max(clients.values()))
    check_ranks(begun.shapes, clients)
    made = Federation(settings, clients, begun)
    check_rounds(made)
    return made if start is not None or model is None else replace(made, known=of_model(model_facts(model, settings)))


def with_sites(settings: FederationSettings, clients: Mapping[str, Rank]) -> FederationSettings:
    """The settings for these sites: a private federation's members, another's quorum. The default quorum is more than
    half of a round's participants; otherwise one early site would play all rounds alone.

    Raises:
        ConfigError: a quorum that can never be met; a site that is not a member.
    """
    drawn = number_drawn(len(clients), settings.run.participation, settings.server.quorum)
    if settings.privacy is not None:  # a private round has no quorum
        largest = max(rank if isinstance(rank, int) else max(rank.values()) for rank in clients.values())
        return settings.model_copy(update={"privacy": settings.privacy.for_members(list(clients), largest).checked()})
    quorum = settings.server.quorum or drawn // 2 + 1
    return settings.model_copy(update={"server": settings.server.model_copy(update={"quorum": quorum})})


def check_rounds(made: Federation) -> None:
    """Raises `FedLoRAError`, before anything is written, if the rounds would refuse this federation: settings or ranks
    that contradict each other, or a [privacy] that cannot hold, would leave only noise, or exceeds its population's
    budget."""
    policy = Policy.of(made.policy, Path("policy.toml"))
    server, plan, _ = playable(made.settings, policy, made.start.adapter)
    if plan is not None:
        check_affordable(made.settings, server, plan)


def write_federation(building: Path, home: Path, made: Federation) -> None:
    """Write all files except a trial's sites, into the empty folder `building`, which will be moved to `home`.

    Raises:
        ConfigError: a path that the proxy's configuration cannot name.
    """
    building.chmod(0o700)
    there = FederationFolder(building)
    there.settings.write_text(made.settings.toml(), encoding="utf-8")
    there.policy.write_text(made.policy, encoding="utf-8")
    write_adapter(there.start, made.start.adapter, made.start.spec)
    network = made.settings.network
    proxied = [there.proxy.parent, there.proxy_state] if network.name is not None else []
    for place in (*(building / name for name in ("keys", "requests", "join")), *there.written, *proxied):
        place.mkdir(mode=0o700)
    certificates.write_loopback(there.certificates)
    if network.name is not None:
        certificates.write_public(there.public, network.name)
    write_agreed(there.agreement, made.known)
    for path, text in derived(there, home, made).items():
        path.write_text(text, encoding="utf-8")


def derived(there: FederationFolder, home: Path, made: Federation) -> dict[Path, str]:
    """The files that follow from the others, proxy and join files, with their text. home: the folder's later place.

    Raises:
        ConfigError: a path that the proxy's configuration cannot name.
    """
    network, adapter, found = made.settings.network, made.start.adapter, dict[Path, str]()
    if network.name is not None:
        found[there.proxy] = nginx_configuration(
            home, name=network.name, tensors=2 * len(adapter.modules) + len(adapter.heads), port=network.port,
            superlink_port=network.superlink_port,
        )  # fmt: skip
    # in a trial sites dial the SuperLink itself, on loopback, otherwise the proxy
    authority = there.certificates if network.name is None else there.public
    server, port = (LOOPBACK, network.superlink_port) if network.name is None else (network.name, network.port)
    ca, settings = (authority / "ca.crt").read_text(encoding="ascii"), made.settings.travelling()
    facts = server_facts(made.settings, made.known, adapter.modules).table()
    for name, rank in made.clients.items():
        largest = rank if isinstance(rank, int) else max(rank.values())
        join = JoinFile(made.settings.id, name, largest, server, port, ca, settings, facts)
        found[there.join(name)] = join.text()
    return found


def make_federation(folder: Path, made: Federation) -> None:
    """Make the folder of a federation with sites elsewhere. Raises `ConfigError`; then nothing is left."""
    with replacing_folder(folder) as building:
        write_federation(building, folder.resolve(), made)


__all__ = [
    "Federation", "check_rounds", "derived", "federation", "make_federation", "with_sites",
    "write_federation",
]  # fmt: skip
