"""Who measures a federation's rounds, by its settings; what the sites answer; and by whose scores rounds are compared.

The server measures on its own file, if data.validation names one and evaluate.target is not "clients"; each site
measures on its held-out share, unless evaluate.target is "server". With both, rounds are compared by the server's
scores; with sites' scores alone, by the mean over those that answered, weighted by their examples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedlora.errors import ConfigError
from fedlora.flower.inside import Limit
from fedlora.flower.scores import SiteScores
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.stopping import Line, Ranking
from fedlora.runs.tracking import check_trackers
from fedlora.training.metrics import score_name

log = logging.getLogger(__name__)
NUMBERS = Limit(2**20, 64, 2**20)  # a reply of numbers and of the names of parts that a site keeps


@dataclass(frozen=True)
class SiteRound:
    """The sites' measurements of one state. measured: site -> its scores, with their number of examples. unmeasured:
    site -> the reason for none."""

    measured: Mapping[str, SiteScores] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)

    def mean(self) -> dict[str, float]:
        """The means, weighted by examples, of the scores that all sites have, and their number of examples."""
        each = list(self.measured.values())
        names = [name for name in (each[0].scores if each else ()) if all(name in one.scores for one in each)]
        total = sum(one.examples for one in each)
        means = {name: math.fsum(one.scores[name] * one.examples for one in each) / total for name in names}
        return {**means, "examples": total} if each else {}

    def facts(self) -> dict[str, Any]:
        """The facts for a round's scores."""
        return {
            "site_metrics": {name: {**one.scores, "examples": one.examples} for name, one in self.measured.items()},
            "site_mean": self.mean(),
            "site_unmeasured": dict(self.unmeasured),
        }


@dataclass(frozen=True)
class Choosing(Ranking):
    """The order of a federation's rounds. by: whose scores; None: no round is measured. every, rounds: the rounds that
    are measured, as evaluate.every and run.rounds say. at_sites: whether the sites measure, even if the server's scores
    count."""

    by: Literal["server", "sites"] | None
    every: int = 1
    rounds: int = 0
    at_sites: bool = False

    def due(self, round: int) -> bool:
        """Whether a round is measured."""
        return self.by is not None and round > 0 and (round % self.every == 0 or round == self.rounds)

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
            "evaluate.target = 'server' measures the server's model on a file of the server's, and neither "
            "data.validation nor data.test names one. Name one, with the base model in model.name, or set "
            "evaluate.target = 'clients'."
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
    check_trackers(settings.run.report_to)


def choosing_of(settings: FederationSettings, server_file: bool, global_model: bool) -> Choosing:
    """Whose scores compare rounds. server_file: whether the server has a validation file; global_model: a model.

    Raises:
        ConfigError: patience has no scores, or there is no model to measure.
    """
    evaluate, metric = settings.evaluate, score_name(settings.evaluate.metric)
    at_sites, when = settings.data.validation > 0 and evaluate.target != "server", (evaluate.every, settings.run.rounds)
    if server_file and not global_model and evaluate.target == "server":
        raise ConfigError(
            f"{settings.method.name} keeps no model at the server to measure, and evaluate.target = 'server'. Set it "
            f"to 'clients'."
        )
    if server_file and global_model and evaluate.target != "clients":
        log.info("rounds are measured at the server, on data.validation's file")
        return Choosing(metric, "server", *when, at_sites=at_sites)
    if at_sites:
        log.info("rounds are measured at the sites, on the share of %g that each holds out", settings.data.validation)
        return Choosing(metric, "sites", *when, at_sites=True)
    if evaluate.patience is not None:
        raise ConfigError(
            f"evaluate.early_stopping_patience = {evaluate.patience} looks at a score of each round, and nothing is "
            f"measured: data.validation = {settings.data.validation:g} at the sites, evaluate.target = "
            f"{evaluate.target!r}, and {'a' if server_file else 'no'} file of the server's to measure on."
        )
    log.info("no round is measured: data.validation names no file of the server's, and the sites hold nothing out")
    return Choosing(metric, None)


def sites_test(settings: FederationSettings) -> bool:
    """Whether each site measures its last readout at the end, on its test share."""
    asked = settings.evaluate.target != "server" or bool(settings.evaluate.clients_at_end)
    return asked and settings.data.test > 0
