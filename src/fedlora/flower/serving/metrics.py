"""A federation's numbers for Prometheus, from its events and the online nodes.

    fedlora_round                             finished rounds
    fedlora_rounds                            requested rounds
    fedlora_round_seconds                     duration of the last round
    fedlora_loss                              mean training loss of the last round, by examples
    fedlora_client_loss{client}               training loss of a client's last round
    fedlora_client_norm{client}               norm of its update in that round
    fedlora_client_weight{client}             p_i of that round
    fedlora_client_weight_after{client}       its change's weight after a robust rule; absent without one
    fedlora_client_left_out{client}           1 if the rule left it out of the last round in which it was weighed
    fedlora_client_fate_total{client,fate}    how often it trained, was late, ..., also in repeated attempts
    fedlora_upload_bytes_total{client}        bytes of its replies
    fedlora_metric{name}                      the server's scores in the last round that it measured
    fedlora_site_metric{name}                 the sites' mean scores in the last round that they measured
    fedlora_nodes_online                      online nodes
    fedlora_node_online{client}               1 or 0, for each client that may take part
    fedlora_database_bytes                    size of the SuperLink's database
    fedlora_disk_free_bytes                   free space at the federation's folder
    fedlora_last_event_timestamp_seconds      time of the last event
    fedlora_ended                             1 once no more rounds will be played
    fedlora_privacy_epsilon                   in a private federation: epsilon of the finished rounds
    fedlora_privacy_epsilon_planned           of all its rounds
    fedlora_privacy_population_epsilon        of all runs on these clients, from their ledger
    fedlora_privacy_delta                     the delta of all of these

A private federation shows only what may be released (`fedlora.privacy.federation_list`): no loss, no fate, no name.

Clients are those that may take part now. After a restart all numbers continue. Those in _total are counters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.progress import Progress, numbers_of_round
from fedlora.flower.serving import database
from fedlora.flower.serving.standing import Standing, room_of
from fedlora.flower.serving.superlink import NodeFacts
from fedlora.privacy.released import fate_of


class Exposed(Collector):
    """The last known numbers, for Prometheus. `see` and `collect` may be called from different threads."""

    def __init__(self, folder: FederationFolder) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._last: tuple[Progress, tuple[NodeFacts, ...], Standing | None] = (Progress(), (), None)

    def see(self, progress: Progress, nodes: Sequence[NodeFacts], standing: Standing) -> None:
        """Set the facts that `collect` reports from now on."""
        with self._lock:
            self._last = progress, tuple(nodes), standing

    def collect(self) -> Iterator[Metric]:
        """All known numbers; in a private federation, those that the list of releases allows."""
        with self._lock:
            progress, nodes, standing = self._last
        for metric in self._known(progress, nodes, standing):
            if (standing is not None and standing.privacy is None) or _leaves(metric.name):
                yield metric

    def _known(self, progress: Progress, nodes: Sequence[NodeFacts], standing: Standing | None) -> Iterator[Metric]:
        line = progress.lines.get(progress.round, {})
        privacy = line.get("privacy") or {}
        online = {node.name for node in nodes if node.status == "online"}
        heard = datetime.fromisoformat(progress.heard).timestamp() if progress.heard else None
        for name, what, value in (
            ("round", "rounds that are done", progress.round),
            ("rounds", "rounds that are asked for", None if standing is None else standing.rounds),
            ("ended", "whether no more rounds are to be played", None if standing is None else standing.finished),
            ("round_seconds", "how long the last round took", line.get("seconds")),
            ("loss", "mean training loss of the last round", line.get("loss")),
            ("nodes_online", "nodes that are online", len(online)),
            ("database_bytes", "of the SuperLink's database", database.size(self._folder.database)),
            ("disk_free_bytes", "where the federation's folder is", room_of(self._folder)),
            ("privacy_epsilon", "epsilon of the private rounds that are done", privacy.get("epsilon")),
            ("privacy_epsilon_planned", "epsilon of all planned rounds", privacy.get("epsilon_planned")),
            (
                "privacy_population_epsilon",
                "of all runs on these clients",
                (privacy.get("ledger") or {}).get("epsilon"),
            ),
            ("privacy_delta", "at which epsilon is", privacy.get("delta")),
            ("last_event_timestamp_seconds", "when something happened last", heard),
        ):
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"fedlora_{name}", what, value=float(value))
        weighed = _latest(progress, "weight_after")
        there = {} if standing is None else {client: float(client in online) for client in standing.clients}
        for name, what, values in (
            ("client_loss", "training loss of the client's last round", _latest(progress, "loss")),
            ("client_norm", "norm of the client's last update", _latest(progress, "norm")),
            ("client_weight", "weight of the client's last update", _latest(progress, "weight")),
            ("client_weight_after", "what the client's change counted for after a robust rule", weighed),
            (
                "client_left_out",
                "whether a robust rule left the client's last update out",
                {client: float(after == 0) for client, after in weighed.items()},
            ),
            ("node_online", "whether the client's node is online", there),
            ("metric", "what the server measured last", _latest(progress, "metrics")),
            ("site_metric", "mean of what the sites measured last", _latest(progress, "sites")),
        ):
            label = "client" if name.startswith(("client", "node")) else "name"
            family = GaugeMetricFamily(f"fedlora_{name}", what, labels=[label])
            for key, number in sorted(values.items()):
                if label == "name" or key in there:  # not a site that was removed
                    family.add_metric([key], number)
            yield family
        fates = CounterMetricFamily("fedlora_client_fate", "what became of its rounds", labels=["client", "fate"])
        for (client, fate), count in sorted(progress.fate_counts.items()):
            fates.add_metric([client, fate], count)
        uploaded = CounterMetricFamily("fedlora_upload_bytes", "bytes of the client's replies", labels=["client"])
        for client, count in sorted(progress.uploaded.items()):
            uploaded.add_metric([client], count)
        yield from (fates, uploaded)


@contextmanager
def exposing(exposed: Exposed, address: str) -> Iterator[int]:
    """Answer Prometheus at `address`, HOST:PORT, while the block runs. Yields the port; 0 takes a free one.

    Raises:
        ConfigError: the address does not exist, or is in use.
    """
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(exposed)
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"metrics cannot be served at {address!r}: {error}. Give HOST:PORT, as 127.0.0.1:9464."
        ) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _leaves(name: str) -> bool:
    return fate_of("prometheus", name.removeprefix("fedlora_")) in ("released", "privatised", "if-public")


def _latest(progress: Progress, kind: str) -> dict[str, float]:
    """name -> its number in the last round with one. kind: as in `numbers_of_round`."""
    found: dict[str, float] = {}
    for _, line in sorted(progress.lines.items()):
        said = numbers_of_round(line)
        found |= {key.removeprefix(f"{kind}/"): said[key] for key in said if key.startswith(f"{kind}/")}
    return found


__all__ = ["Exposed", "exposing"]
