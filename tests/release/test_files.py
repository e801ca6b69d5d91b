"""What a release holds, looked at without installing it.

Kind: structural, of files that were really built.
"""

from __future__ import annotations

import email
import json
import tarfile
import tomllib
import zipfile
from importlib.metadata import version

import pytest
import yaml

import bill_of_materials
import fedlora
from fedlora.versions import TOLD, installed, least, report
from release.conftest import ROOT, Built
from support.environments import run

pytestmark = [pytest.mark.timeout(900), pytest.mark.exhaustive]  # the first of them builds
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place(built: Built) -> None:
    """`fedlora.__version__`; hatch reads it, and CITATION.cff and the changelog name the same."""
    assert "version" not in PYPROJECT["project"] and PYPROJECT["project"]["dynamic"] == ["version"]
    assert (
        f"-{fedlora.__version__}-" in built.wheel.name and built.source.name == f"fedlora-{fedlora.__version__}.tar.gz"
    )
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fedlora.__version__
    assert f"\n## {fedlora.__version__} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_holds_the_package_its_types_and_its_licence(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        facts = email.message_from_bytes(wheel.read(next(n for n in names if n.endswith("/METADATA"))))
    tracked = run(["git", "ls-files", "src/fedlora"], ROOT).splitlines() if (ROOT / ".git").exists() else []
    assert {name.removeprefix("src/") for name in tracked} <= names
    assert {"fedlora/py.typed", "fedlora/demo.toml"} <= names
    assert f"fedlora-{fedlora.__version__}.dist-info/licenses/LICENSE" in names
    assert not [
        name for name in names if not name.startswith(("fedlora/", f"fedlora-{fedlora.__version__}.dist-info/"))
    ]
    assert facts["License-Expression"] == "Apache-2.0" and facts["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in facts.get_all("Classifier", [])
    core = [line for line in facts.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in core) == ["numpy", "safetensors", "torch"]


def test_the_source_holds_all_that_is_tracked(built: Built) -> None:
    """So what its tests read. Left out: the project's own CI script."""
    with tarfile.open(built.source) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "CITATION.cff", "CONTRIBUTING.md", "tests/release/test_files.py", "constraints.txt"} <= names
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: what is tracked is not known")
    tracked = set(run(["git", "ls-files"], ROOT).splitlines())
    assert {name for name in tracked if not name.startswith(".ci/")} <= names


def test_the_citation_has_what_its_format_asks_for() -> None:
    """The required keys of Citation File Format 1.2.0 (https://citation-file-format.github.io), section "Keys"."""
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(said) and said["cff-version"] == "1.2.0"
    assert said["license"] == PYPROJECT["project"]["license"]
    assert all(set(author) & {"name", "family-names"} for author in said["authors"])


def test_versions_are_told_and_bounds_are_those_of_pyproject() -> None:
    lines = dict(line.split(maxsplit=1) for line in report().splitlines())
    assert lines["fedlora"] == version("fedlora") and {"python", "platform", "torch"} <= set(lines)
    assert all(lines.get(name) == installed(name) for name in TOLD)
    assert installed("no-such-distribution") is None
    stated = [line for extra in PYPROJECT["project"]["optional-dependencies"].values() for line in extra]
    for name in ("torch", "transformers", "peft", "flwr", "cryptography"):
        (line,) = {line for line in [*stated, *PYPROJECT["project"]["dependencies"]] if line.startswith(f"{name}>=")}
        assert line.removeprefix(f"{name}>=").split(",")[0] == least(name)


@pytest.mark.release  # a dozen seconds
def test_what_is_built_is_listed_and_hashed(tmp_path_factory: pytest.TempPathFactory, built: Built) -> None:
    """The same script as `make dist` runs, on this environment."""
    folder = tmp_path_factory.mktemp("hashed")
    for file in (built.wheel, built.source):
        (folder / file.name).write_bytes(file.read_bytes())
    bill_of_materials.write(folder)
    listed = json.loads((folder / f"fedlora-{fedlora.__version__}.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX" and listed["metadata"]["component"]["name"] == "fedlora"
    assert {"torch", "safetensors"} <= {part["name"] for part in listed["components"]}
    assert "OK" in run(["sha256sum", "--check", "SHA256SUMS"], folder)
    assert len((folder / "SHA256SUMS").read_text().splitlines()) == 3
