"""A comparison: methods on one configuration over seeds, as an experiment of one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlora.errors import ConfigError, refuse, said_by
from fedlora.experiments.spec import Experiment, Profile, Tune, wrong_in
from fedlora.runs.config import RunConfig
from fedlora.runs.sections import MethodSection

PROFILE = "comparison"  # the only profile of a comparison's experiment
AXIS = "method"
SEARCH_SEED = 1000


def comparison(
    base: RunConfig,
    methods: Mapping[str, MethodSection],
    seeds: Sequence[int],
    *,
    name: str,
    metric: str,
    reference: str | None = None,
    margin: float | None = None,
    tune: Tune | None = None,
) -> Experiment:
    """The methods by label, on the configuration. Each run has one process and one thread, so that parallel runs change
    no bit and do not slow each other down.

    Args:
        methods: label -> its section. The bare name of the configuration's own method means the configuration's.
        metric: the compared number. reference: the label that the others are compared with; by default the first.
        margin: a difference that does not matter. tune: the search for each method.

    Raises:
        ConfigError: unknown methods or settings, all in one line; a reference that is not a label; a search on compared
            seeds, or without validation data; [privacy].
    """
    if base.privacy is not None:
        raise ConfigError(
            "[privacy] and compare do not go together: every run of it, searches included, would be charged to the "
            "clients' ledger, and the first would leave nothing for the others. Compare on public data without the "
            "table; then fedlora run."
        )
    methods = {label: base.method if label == base.method.name else section for label, section in methods.items()}
    refuse(f"{label}: {why}" for label, section in methods.items() for why in said_by(section.build))
    if tune is not None and len(tune.values) > 1 and base.data.validation == 0:
        raise ConfigError("a search chooses by validation data, and data.validation = 0 leaves none.")
    one_thread = base.model_copy(update={"run": base.run.model_copy(update={"threads": 1, "workers": None})})
    run = one_thread.model_dump(mode="json", exclude_defaults=True, exclude={"method"})  # the axis has it
    run.setdefault("run", {}).pop("seed", None)
    axis = {
        label: {"method": {"name": section.name, **section.model_dump(mode="json", exclude_defaults=True)}}
        for label, section in methods.items()
    }
    if tune is not None and base.method.name in axis:  # a search starts from the configuration's own value
        axis[base.method.name]["method"].pop(tune.key.removeprefix("method."), None)
    found = Experiment(
        name=name, title=name, metric=metric, reference=reference or next(iter(axis)), margin=margin, run=run,
        axes={AXIS: axis}, tune=tune, profiles={PROFILE: Profile(seeds=list(seeds))},
    )  # fmt: skip
    refuse(wrong_in(found))
    return found


def default_metric(base: RunConfig) -> str:
    """The test set at the best validation round; without validation data, at the last; without a test set, validation.
    Raises `ConfigError` if there is neither."""
    if base.data.task is not None:
        return "test, best"
    if base.data.test != 0 or base.clients.test_fraction is not None:
        return "test, best" if base.data.validation != 0 else "test, last"
    if base.data.validation == 0:
        raise ConfigError("data.validation and data.test are both 0: there is nothing to compare methods by.")
    return "validation, best"
