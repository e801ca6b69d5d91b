"""What `import fedlora` costs, and that the version is one. Kind: structural."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import fedlora

ROOT = Path(__file__).parents[1]


def test_import_fedlora_needs_torch_and_safetensors_only() -> None:
    """In a fresh interpreter where everything optional fails to import. Of `fedlora.privacy`, what needs more says how
    to get it."""
    blocked = ["peft", "transformers", "flwr", "pydantic", "typer", "rich", "matplotlib", "accelerate",
               "pytest", "opendp", "dp_accounting", "scipy"]  # fmt: skip
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import fedlora, fedlora.simulation, fedlora.core.checkpoint, fedlora.analysis.audit, fedlora.testing
import fedlora.privacy as privacy
assert not set({blocked!r}) & set(sys.modules)
from fedlora import LoRA, Adapter, Client, Upload, Server, METHODS, build, read_adapter, write_adapter
from fedlora.client import receive, send
from fedlora.errors import HyperparameterError
for ask in (lambda: privacy.epsilon(1.0, 1, 1e-5), lambda: privacy.noise_multiplier_for(1.0, 1, 1e-5)):
    try:
        ask()
    except HyperparameterError as error:
        assert "fedlora[privacy]" in str(error)
    else:
        raise SystemExit("it answered")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_needs_an_extra_says_which() -> None:
    """`sys.modules[name] = None` is Python's own word for a module that is not there. torch is none of what an extra
    brings; it is left out so that the process ends at the first import."""
    code = """
import sys
for missing in ("numpy", "pydantic", "flwr", "torch", "safetensors"):
    sys.modules[missing] = None
import fedlora.runs, fedlora.training, fedlora.flower
for package, name, extra in (
    (fedlora.runs, "load_config", "train"), (fedlora.training, "LocalTrainer", "train"),
    (fedlora.flower, "FedLoRA", "flower"),
):
    try:
        getattr(package, name)
    except ModuleNotFoundError as error:
        assert f"{package.__name__}.{name} needs " in str(error) and f"fedlora[{extra}]" in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_version() -> None:
    """`make` does not install again where only the version has changed."""
    assert version("fedlora") == fedlora.__version__, (
        f"{version('fedlora')} is installed: .venv/bin/python -m pip install --no-deps --no-build-isolation -e ."
    )


SCRIPTS = sorted(
    path for folder in ("benchmarks", "tools", "docs", "examples") for path in (ROOT / folder).rglob("*.py")
)


def test_what_scripts_import_of_fedlora_is_there() -> None:
    """Inside functions, too: a benchmark that is rarely run kept a name that had moved."""
    nodes = [node for script in SCRIPTS for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "fedlora":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
