"""docs/how-to/measuring.md: its configurations are configurations, and its table is the code's. Kind: structural."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fedlora.runs.config import parse_config
from fedlora.training.metrics import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "measuring.md").read_text(encoding="utf-8")


def test_every_configuration_of_the_page_is_one() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        parse_config({"model": {"name": "m"}, "data": {"train": "t"}, **tomllib.loads(block)})


def test_the_table_of_scores_is_the_one_of_the_code() -> None:
    """Every metric, which way is better, and of which task."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line.count("|") == 5]
    tasks = {
        ("sequence-classification", "causal-lm"): "both",
        ("sequence-classification",): "classes",
        ("causal-lm",): "text",
    }
    assert rows[1:] == [
        [f"`{name}`", "larger" if m.larger_is_better else "smaller", tasks[m.tasks]] for name, m in METRICS.items()
    ]
