"""docs/claims.toml: families of questions with margins, and the paper's claims that the families test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.scores import of_clients, parse_number
from fedlora.experiments.spec import Experiment, Part
from fedlora.experiments.verdicts import ALPHA, POWER, chance_of_equals, smallest_gap
from fedlora.given_files import read_toml

Score = Literal["loss", "accuracy"]
Margin = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Family(Part):
    """Questions that share one error rate: is the first better than the second, in this set-up?

    question: the question in words, for tables and the report. experiment: the experiment that answers; it has two
    axes. pairs: (first, second), labels of the experiment's row axis; a gap is positive if the first is better.
    setups: labels of its other axis; each pair is compared in each of them. metric: the score to compare, on the test
    set after the last round. beside: another score, shown with its intervals, without a verdict. margin: the largest
    difference that does not matter, in units of `metric` (nats of log-loss; for accuracy a share, so 0.01 is a point).
    cap: the most seeds to spend, whatever the pilot says. profile: the experiment's profile that answers. pilot: the
    profile that gives the spread, on other seeds. claims: the paper's claims, from [claims], that this tests.
    """

    question: str
    experiment: str
    pairs: Annotated[list[tuple[str, str]], Field(min_length=1)]
    setups: Annotated[list[str], Field(min_length=1)]
    metric: Score = "loss"
    beside: Score = "accuracy"
    margin: Margin
    cap: Annotated[int, Field(ge=4)] = 24
    profile: str = "mini"
    pilot: str = "pilot"
    claims: list[str] = Field(default_factory=list)

    @property
    def questions(self) -> list[Question]:
        return [Question(first, second, setup) for first, second in self.pairs for setup in self.setups]


class HeadOf(Part):
    """Where the head alone was measured, on the same seeds, if not in the experiment itself.

    experiment: the experiment with the head. setup: one of its set-ups, for all set-ups of the compared experiment.
    """

    experiment: str
    setup: str


class Gate(Part):
    """LoRA must matter: fedlora discards a set-up, and compares nothing in it, if no adapter beats a head alone by more
    than the margin. The key is the experiment.

    lora: labels, at least one of which must be better; they share the level alpha. head: the label of the control
    without LoRA. head_of: where the head was measured. margin: in nats of log-loss, for a one-sided t test on the
    planned seeds.
    """

    lora: Annotated[list[str], Field(min_length=1)]
    head: str
    head_of: HeadOf | None = None
    margin: Margin


class Claim(Part):
    """One claim of the paper.

    sentence: as in the paper. where: its table, figure or section. experiment: the experiment that tests it. metric:
    the comparison, in words. verdict: the rule by which our results decide, written before them. corrected: a later
    correction of it, with the date.
    """

    sentence: str
    where: str
    experiment: str
    metric: str
    verdict: str
    corrected: str = ""


class Claims(Part):
    """All questions, written before the runs.

    alpha: the largest chance that a family says anything false, if gaps are normal. power: the chance of finding equal
    methods equivalent; it determines the number of seeds. families: the questions, under your own names.
    gates: by experiment, when a set-up counts at all. claims: the paper's sentences, under your own names.
    """

    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    power: Annotated[float, Field(gt=0.5, lt=1)] = POWER
    families: dict[str, Family]
    gates: dict[str, Gate] = Field(default_factory=dict)
    claims: dict[str, Claim] = Field(default_factory=dict)

    def of(self, experiment: str) -> dict[str, Family]:
        """The families that ask about an experiment."""
        return {name: family for name, family in self.families.items() if family.experiment == experiment}

    def pilots(self, experiment: str) -> set[str]:
        """The profiles of an experiment that only give spreads and are not compared."""
        return {family.pilot for family in self.of(experiment).values()}

    def shown_by(self, seeds: int, name: str, spread: float) -> tuple[float, float]:
        """What so many seeds can show about a family's question of that spread, at the level of the family's first
        step: the smallest gap, in the score's unit, and the chance of finding equal methods equivalent."""
        family = self.families[name]
        level = self.alpha / len(family.questions)
        gap = smallest_gap(spread, seeds, level, self.power)
        return gap, chance_of_equals(spread, family.margin, seeds, level)

    def asked_by(self, claim: str) -> list[str]:
        """The families that decide a claim."""
        return [name for name, family in self.families.items() if claim in family.claims]

    @model_validator(mode="after")
    def _known(self) -> Claims:
        for name, family in self.families.items():
            unknown = [claim for claim in family.claims if claim not in self.claims]
            if unknown:
                raise ValueError(f"the family {name} names the claim {unknown[0]!r}, which is not in the file")
            twice = [q for k, q in enumerate(family.questions) if q in family.questions[:k]]
            if twice:
                raise ValueError(f"the family {name} asks twice: {twice[0].words}")
            if (other := self.of(family.experiment)) and len({(f.profile, f.pilot) for f in other.values()}) > 1:
                raise ValueError(f"the families of {family.experiment} name different profiles; give them one profile")
        return self


@dataclass(frozen=True)
class Question:
    """Is `first` better than `second` in this set-up?"""

    first: str
    second: str
    setup: str

    @property
    def words(self) -> str:
        return f"{self.first} against {self.second}, {self.setup}"


def load_claims(path: Path) -> Claims:
    """The claims. Raises `ConfigError`: no such file, no TOML, or not claims, with a line for each error."""
    return Claims.read(read_toml(path, "the claims"), f"the claims {path} are none")


def setup_axis(experiment: Experiment) -> str:
    """The only axis besides the row axis. Raises `ConfigError` if there are more or none."""
    others = [axis for axis in experiment.axes if axis != experiment.rows]
    if len(others) != 1:
        raise ConfigError(
            f"experiment {experiment.name} has the axes {', '.join(experiment.axes)}; but questions need exactly "
            f"two: the compared methods, and the set-ups."
        )
    return others[0]


def check_asked(claims: Claims, experiments: Mapping[str, Experiment]) -> None:
    """Raises `ConfigError` if families or gates name an experiment, label, set-up or profile that does not exist, or
    seeds that are too few or serve twice."""
    for name, family in claims.families.items():
        labels, whose = [label for pair in family.pairs for label in pair], f"the family {name}"
        _check_cells(experiments, whose, family.experiment, labels, family.setups, family.profile)
        asked = experiments[family.experiment]
        for profile in (family.pilot, family.profile):
            if len(seeds := asked.profile(profile).seeds) < 2:
                raise ConfigError(
                    f"profile {profile} of {asked.name} has {len(seeds)} seed, but {whose} needs a spread over "
                    f"seeds: give it two or more, better four."
                )
        shared = sorted({*asked.profile(family.pilot).seeds} & {*asked.profile(family.profile).seeds})
        if shared:
            raise ConfigError(
                f"seed {shared[0]} of {asked.name} is in the pilot ({family.pilot}) and in the runs that answer "
                f"({family.profile}) of {whose}: give the two different seeds."
            )
        _check_data(whose, family, asked)
        if (gate := claims.gates.get(family.experiment)) is not None:
            mine = gate.lora if gate.head_of else [*gate.lora, gate.head]
            _check_cells(experiments, f"the gate of {asked.name}", asked.name, mine, family.setups, family.profile)
    for name, gate in claims.gates.items():
        _check_cells(experiments, f"the gate of {name}", name, gate.lora, [], None)
        if (other := gate.head_of) is not None:
            _check_cells(experiments, f"the gate of {name}", other.experiment, [gate.head], [other.setup], None)


def _check_data(whose: str, family: Family, experiment: Experiment) -> None:
    """Raises `ConfigError` for a pair with one label measured on clients' own data, and the other on common data.
    Mergers are measured on common data."""
    rows, axis, number = experiment.rows, setup_axis(experiment), parse_number("test, last")
    grid = Grid(experiment, family.profile)
    cells = [] if experiment.merged else grid.cells
    configs = {(cell[rows], cell[axis]): grid.first(cell).config for cell in cells}
    own = {at for at, config in configs.items() if of_clients(config) and number.own_data(config)}
    for question in family.questions:
        mine = [label for label in (question.first, question.second) if (label, question.setup) in own]
        if len(mine) == 1:
            raise ConfigError(
                f"{whose} asks {question.words}, but their numbers come from different data: {mine[0]} measures each "
                f"client's own model on its own test data, the other the server's model on the common test set. "
                f"Set evaluate.target = 'clients' for both, or name a common test set (data.test = a file)."
            )


def _check_cells(
    experiments: Mapping[str, Experiment], whose: str, name: str, labels: Sequence[str], setups: Sequence[str],
    profile: str | None,
) -> None:  # fmt: skip
    """profile: the labels in the set-ups must be its cells."""
    if name not in experiments:
        raise ConfigError(f"{whose} names the experiment {name!r}, which is not there.")
    experiment = experiments[name]
    rows, axis = experiment.rows, setup_axis(experiment)
    for which, wanted in ((rows, labels), (axis, setups)):
        for label in wanted:
            if label not in experiment.axes[which]:
                raise ConfigError(f"{whose} names {which} = {label!r} of {name}, which is not there.")
    there = {(cell[rows], cell[axis]) for cell in experiment.cells(profile)} if profile is not None else set()
    for label in labels if profile is not None else ():
        for setup in setups:
            if (label, setup) not in there:
                raise ConfigError(f"{whose} names {label!r} in {setup!r}, a cell that profile {profile} of {name} "
                                  f"does not run.")  # fmt: skip
