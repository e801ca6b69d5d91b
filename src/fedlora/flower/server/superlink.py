"""A federation's SuperLink on loopback: start, query and control it. The only file that uses Flower's control API.

    link = SuperLink(home)
    link.start()                            flower-superlink, until it answers
    link.keep_keys({"acme": key_path})      its list of nodes becomes that of FED/keys
    link.nodes()                            registered nodes: which are online, since when
    run = link.run()                        the federation's Flower app, from its last checkpoint
    link.look(run).status                   "pending", "running", "finished:completed", ...
    link.stop()                             with all processes that it started

The API is called in this process, because a `flwr` command takes two seconds of a processor to start, and this is
called every few seconds for weeks. Flower's version is pinned.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from fedlora.core.process import end
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower import processes
from fedlora.flower.bundle import bundle, digest
from fedlora.flower.places import FederationFolder
from fedlora.flower.terms import certificates
from fedlora.flower.terms.settings import FederationSettings

LOOPBACK = "127.0.0.1"
_LONG = 60.0  # seconds for the SuperLink to answer after its start


class SuperLinkError(FedLoRAError, RuntimeError):
    """The SuperLink refuses, or cannot be reached; its own words are in the message."""


@dataclass(frozen=True)
class NodeFacts:
    """A registered node. status: "registered" (never seen), "online" or "offline". key: its public key as PEM."""

    name: str
    id: int
    status: str
    key: bytes


@dataclass(frozen=True)
class RunFacts:
    """A run of the Flower app. status: "pending", "starting", "running", "finished:completed", "finished:failed",
    "finished:stopped". details: Flower's words about it."""

    id: int
    status: str
    details: str = ""

    @property
    def over(self) -> bool:
        return self.status.startswith("finished")


class SuperLink:
    """The SuperLink of a federation's folder. Several of these objects may talk to one running SuperLink.

    Raises:
        ConfigError: the folder is not one of `fedlora flower init`.
    """

    def __init__(self, home: Path) -> None:
        self.folder = FederationFolder(home.resolve())
        self.port = FederationSettings.load(self.folder.settings).network.superlink_port
        self.address = f"{LOOPBACK}:{self.port}"
        self.env = processes.environment(self.folder.flower_home) | processes.GIVES_BACK  # its ServerApp's, too
        self.log = self.folder.logs / "superlink.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            SuperLinkError: it ended (is its port in use?), or it does not answer.
        """
        self.process = processes.started(self.command(), self.log, self.env)
        until = time.monotonic() + _LONG
        while True:
            with contextlib.suppress(SuperLinkError):
                self.runs()
                return
            if (code := self.process.poll()) is not None:
                words = processes.last_line(self.log)
                raise SuperLinkError(f"the SuperLink ended with code {code}: {words} (more in {self.log})")
            if time.monotonic() > until:
                self.stop()
                raise SuperLinkError(f"the SuperLink did not answer within {_LONG:.0f} s; its log is {self.log}.")
            time.sleep(0.3)

    def command(self) -> list[str]:
        """The command that starts it: on loopback, with its database, TLS and node authentication."""
        certs = self.folder.certificates
        return [
            sys.executable, "-m", processes.SUPERLINK, "--host", LOOPBACK, "--port", str(self.port),
            "--database", str(self.folder.database), "--disable-runtime-dependency-installation",
            "--ssl-ca-certfile", f"{certs}/ca.crt", "--ssl-certfile", f"{certs}/server.crt",
            "--ssl-keyfile", f"{certs}/server.key", "--enable-supernode-auth",
        ]  # fmt: skip

    def ended(self) -> int | None:
        """The exit code of the process that was started here; None while it lives."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """End it and all that it started, including what an earlier process of this folder left."""
        self.close()
        if self.process is not None:
            end(self.process)
            self.process = None
        processes.end_all_of(self.folder.flower_home)

    def close(self) -> None:
        """Close the connection. The next query opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def nodes(self) -> list[NodeFacts]:
        """All registered nodes, by name."""
        found = []
        for node in self._ask("ListNodes", "ListNodesRequest").nodes_info:
            if node.status != "unregistered":
                name = node.name or f"node {node.node_id}"
                found.append(NodeFacts(name, node.node_id, node.status, bytes(node.public_key)))
        return sorted(found, key=lambda node: (node.name, node.id))

    def runs(self) -> list[RunFacts]:
        """All runs."""
        return [_run(run) for run in self._ask("ListRuns", "ListRunsRequest").run_dict.values()]

    def look(self, run: int) -> RunFacts:
        """One run."""
        return _run(next(iter(self._ask("ListRuns", "ListRunsRequest", run_id=run).run_dict.values())))

    def keep_keys(self, keys: Mapping[str, Path]) -> list[str]:
        """Make its list of nodes equal to `keys` (name -> public key). Returns the changes, a line each.

        Raises:
            SuperLinkError: it refuses. ConfigError: not a public key of the kind that Flower accepts.
        """
        wanted = {name: public_key(path) for name, path in keys.items()}
        there, done = set[str](), list[str]()
        for node in self.nodes():
            if wanted.get(node.name) == node.key:
                there.add(node.name)
            else:  # also an older key of a name with another current key
                self._ask("UnregisterNode", "UnregisterNodeRequest", node_id=node.id)
                which = "an older key" if node.name in wanted else "its key"
                done.append(f"{node.name}: {which} is no longer admitted")
        for name in sorted(wanted.keys() - there):
            forget_unregistered(self.folder.database, wanted[name])
            self._ask("RegisterNode", "RegisterNodeRequest", public_key=wanted[name], name=name)
            done.append(f"{name}: its key is admitted")
        return done

    def run(self) -> int:
        """Start a run of the federation's Flower app, which continues after the last checkpoint; returns its id."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.supercore.fab import Fab

        app = bundle()
        fab = fab_to_proto(Fab(digest(app), app, {}))
        here = user_config_to_proto({"folder": str(self.folder.path)})
        found = self._ask("StartRun", "StartRunRequest", fab=fab, override_config=here)
        if not found.HasField("run_id"):
            raise SuperLinkError("the SuperLink accepted the Flower app, but started no run of it.")
        return int(found.run_id)

    def stop_run(self, run: int) -> None:
        """End a run that is not over."""
        self._ask("StopRun", "StopRunRequest", run_id=run)

    def _speaker(self) -> Any:
        if self._client is None:
            from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
            from flwr.supercore.control import ControlHttpClient
            from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

            os.environ.update({name: self.env[name] for name in ("NO_PROXY", "no_proxy")})  # httpx reads them here
            with _own_errors():
                root = (self.folder.certificates / "ca.crt").read_bytes()
                self._client = ControlHttpClient.from_server_address(
                    server_address=self.address, insecure=False, root_certificates=root,
                    interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
                )  # fmt: skip
        return self._client

    def _ask(self, method: str, request: str, **fields: Any) -> Any:
        from flwr.proto import control_pb2

        with _own_errors():
            return getattr(self._speaker(), method)(getattr(control_pb2, request)(**fields))


def public_key(path: Path) -> bytes:
    """A node's public key as Flower stores it, from an OpenSSH file. Raises `ConfigError`."""
    try:
        key = certificates.public_key(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a public key that Flower accepts: {error}") from error
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def forget_unregistered(database: Path, public_key: bytes) -> None:
    """Let a key be registered again: Flower keeps the row of an unregistered node, and accepts each key only once.

    Safe beside a running SuperLink: it is one row in one transaction, for a node that can no longer do anything.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=10)) as file:
        file.execute("DELETE FROM node WHERE public_key = ? AND status = 'unregistered'", (public_key,))
        file.commit()


def _run(run: Any) -> RunFacts:
    status = run.status
    whole = f"{status.status}:{status.sub_status}" if status.sub_status else status.status
    return RunFacts(run.run_id, whole, status.details)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Turn Flower's errors into ours, with its own words."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise SuperLinkError(f"the SuperLink refuses: {_words_of(error.response)}") from error
    except (httpx.HTTPError, OSError, ValueError, SystemExit) as error:
        raise SuperLinkError(f"the SuperLink does not respond as expected: {error or type(error).__name__}") from error


def _words_of(response: Any) -> str:
    with contextlib.suppress(ValueError):
        found: Any = response.json()
        if isinstance(found, dict):
            return " ".join(str(found[key]) for key in ("detail", "extra") if found.get(key))
    return f"HTTP {response.status_code}: {response.text[:300]}"
