"""The numbers that runs are compared by: each has a name, such as "test, best" or "rounds to 0.92", a unit, and words.

All use `evaluate.metric`. "best" is at the best validation round, "last" at the last one.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig
from fedlora.training.metrics import find_metric, score_name

_PROBES = ("unseen", "validation_mismatched")  # superni's tasks that nobody trains on; mnli's second test set
KNOWN = (
    "test, best", "test, last", "validation, best", "validation, last", "rounds to X", "clients, last",
    *(f"{probe}, {when}" for probe in _PROBES for when in ("best", "last")),
)  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A parsed name. where: "test", "validation", "clients", "rounds" or a further test set. what: which of its
    numbers. target: the X of "rounds to X"."""

    name: str
    where: str
    what: str
    target: float = 0.0

    @property
    def of_target(self) -> bool:
        """Whether it is measured on the models that `evaluate.target` names, the server's or the clients' own."""
        return self.where != "clients"

    def own_data(self, config: RunConfig) -> bool:
        """Whether clients have their own held-out data for it; a client's own model is then measured on these, and a
        server's model on the common data."""
        if not self.of_target or self.where in _PROBES:
            return False
        part = config.data.test if self.where == "test" else config.data.validation
        dealt = self.where == "test" and config.clients.own_test is not None
        return dealt or config.data.task == "superni" or (bool(config.data.clients) and not isinstance(part, str))

    def smaller_is_better(self, metric: str) -> bool:
        return self.where == "rounds" or not find_metric(metric).larger_is_better

    def lacks(self, config: RunConfig) -> str | None:
        """Why a run of this configuration cannot have the number; None if it can."""
        data, task = config.data, config.data.task
        no_test = data.test == 0 and task in (None, "superni") and config.clients.own_test is None
        needs_validation = self.where in ("validation", "rounds") or self.what == "best"
        if needs_validation and data.validation == 0:
            return "it is of validation data, and data.validation = 0 leaves none"
        if self.where in ("test", "clients") and no_test:
            return "it is of the test set, and data.test = 0 leaves none"
        if self.where == "clients" and not config.evaluate.clients_at_end:
            return "clients' own readouts are measured only with evaluate.clients_at_end = true"
        if self.where == "unseen" and (task != "superni" or data.unseen == 0):
            return "only data.task = 'superni' with data.unseen > 0 has tasks that nobody trains on"
        if self.where == "validation_mismatched" and task != "mnli":
            return "only data.task = 'mnli' has that test set"
        return None


def of_clients(config: RunConfig) -> bool:
    """Whether a run measures its clients' own models: by its setting, or because its method has no server model."""
    roles, target = config.method.build().roles(0), config.evaluate.target
    return target == "clients" or (target == "auto" and "local" in (roles.B, roles.A))


def parse_number(name: str) -> Number:
    """The number with this name. Raises `ConfigError`, which lists all names, for an unknown one."""
    if name.startswith("rounds to "):
        with suppress(ValueError):  # Matthews correlation can be negative, so any finite number is valid
            if math.isfinite(target := float(name.removeprefix("rounds to "))):
                return Number(name, "rounds", "to", target)
    where, _, what = name.partition(", ")
    if name in KNOWN and not name.endswith(" X"):
        return Number(name, where, what)
    raise ConfigError(
        f"no number of a run is called {name!r}; there are: {'; '.join(KNOWN)}. X is a value of "
        f"evaluate.metric, as in 'rounds to 0.92'."
    )


# ---- in words ------------------------------------------------------------------------------------------------------

# A metric's name in scores -> the metric with its unit, as in tables of scores.
SCALES = {
    "loss": "log-loss in nats",
    "perplexity": "perplexity (1 is perfect)",
    "matthews": "Matthews correlation (-1 to 1)",
    "accuracy": "accuracy (0 to 1)",
    "macro_f1": "macro F1 (0 to 1)",
    "exact_match": "share of exact matches (0 to 1)",
    "rouge_l": "ROUGE-L (0 to 1)",
    "rouge_l_teacher_forced": "ROUGE-L, teacher-forced (0 to 1)",
}
_WHERE = {
    "test": "on held-out test data",
    "validation": "on validation data",
    "clients": "on the test data, of the clients' own readouts",
    "unseen": "on tasks that nobody trains on",
    "validation_mismatched": "on MNLI's mismatched test data",
}
_WHEN = {"last": "after the last round", "best": "after the round that is best on validation"}


def scale(metric: str) -> str:
    """ "log-loss in nats". metric: as named in a config or in scores."""
    return SCALES[score_name(metric)]


def explained(which: str, metric: str | None) -> str:
    """A number, named as in `Result.score`, in words with its unit. metric: as named in scores; None if nothing was
    run: the name alone."""
    if metric is None:
        return which
    number = parse_number(which)
    if number.where == "rounds":
        name = scale(metric).partition(" (")[0].removesuffix(" in nats")
        return f"first evaluated round whose validation {name} reaches {number.target:g}"
    return f"{scale(metric)} {_WHERE[number.where]}, {_WHEN[number.what]}"


def capital(words: str) -> str:
    """The words with a capital first letter."""
    return words[:1].upper() + words[1:]
