"""The documentation's code runs, and its links lead somewhere. Kind: end-to-end, structural."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It is fifteen lines, and prints the mean of two clients of ranks 4 and 8 at rank 12, with nothing cut."""
    example = python_blocks(ROOT / "README.md")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 17
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "B=(64, 12)" in printed
    assert "inf" in printed


def test_the_toy_method_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/methods.md, "How to add a method": the module as a file, then the code that uses it."""
    module, use = (block for block in python_blocks(ROOT / "docs" / "methods.md") if "UniformMean" in block)
    (tmp_path / "uniform_mean.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(use, "methods.md", "exec"), {})
    assert "B=(64, 12)" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_tree_names_every_source_file() -> None:
    """One comment a file: a new one without a line in the README is seen here."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1]
    for path in (ROOT / "src" / "fedlora").rglob("*.py"):
        if path.name != "__init__.py":
            assert path.stem in tree, f"{path.relative_to(ROOT)} is not in the README's tree"


def test_the_table_of_methods_is_the_measured_one() -> None:
    """docs/methods.md holds what benchmarks/method_table.py prints, to the digit."""
    script = ROOT / "benchmarks" / "method_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
