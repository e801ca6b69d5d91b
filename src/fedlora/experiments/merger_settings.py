"""A merger's settings: those behind the labels of an experiment's axis `merged`. A method, or a control:

exact mean, shrunk  the exact mean, each module scaled to the norm that the merger `like` gives it
least error         the same rank budget as the method `like`, in the basis of least error (GLoRA with basis energy)
no adapter          the pre-trained model with its drawn head
clients alone       the mean over (at most five) clients' own adapters, not merged
head alone          no LoRA, and the head trained on all clients' data (`head_alone`)
heads apart         no LoRA, each client's head trained on its own data, and the mean of these heads (`head_alone`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.core.method import Method
from fedlora.errors import ConfigError
from fedlora.methods import build
from fedlora.runs.config import RunConfig

SHRUNK, LEAST_ERROR, NOTHING, ALONE, HEAD, HEADS = (
    "exact mean, shrunk", "least error", "no adapter", "clients alone", "head alone", "heads apart",
)  # fmt: skip
CONTROLS = (SHRUNK, LEAST_ERROR, NOTHING, ALONE, HEAD, HEADS)
_NEEDS = {SHRUNK, LEAST_ERROR}
Merger = Mapping[str, Any]


def resolved(mergers: Mapping[str, Merger], labels: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Label -> its merger; the label in `like` is replaced by that merger's settings. labels: only these.

    Raises:
        ConfigError: neither a method nor a control, unknown settings, or a `like` that is not a method's label.
    """
    made: dict[str, dict[str, Any]] = {}
    for label in mergers if labels is None else labels:
        merger = mergers[label]
        if "control" not in merger:
            method_of(label, merger)
            made[label] = dict(merger)
            continue
        control, like = merger["control"], merger.get("like")
        if control not in CONTROLS:
            raise ConfigError(f"the merger {label!r} is not a control: {control!r}; there are {'; '.join(CONTROLS)}.")
        if (like is not None) != (control in _NEEDS) or set(merger) - {"control", "like"}:
            wanted = "control and like" if control in _NEEDS else "control alone"
            raise ConfigError(f"the merger {label!r} takes {wanted}; got {', '.join(merger)}.")
        if like is not None and "name" not in mergers.get(like, {}):
            raise ConfigError(f"the merger {label!r} is like {like!r}, which is not a method of that axis.")
        made[label] = {"control": control, **({"like": dict(mergers[like])} if like is not None else {})}
        if control == LEAST_ERROR and made[label]["like"]["name"] != "glora":
            raise ConfigError(f"the merger {label!r} takes the rank budget of a glora, but {like!r} is not one.")
    return made


def searched_as(mergers: Mapping[str, Merger], label: str, reference: str | None) -> str:
    """The label whose searched value this label uses: a control uses that of the label that it is compared with."""
    merger = mergers[label]
    if "control" not in merger:
        return label
    return merger.get("like") or reference or label


def check_run(config: RunConfig, where: str) -> None:
    """Raises `ConfigError` for a run whose uploads could not be merged again."""
    wrong = {
        "run.rounds = 1": config.run.rounds == 1,
        'run.keep_uploads = "last"': config.run.keep_uploads != "none",
        'server.heads = "frozen"': config.server.heads == "frozen",
    }
    missing = [what for what, there in wrong.items() if not there]
    if missing:
        raise ConfigError(f"{where}: runs whose uploads are merged several times need {' and '.join(missing)}.")


def method_of(label: str, merger: Merger) -> Method[Any]:
    """The method. Raises `ConfigError` if it names none, `HyperparameterError` for settings that it lacks."""
    settings = {key: value for key, value in merger.items() if key not in ("name", "preset")}
    if "name" not in merger:
        raise ConfigError(f"the merger {label!r} names no method (name = ...) and no control.")
    return build(merger["name"], preset=merger.get("preset"), **settings)
