"""Names of other programs, and those of before, in the error of an unknown key. Kind: contract."""

import pytest

from fedlora.errors import ConfigError
from fedlora.runs.config import KEYS, RunConfig, parse_config
from fedlora.runs.synonyms import SYNONYMS


def test_every_synonym_names_a_key_and_is_none() -> None:
    """A table, or a key of one; a synonym that is a key would never be asked for."""
    ours = {*KEYS, *RunConfig.model_fields, "method.name"}
    assert {*SYNONYMS.values()} <= ours and not {*SYNONYMS} & ours


@pytest.mark.parametrize(
    ("table", "key", "ours"),
    [
        ("run", "num_rounds", "run.rounds"), ("run", "fraction_train", "run.participation"),
        ("train", "lr", "train.learning_rate"), ("train", "clip", "train.max_grad_norm"),
        ("clients", "alpha", "clients.dirichlet_alpha"), ("lora", "r", "clients.ranks"), ("run", "round", "rounds"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered_with_ours(table: str, key: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{table}\.{key}'; did you mean '{ours}'\?"):
        parse_config({"model": {"name": "m"}, "data": {"train": "t"}, **{table: {key: 1}}})


def test_a_key_that_is_needed_and_misspelt_is_one_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"path": "m"}, "data": {"train": "t"}})
    assert str(caught.value) == "unknown key 'model.path'; did you mean 'model.name'?"
