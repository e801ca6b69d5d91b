"""Where things lie: the folder of a federation at its server, and that of a site. Names of files, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FederationFolder:
    """What `fedlora flower init` makes at the server.

    Example:
        >>> FederationFolder(Path("fed")).settings.as_posix()
        'fed/federation.toml'
    """

    path: Path

    @property
    def settings(self) -> Path:
        """What is agreed on: model, adapters, training, rounds; and, for the server alone, its network and data."""
        return self.path / "federation.toml"

    @property
    def policy(self) -> Path:
        """Who may take part, at which rank and with which weight."""
        return self.path / "policy.toml"

    @property
    def agreement(self) -> Path:
        """What is known of the base model that all have, and from whom."""
        return self.path / "agreement.json"

    @property
    def start(self) -> Path:
        """The common start, a PEFT directory."""
        return self.path / "start"

    @property
    def connection(self) -> Path:
        """How `flwr` reaches the SuperLink: config.toml of the $FLWR_HOME of who calls it by hand."""
        return self.path / "flwr" / "config.toml"

    @property
    def flower_home(self) -> Path:
        """$FLWR_HOME of the processes that are started here."""
        return self.state / "flwr"

    @property
    def certificates(self) -> Path:
        """Of the SuperLink, on loopback: ca.crt, server.crt, server.key."""
        return self.path / "certs"

    @property
    def public(self) -> Path:
        """Of the proxy, by the server's name: ca.crt, server.crt, server.key."""
        return self.path / "public"

    @property
    def proxy(self) -> Path:
        """The proxy's whole configuration."""
        return self.path / "proxy" / "nginx.conf"

    @property
    def proxy_state(self) -> Path:
        """What the proxy writes, and all that it may: logs, its process id, temporary files."""
        return self.path / "proxy" / "state"

    @property
    def state(self) -> Path:
        """What the server's processes write beside `server`: database, logs, locks."""
        return self.path / "state"

    @property
    def written(self) -> tuple[Path, ...]:
        """All that the server's processes may write here. Nothing that is run or believed lies below."""
        return self.server, self.state

    @property
    def base_cache(self) -> Path:
        """The digest of the server's own base model's weights, which are read once."""
        return self.state / "base.json"

    @property
    def database(self) -> Path:
        """The SuperLink's."""
        return self.state / "superlink.db"

    @property
    def logs(self) -> Path:
        """Of the processes that are started here."""
        return self.state / "logs"

    @property
    def lock(self) -> Path:
        """Held by who serves it: two cannot."""
        return self.state / "serve.lock"

    @property
    def server(self) -> Path:
        """What comes of it."""
        return self.path / "server"

    @property
    def checkpoints(self) -> Path:
        """The server's state, a round each."""
        return self.server / "checkpoints"

    @property
    def events(self) -> Path:
        """What happens, as it happens, a line each."""
        return self.server / "events.jsonl"

    @property
    def rounds(self) -> Path:
        """A line for each finished round."""
        return self.server / "rounds.jsonl"

    @property
    def adapter(self) -> Path:
        """The server's adapter, a PEFT directory."""
        return self.server / "adapter"

    @property
    def summary(self) -> Path:
        """What came of it all, once it is over."""
        return self.server / "summary.json"

    def key(self, name: str) -> Path:
        """The public key of an admitted site."""
        return self.path / "keys" / f"{name}.pub"

    def request(self, name: str) -> Path:
        """What a site said of itself when it was admitted."""
        return self.path / "requests" / f"{name}.toml"

    def join(self, name: str) -> Path:
        """What is handed to a site."""
        return self.path / "join" / f"{name}.toml"

    def site(self, name: str) -> SiteFolder:
        """Of a trial: the folder that a real site has on its own machine."""
        return SiteFolder(self.path / "sites" / name)


@dataclass(frozen=True)
class SiteFolder:
    """What `fedlora flower site` makes at a site."""

    path: Path

    @property
    def site(self) -> Path:
        """Its name, and where its data and its base model are."""
        return self.path / "site.toml"

    @property
    def join(self) -> Path:
        """The server's file, as it came."""
        return self.path / "join.toml"

    @property
    def key(self) -> Path:
        """Its private key. It never leaves."""
        return self.path / "key"

    @property
    def public_key(self) -> Path:
        """The other half."""
        return self.path / "key.pub"

    @property
    def next_key(self) -> Path:
        """Of a rotation: the private key that takes the other one's place once the server has admitted it."""
        return self.path / "key.new"

    @property
    def ca(self) -> Path:
        """Who may vouch for the server."""
        return self.path / "ca.crt"

    @property
    def request(self) -> Path:
        """What goes to the server, to be admitted."""
        return self.path / "request.toml"

    @property
    def state(self) -> Path:
        """What stays at the site between rounds, logs, and its trainer's socket: all that its processes may write."""
        return self.path / "state"

    @property
    def base_cache(self) -> Path:
        """The digest of its base model's weights, which are read once."""
        return self.state / "base.json"

    @property
    def logs(self) -> Path:
        """Of its processes."""
        return self.state / "logs"


__all__ = ["FederationFolder", "SiteFolder"]
