"""The wheel in empty environments, outside of the checkout. Kind: end-to-end, with a package index; minutes.

Each extra is installed beside torch alone, and one thing is done that needs what it brings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from release.conftest import ROOT, Built
from support.environments import Environment, empty, run
from support.needs import ADAPTERS, NEEDS

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

# What torch itself brings, as of 2.13; and what an installation of fedlora's core adds.
OF_TORCH = {
    "torch", "filelock", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec",
    "setuptools",
}  # fmt: skip
CORE = {"fedlora", "safetensors", "numpy"}


# What the pages promise of the core alone: all methods, audits, checkpoints, adapters in and out.
ON_THE_CORE = """
from pathlib import Path

import torch

from fedlora import METHODS, Adapter, AdapterSpec, Client, LoRA, Server, Upload, build, read_adapter, write_adapter
from fedlora.adapters import merge, resize
from fedlora.analysis.audit import audit
from fedlora.client import receive, send
from fedlora.core.checkpoint import load_newest, save
from fedlora.server import ServerState
from fedlora.testing import check, comparing

start = Adapter({"q": LoRA(B=torch.zeros(8, 2), A=torch.ones(2, 6) / 7)})
for name in METHODS:
    server = Server(build(name))
    state = server.init(start)
    for _ in range(2):
        uploads = []
        for client in (Client("a", 2), Client("b", 2)):
            download = server.download(state, client)
            mine = receive(download, kept=None).map(lambda t: t + torch.randn_like(t) / 9)
            uploads.append(Upload(client, 3, send(mine, download.roles)))
        state = server.aggregate(state, uploads)
    save(Path(name), 2, state)
    again = load_newest(Path(name), ServerState, type(state.modules["q"]))
    assert again is not None and comparing.leaves(again[1]) == comparing.leaves(state), name
check(build("glora"))
spec = AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]})
for name in "ab":
    write_adapter(name, start.map(lambda t: t + 1), spec)
merge(["a", "b"], "merged")
resize("merged", "small", rank=1)
assert read_adapter("small")[0].modules["q"].rank == 1
print("sound")
"""


def test_the_core_is_torch_safetensors_and_numpy(core: Environment) -> None:
    assert set(core.distributions()) <= OF_TORCH | CORE
    assert "sound" in core.run("-W", "ignore", "-c", "import fedlora; print('sound')")
    said = core.fedlora(code=2)
    assert re.search(r"^torch +2", core.fedlora("--version"), flags=re.MULTILINE)
    assert "pip install 'fedlora[train]'" in said and "Traceback" not in said and re.search(r"torch +2", said)


def test_the_core_keeps_and_hands_out_what_it_computes(core: Environment) -> None:
    (core.work / "core.py").write_text(ON_THE_CORE, encoding="utf-8")
    assert "sound" in core.run("-W", "ignore", "core.py")


def test_the_readmes_lines_run_on_the_core(core: Environment) -> None:
    """README.md, "One round in Python"."""
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (core.work / "lines.py").write_text(lines, encoding="utf-8")
    assert "B=(64, 12)" in core.run("-W", "ignore", "lines.py")


@pytest.mark.parametrize("extra", NEEDS)
def test_an_extra_brings_what_it_is_for(built: Built, tmp_path: Path, extra: str) -> None:
    made = empty(tmp_path / "environment")
    before = made.distributions()["torch"]
    made.install(f"{built.wheel}[{extra}]")
    after = made.distributions()
    assert after["torch"] == before, "an extra replaced torch"
    assert not [name for name in after if name.startswith(("nvidia-", "cuda-", "triton"))] or "+cpu" not in before
    assert "sound" in made.run("-W", "ignore", "-c", NEEDS[extra])
    if "train" in extra or extra == "flower":
        merges(made)
    if extra == "flower":
        assert re.search(r"flwr .*ok", made.fedlora("doctor"))


def merges(made: Environment) -> None:
    made.run("-c", ADAPTERS)
    made.fedlora("merge", "a", "b", "-o", "merged")
    made.fedlora("validate", "merged")
    assert "fedlora" in made.fedlora("--version")


def test_the_source_builds_the_wheel_and_its_tests_run_there(built: Built, tmp_path: Path) -> None:
    """Unpacked elsewhere, with its own fedlora in place of the checkout's: the sdist holds what these tests need."""
    import tarfile

    with tarfile.open(built.source) as source:
        source.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    out = tmp_path / "dist"
    run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, unpacked], tmp_path)
    assert next(out.glob("*.whl")).read_bytes() == built.wheel.read_bytes()  # hatch's builds are reproducible
    own = {"PYTHONPATH": str(unpacked / "src")}
    imported = run([sys.executable, "-c", "import fedlora; print(fedlora.__file__)"], unpacked, own)
    assert imported.strip() == str(unpacked / "src" / "fedlora" / "__init__.py")
    chosen = ["tests/test_exactness.py", "tests/adapters/test_sums.py", "tests/test_golden_methods.py"]
    assert "passed" in run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen], unpacked, own)
