"""What a release is made of: a CycloneDX list of what it was tested with, and the SHA-256 sums of its files.

    python tools/bill_of_materials.py dist

The list is `cyclonedx-py environment` of this Python, cut to what fedlora and its extras for users bring. Versions are
those of constraints.txt, with which the tests ran. An installation elsewhere may get others.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedlora

ROOT = Path(__file__).parent.parent
FOR_USERS = ("train", "plot", "flower", "hub", "privacy", "track")


def brought(requirement: str) -> set[str]:
    """The distributions that a requirement brings into this environment, itself among them."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(requirement)]
    while todo:
        now = todo.pop()
        key = (canonicalize_name(now.name), frozenset(now.extras))
        if key in found:
            continue
        found.add(key)
        try:
            lines = requires(now.name) or []
        except PackageNotFoundError:  # of another platform
            continue
        for line in map(Requirement, lines):
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in ("", *now.extras)):
                todo.append(line)
    return {name for name, _ in found if _is_installed(name)}


def bill() -> dict[str, Any]:
    """The CycloneDX list, as it is written."""
    words = [
        "environment",
        "--pyproject",
        str(ROOT / "pyproject.toml"),
        "--mc-type",
        "library",
        "--output-reproducible",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *words, sys.executable], check=True, capture_output=True, text=True
    )
    whole: dict[str, Any] = json.loads(done.stdout)
    root = whole["metadata"]["component"]
    root["version"] = fedlora.__version__
    names = brought(f"fedlora[{','.join(FOR_USERS)}]") - {"fedlora"}
    whole["components"] = [part for part in whole["components"] if canonicalize_name(part["name"]) in names]
    kept = {part["bom-ref"] for part in whole["components"]} | {root["bom-ref"]}
    whole["dependencies"] = [
        {**edge, "dependsOn": sorted(set(edge.get("dependsOn", ())) & kept)}
        for edge in whole["dependencies"]
        if edge["ref"] in kept
    ]
    return whole


def write(folder: Path) -> None:
    """fedlora-VERSION.cdx.json, then SHA256SUMS of all files there."""
    listed = folder / f"fedlora-{fedlora.__version__}.cdx.json"
    listed.write_text(json.dumps(bill(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    files = sorted(file for file in folder.iterdir() if file.name != "SHA256SUMS" and not file.name.startswith("."))
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    write(Path(sys.argv[1]))
