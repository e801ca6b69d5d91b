"""A federation's numbers for Prometheus: those of `fedlora flower status --json`, at each scrape.

    fedlora_round                             finished rounds
    fedlora_rounds                            requested rounds
    fedlora_round_seconds                     duration of the last round
    fedlora_loss                              mean training loss of the last round, by examples
    fedlora_client_loss{client}               training loss of a client in the last round
    fedlora_client_norm{client}               norm of a client's update in the last round
    fedlora_client_fate_total{client,fate}    how often a client trained, was late, ..., also in repeated attempts
    fedlora_upload_bytes_total{client}        bytes of a client's replies
    fedlora_metric{name}                      the server's scores in the last round that it measured
    fedlora_site_metric{name}                 the sites' mean scores in the last round that they measured
    fedlora_nodes_online                      online nodes
    fedlora_node_online{client}               1 or 0, for each client that may take part
    fedlora_database_bytes                    size of the SuperLink's database
    fedlora_disk_free_bytes                   free space at the federation's folder
    fedlora_last_event_timestamp_seconds      time of the last event
    fedlora_ended                             1 once no more rounds will be played
    fedlora_privacy_epsilon                   in a private federation: epsilon of the finished rounds
    fedlora_privacy_epsilon_planned           in a private federation: epsilon of all its rounds
    fedlora_privacy_population_epsilon        epsilon of all runs on these clients, from their ledger
    fedlora_privacy_delta                     in a private federation: delta of each epsilon

A private federation shows only what its status shows: no loss, no fate, no name.

Clients are those that may take part now. After a restart all numbers continue. Those in _total are counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.serving.status import status_of
from fedlora.flower.terms.names import host_and_port

_TOLD = re.findall(r"^    fedlora_(\w+?)(_total)?(?:\{(\S+)\})? +(.*)$", __doc__ or "", re.MULTILINE)


class Exposed(Collector):
    """The numbers of a federation's folder, for Prometheus."""

    def __init__(self, folder: FederationFolder) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        """Nothing: no number is known before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All numbers of the current status; none while a file of the folder is broken, which `serve` reports."""
        with suppress(ConfigError):
            yield from numbers(status_of(self._folder))


def numbers(status: Mapping[str, Any]) -> Iterator[Metric]:
    """The numbers in what `status_of` tells; what is not known, or not a number, is left out."""
    rounds, sites = status["last_rounds"], status["sites"]
    last, privacy = rounds[-1] if rounds else {}, status.get("privacy") or {}
    online = {name: float(site["node"] == "online") for name, site in sites.items() if "node" in site}
    heard = status.get("last_event")
    values: dict[str, Any] = {  # a number; or label -> number
        "round": status["round"], "rounds": status["rounds"], "ended": status["finished"] is not None,
        "round_seconds": last.get("seconds"), "loss": last.get("loss"),
        "client_loss": {name: site.get("loss") for name, site in sites.items()},
        "client_norm": {name: site.get("norm") for name, site in sites.items()},
        "client_fate": {(name, fate): n for name, site in sites.items() for fate, n in site.get("fates", {}).items()},
        "upload_bytes": {name: site.get("upload_bytes") for name, site in sites.items()},
        "metric": next((one["metrics"] for one in rounds[::-1] if one.get("metrics")), {}),
        "site_metric": next((one["site_mean"] for one in rounds[::-1] if one.get("site_mean")), {}),
        "nodes_online": sum(online.values()) if online else None, "node_online": online,
        "database_bytes": status.get("database_bytes"), "disk_free_bytes": status.get("disk_free_bytes"),
        "last_event_timestamp_seconds": datetime.fromisoformat(heard).timestamp() if heard else None,
        "privacy_epsilon": privacy.get("epsilon"), "privacy_epsilon_planned": privacy.get("epsilon_planned"),
        "privacy_population_epsilon": (privacy.get("ledger") or {}).get("epsilon"),
        "privacy_delta": privacy.get("delta"),
    }  # fmt: skip
    for name, total, labels, said in _TOLD:
        kind = CounterMetricFamily if total else GaugeMetricFamily
        family = kind(f"fedlora_{name}", said, labels=labels.split(",") if labels else [])
        found = values[name] if labels else {(): values[name]}
        for key, number in found.items():
            if isinstance(number, int | float):
                family.add_metric([key] if isinstance(key, str) else key, float(number))
        if family.samples:
            yield family


@contextmanager
def exposing(exposed: Exposed, address: str) -> Iterator[int]:
    """Answer Prometheus at `address`, HOST:PORT, while the block runs. Yields the port; 0 takes a free one.

    Raises:
        ConfigError: the address does not exist, or is in use.
    """
    host, port = host_and_port(address)
    registry = CollectorRegistry()
    registry.register(exposed)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served at {address!r}: {error}.") from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


__all__ = ["Exposed", "exposing", "numbers"]
