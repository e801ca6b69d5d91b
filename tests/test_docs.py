"""The documentation's code runs, and its links lead somewhere. Kind: end-to-end, structural."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import method_table
from fedlora import METHODS
from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import load_experiment
from fedlora.runs.config import load_config
from support.worked_examples import python_blocks

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BUILDING = ("how-to/add-a-method", "how-to/extending", "explanation/architecture")
MADE = ("dist/", "build/site/index.html")  # by make


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the mean of two clients of ranks 4 and 8 at rank 12, with nothing cut."""
    exec(compile(python_blocks(ROOT / "README.md")[0], "README.md", "exec"), {})
    assert "B=(64, 12)" in capsys.readouterr().out


def test_the_toy_method_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """examples/own-method with docs/how-to/add-a-method.md: its use, and its own tests."""
    use, tests = (block for block in python_blocks(ROOT / "docs" / "how-to" / "add-a-method.md") if "FedAvgM" in block)
    monkeypatch.syspath_prepend(ROOT / "examples" / "own-method")
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(use, "add-a-method.md", "exec"), {})
    assert "B=(64, 8)" in capsys.readouterr().out
    defined: dict[str, Any] = {}
    exec(compile(tests, "add-a-method.md", "exec"), defined)
    defined["test_all_contracts"]()
    defined["test_one_contract"]()
    (products,) = (
        block for block in python_blocks(ROOT / "docs" / "how-to" / "add-a-method.md") if "SlowProducts" in block
    )
    (tmp_path / "slow_products.py").write_text(products)
    findings = defined["check"](importlib.import_module("slow_products").SlowProducts())
    assert defined["sound"](findings), [finding.why for finding in findings if finding.why]


def test_the_files_to_copy_load() -> None:
    """examples/run and examples/compare, which pages show; their keys are read by hand."""
    run = load_config(ROOT / "examples" / "run" / "my.toml")
    assert [*run.clients.ranks] == [8, 16] and set(run.data.clients or ()) == {"berlin", "lyon"}
    grid = Grid(load_experiment(ROOT / "examples" / "compare" / "optimizers.toml"), "mini")
    assert grid.faults() == {} and (len(grid.searches), len(grid.seeds)) == (4, 3)


def test_the_language_models_page_and_its_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's code runs; the example's configuration is one that loads, and reads what its script writes."""
    pytest.importorskip("datasets")
    (block,) = python_blocks(ROOT / "docs" / "how-to" / "language-models.md")
    exec(compile(block, "language-models.md", "exec"), {})
    assert "(('user', 'Name a colour.'), ('assistant', 'Blue.'))" in capsys.readouterr().out
    config = load_config(ROOT / "examples" / "run" / "reviews.toml")
    assert Path(config.data.train or "").name in (ROOT / "examples" / "run" / "make_reviews.py").read_text()
    assert config.data.prompting() == "chat"


def test_every_link_inside_the_repository_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_commit_that_a_page_names_is_in_the_history() -> None:
    """A figure names its commit, which must still be in the history. Expected: git's answer."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no git history here")
    history = {line[:7] for line in git("log", "--format=%H").splitlines()}
    named = {
        (found, page.name)
        for page in PAGES
        for found in re.findall(r"\bcommits? ([0-9a-f]{7})\b", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 5 and not [pair for pair in sorted(named) if pair[0] not in history]


def test_the_tree_has_a_line_for_every_package() -> None:
    """One line each, twenty-one at most; the files' first lines say the rest."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("## The tree")[1].split("```")[1]
    source = ROOT / "src" / "fedlora"
    packages = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    said = {line.split()[0] for line in tree.splitlines()[2:] if line.strip()}
    assert packages <= said and len(tree.strip().splitlines()) <= 21
    assert all((source / name).exists() for name in said)


def test_the_methods_are_counted() -> None:
    """In words. A number beyond these wants a word here."""
    words = {13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen"}
    many = words[len(METHODS)]
    said = {"README.md": f"{many} methods", "docs/index.md": f"{many} methods", "CITATION.cff": f"{many} aggregation"}
    for name, line in said.items():
        assert line in (ROOT / name).read_text(encoding="utf-8"), f"{name}: {line}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", *(f"docs/{p}.md" for p in BUILDING)])
def test_files_that_a_contributor_is_sent_to_are_there(name: str) -> None:
    """`path/to/file` in the pages on changing fedlora: from the top, or from src/fedlora. NAME stands for one's own."""
    text = (ROOT / name).read_text(encoding="utf-8")
    said = set(re.findall(r"`([\w./-]+(?:\.\w+|/))(?:::(\w+))?`", text))
    assert len(said) > 3
    for path, test in said:
        if "/" not in path or "NAME" in path or path in MADE:
            continue
        found = [place / path for place in (ROOT, ROOT / "src" / "fedlora") if (place / path).exists()]
        assert found, f"{name} names {path}, and there is none"
        assert not test or f"def {test}(" in found[0].read_text(encoding="utf-8"), f"{name} names {path}::{test}"


def test_every_source_file_says_what_it_is() -> None:
    """The first line of each file is a sentence of its own: the tree has no room for them."""
    for path in (ROOT / "src" / "fedlora").rglob("*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert doc and len(doc.splitlines()[0]) > 20, path


def test_the_table_of_methods_is_the_measured_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/explanation/methods.md holds what benchmarks/method_table.py prints, to the digit."""
    monkeypatch.setattr(sys, "argv", ["method_table.py", "--check"])
    code = method_table.main()
    assert code == 0, "".join(capsys.readouterr())


def test_the_table_of_what_leaks_holds_the_stored_figures() -> None:
    """docs/explanation/trust.md, row by row, is what benchmarks/what_leaks.py wrote."""
    page = (ROOT / "docs" / "explanation" / "trust.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "benchmarks" / "results" / "what_leaks.json").read_text(encoding="utf-8"))
    block = page.split("<!-- leaks: of benchmarks/results/what_leaks.json -->")[1].split("<!-- end of leaks -->")[0]
    rows = [
        f"| {row['who']} | {'no noise' if row['epsilon'] is None else format(row['epsilon'], 'g')} "
        f"| {row['class']:.0%} | {row['took_part']:.0%} |"
        for row in stored["rows"]
    ]
    assert block.strip().splitlines()[2:] == rows
    assert f"commit {stored['machine']['commit']}" in page
