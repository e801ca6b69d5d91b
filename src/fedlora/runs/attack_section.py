"""The table [attack] in a run's configuration: byzantine clients, for experiments in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedlora.attacks import Adversary, Attack, choose_attackers, flip_labels
from fedlora.attacks.kinds import KINDS, Kind
from fedlora.data import TextData
from fedlora.errors import ConfigError, HyperparameterError
from fedlora.training.settings import Section


class AttackSection(Section):
    """Byzantine clients, for experiments; never in a federation. Every output of such a run says so.

    kind: what they do, see docs/how-to/attacks.md. fraction: of all clients, rounded down, drawn by run.seed. clients:
    their names, instead of a fraction. strength: depends on the kind. noise: a free rider hides behind noise.
    """

    kind: Kind | Literal["none"] = "none"
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    clients: Annotated[tuple[str, ...], Field(strict=False)] = ()  # TOML has lists
    strength: Annotated[float, Field(gt=0)] | None = None
    noise: bool = False

    @model_validator(mode="after")
    def _who_and_how(self) -> AttackSection:
        if self.kind == "none":
            return self
        if (self.fraction is None) == (not self.clients):
            raise ValueError("give either attack.fraction (of all clients) or attack.clients (their names)")
        try:
            self._attack()
        except HyperparameterError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def on(self) -> bool:
        return self.kind != "none"

    @property
    def needs_pairs(self) -> bool:
        """Whether the attack needs rounds in which both factors travel."""
        return self.kind != "none" and KINDS[self.kind].pairs

    def adversary(self, names: Sequence[str], seed: int) -> Adversary | None:
        """Which of these clients are byzantine, and how; None if nobody is.

        Raises:
            ConfigError: the share rounds to nobody, a client is unknown, or nobody is honest.
        """
        if not self.on:
            return None
        try:
            byzantine = self.clients if self.fraction is None else choose_attackers(names, self.fraction, seed=seed)
        except HyperparameterError as error:
            raise ConfigError(f"attack.fraction: {error}") from error
        unknown = [name for name in byzantine if name not in names]
        if unknown:
            raise ConfigError(f"attack.clients names {unknown[0]!r}, which is not among {', '.join(names)}.")
        if not set(names) - set(byzantine):
            raise ConfigError(f"all {len(names)} clients are byzantine: an attack needs an honest client. Name fewer.")
        return Adversary(self._attack(), tuple(dict.fromkeys(byzantine)), seed)

    def _attack(self) -> Attack:
        assert self.kind != "none"  # both callers check
        return Attack(self.kind, self.strength, self.noise)


def with_flipped_labels(parts: Mapping[str, TextData], adversary: Adversary | None) -> dict[str, TextData]:
    """The clients' training data, with label flippers' labels flipped.

    Raises:
        ConfigError: the data have no classes.
    """
    if adversary is None or adversary.attack.kind != "label-flip":
        return dict(parts)
    flipped = {}
    for client, part in parts.items():
        if client in adversary.clients:
            if part.labels is None:
                raise ConfigError("attack.kind = 'label-flip' needs classes, but these data have none.")
            part = replace(part, labels=flip_labels(part.labels, len(part.label_names)))
        flipped[client] = part
    return flipped


def attack_facts(adversary: Adversary | None) -> dict[str, Any] | None:
    """An attack's entry in manifest, summary and card; None without an attack."""
    if adversary is None:
        return None
    return {"what": adversary.attack.words, "kind": adversary.attack.kind, "clients": list(adversary.clients)}


def attack_note(adversary: Adversary | None, client: str) -> dict[str, object] | None:
    """An attack's entry in a stored upload of its round; None without an attack."""
    return None if adversary is None else {"attack": adversary.attack.words, "byzantine": client in adversary.clients}
