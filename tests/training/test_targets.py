"""lora.target_modules before anything heavy. Kind of evidence: contract; what peft adapts as the oracle of which
modules are meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.runs.config import parse_config
from fedlora.runs.preparation import prepare
from fedlora.training.models import AdaptedModel
from support.projects import configured


@pytest.fixture
def nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are read; data are, because what is wrong with them is told with the rest."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AdaptedModel, "load", never)


def test_a_broken_expression_is_refused_when_the_config_is_read() -> None:
    with pytest.raises(
        ConfigError, match=r"^lora\.target_modules: .*unterminated subpattern at position 1.*got '\(\('"
    ):
        parse_config({"model": {"name": "m"}, "data": {"train": "demo"}, "lora": {"target_modules": "(("}})
    with pytest.raises(ConfigError, match="at least one target"):
        parse_config({"model": {"name": "m"}, "data": {"train": "demo"}, "lora": {"target_modules": [""]}})


@pytest.mark.usefixtures("nothing_heavy")
@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["query", "valeu"], r"'valeu' .*matches no module.*query, key, value"),
        (r".*\.qeury", r"matches no module.*whole path is 'bert\.encoder\.layer\.0\.attention\.self\.query'"),
        (["LayerNorm"], r"matches 'bert\.embeddings\.LayerNorm', a LayerNorm"),
    ],
)
def test_what_matches_nothing_is_refused_before_weights(project: Path, targets: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare(configured(project, f"lora.target_modules={targets!r}"))


def test_an_expression_adapts_what_peft_says(project: Path) -> None:
    config = configured(project, r"lora.target_modules='.*\.layer\.0\..*(query|key)'")
    modules = prepare(config).seed_adapter.modules
    assert list(modules) == [f"bert.encoder.layer.0.attention.self.{name}" for name in ("key", "query")]
