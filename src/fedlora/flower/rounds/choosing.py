"""Who measures a federation's rounds, on what data, by its settings; and by whose scores rounds are compared.

The server measures on its own file, if [at_server] names one and evaluate.target is not "clients"; each site measures
on its held-out share, unless evaluate.target is "server". With both, rounds are compared by the server's scores; with
sites' scores alone, by the mean of those that answered, weighted by their examples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from fedlora.errors import ConfigError
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.stopping import Line, Ranking
from fedlora.runs.tracking import check_trackers
from fedlora.training.metrics import score_name

if TYPE_CHECKING:
    from fedlora.flower.rounds.server_evaluation import AtServer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choosing(Ranking):
    """The order of a federation's rounds. by: whose scores; None: no round is measured. due: which rounds are measured.
    at_sites: whether the sites measure, even if the server's scores count."""

    by: Literal["server", "sites"] | None
    due: Callable[[int], bool] = lambda round: False
    at_sites: bool = False

    def asks_sites(self, line: Line) -> bool:
        """Whether the sites are to measure a round."""
        return (self.at_sites or self.by == "sites") and self.due(line["round"])

    @property
    def where(self) -> str:
        return "at the server" if self.by == "server" else "at the sites"

    def score(self, line: Line) -> float | None:
        """A round's own score: the server's, or the sites' weighted mean. None if it was not measured."""
        if self.by is None:
            return None
        return self._of(line.get("metrics" if self.by == "server" else "site_mean") or {})


def check(settings: FederationSettings) -> None:
    """Raises `ConfigError` for evaluation settings that cannot work; the message names the contradiction."""
    evaluate, here = settings.evaluate, settings.at_server
    files_here, at_sites = bool(here.validation or here.test), settings.data.validation or settings.data.test
    if evaluate.target == "server" and not files_here:
        raise ConfigError(
            "evaluate.target = 'server' measures the server's model on files of the server's, and [at_server] names "
            "none. Give at_server.model with at_server.validation or at_server.test, or set evaluate.target = "
            "'clients'."
        )
    if evaluate.target == "clients" and not at_sites:
        raise ConfigError(
            "evaluate.target = 'clients' measures on what each site holds out, and data.validation = 0 and data.test = "
            "0 hold nothing out. Give a share, or set evaluate.target = 'server'."
        )
    if evaluate.clients_at_end == "both":
        raise ConfigError(
            "evaluate.clients_at_end = 'both' needs a common test set at the sites, and each has its own only: set it "
            "to true, or leave it out."
        )
    if evaluate.clients_at_end and not settings.data.test:
        raise ConfigError(
            "evaluate.clients_at_end = true measures on the test share of each site, and data.test = 0 holds none out."
        )
    check_trackers(settings.run.track)


def choosing_of(settings: FederationSettings, at_server: AtServer, global_model: bool) -> Choosing:
    """Whose scores compare rounds. Raises `ConfigError` if patience has no scores."""
    evaluate, metric = settings.evaluate, score_name(settings.evaluate.metric)
    at_sites, measured = settings.data.validation > 0 and evaluate.target != "server", partial(due, settings)
    if at_server.validation is not None and not global_model and evaluate.target == "server":
        raise ConfigError(
            f"{settings.method.name} keeps no model at the server to measure, and evaluate.target = 'server'. Set it "
            f"to 'clients'."
        )
    if at_server.validation is not None and global_model and evaluate.target != "clients":
        log.info("each %s is measured at the server, on at_server.validation", _rounds(evaluate.every))
        return Choosing(metric, "server", measured, at_sites)
    if at_sites:
        share = f"{settings.data.validation:g}"
        log.info(
            "each %s is measured at the sites, on the share of %s that each holds out", _rounds(evaluate.every), share
        )
        return Choosing(metric, "sites", measured)
    if evaluate.patience is not None:
        raise ConfigError(
            f"evaluate.patience = {evaluate.patience} looks at a score of each round, and nothing is measured: "
            f"data.validation = {settings.data.validation:g} at the sites, evaluate.target = {evaluate.target!r}, and "
            f"at_server.validation is {'there' if at_server.validation is not None else 'not there'}."
        )
    log.info("no round is measured: [at_server] names no validation file, and the sites hold nothing out")
    return Choosing(metric, None)


def due(settings: FederationSettings, round: int) -> bool:
    """Whether a round is measured."""
    return round % settings.evaluate.every == 0 or round == settings.run.rounds


def _rounds(every: int) -> str:
    return "round" if every == 1 else f"{every}th round, and the last one,"


def sites_test(settings: FederationSettings) -> bool:
    """Whether each site measures its last readout at the end, on its test share."""
    asked = settings.evaluate.target != "server" or bool(settings.evaluate.clients_at_end)
    return asked and settings.data.test > 0
