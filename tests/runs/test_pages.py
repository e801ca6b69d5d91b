"""docs/how-to/privacy.md and measuring.md: their code runs, their configurations are configurations, their tables are
the code's. Kind: structural."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedlora.runs.checks import check_private
from fedlora.runs.config import parse_config
from fedlora.training.metrics import METRICS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "privacy.md").read_text(encoding="utf-8")
MEASURING = (DOCS / "how-to" / "measuring.md").read_text(encoding="utf-8")


def test_the_code_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opendp")
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(block, "privacy.md", "exec"), {})
    assert f"prints `{capsys.readouterr().out.strip()}`" in PAGE


def test_every_configuration_is_one() -> None:
    own, federations = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    base = {"model": {"name": "m"}, "data": {"train": "t", "label_names": ["no", "yes"]}}
    config = parse_config({**base, **tomllib.loads(own)})
    assert config.privacy is not None
    check_private(config, config.server.build(config.method.build(), 0))
    terms = pytest.importorskip("fedlora.flower.terms.privacy")
    table = tomllib.loads(federations.replace(", ...", ""))["privacy"]
    assert terms.FederationPrivacy.model_validate(table).named() == ("acme", "berlin")
    blocks = re.findall(r"```toml\n(.*?)```", MEASURING, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        parse_config({**base, **tomllib.loads(block)})


def test_the_table_of_scores_is_the_one_of_the_code() -> None:
    """Every metric, which way is better, and of which task."""
    lines = [line for line in MEASURING.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line.count("|") == 5]
    tasks = {
        ("sequence-classification", "causal-lm"): "both",
        ("sequence-classification",): "classes",
        ("causal-lm",): "text",
    }
    assert rows[1:] == [
        [f"`{name}`", "larger" if m.larger_is_better else "smaller", tasks[m.tasks]] for name, m in METRICS.items()
    ]
