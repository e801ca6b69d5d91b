"""Paths in a federation's folder at its server, and in a site's. Names of files, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedlora.core.folders import place


@dataclass(frozen=True)
class FederationFolder:
    """The folder that `fedlora flower init` makes at the server.

    Example:
        >>> FederationFolder(Path("fed")).settings.as_posix()
        'fed/federation.toml'
    """

    path: Path

    settings = place("federation.toml", "What is agreed on; and, for the server alone, its network and data.")
    policy = place("policy.toml", "Who may take part, at which rank and with which weight.")
    start = place("start", "The common start, a PEFT directory.")
    flower_home = place("state/flwr", "$FLWR_HOME of the processes that are started here.")
    certificates = place("certs", "Of the proxy and the SuperLink: ca.crt, ca.key, server.crt, server.key.")
    join = place("join.toml", "What every site gets to join with: what was agreed.")
    keys = place("keys", "NAME.pub of each admitted site.")
    proxy = place("proxy", "All that the proxy may write: logs, its process id, temporary files.")
    state = place("state", "What the server's processes write beside `server`: database, logs, locks.")

    database = place("state/superlink.db", "The SuperLink's.")
    logs = place("state/logs", "Of the processes that are started here.")
    lock = place("state/serve.lock", "Held by who serves it: two cannot.")
    server = place("server", "What comes of it.")
    checkpoints = place("server/checkpoints", "The server's state, a round each.")
    now = place("server/now.json", "Who is asked now, and who has answered; or why the rounds ended.")
    rounds = place("server/rounds.jsonl", "A line for each finished round, and one with its scores.")
    adapter = place("server/adapter", "The server's adapter, a PEFT directory.")
    summary = place("server/summary.json", "What came of it all, once it is over.")
    private = place("server/private", "Of a private federation: its id, and the noised sums.")

    def key(self, name: str) -> Path:
        """The public key of an admitted site."""
        return self.keys / f"{name}.pub"

    def site(self, name: str) -> SiteFolder:
        """Of `fedlora flower up`: the folder that a real site has on its own machine."""
        return SiteFolder(self.path / "sites" / name)


@dataclass(frozen=True)
class SiteFolder:
    """The folder that `fedlora flower site` makes at a site."""

    path: Path

    site = place("site.toml", "Its name, and where its data and its base model are.")
    join = place("join.toml", "The server's file, as it came.")
    key = place("key", "Its private key. It never leaves.")
    public_key = place("key.pub", "The other half.")
    state = place("state", "All that its processes may write: what stays here between rounds, logs, sockets.")
