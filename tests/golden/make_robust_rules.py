"""Write robust_rules.json: what ByzFL's rules make of plain vectors. Needs byzfl, which is no dependency of ours:

    pip install --no-deps --target BYZFL byzfl==0.0.11
    PYTHONPATH=BYZFL python tests/golden/make_robust_rules.py

Without its dependencies, for `import byzfl` imports torchvision, matplotlib and seaborn: `byzfl_rules` takes the two
modules of aggregators out of the package and imports nothing else of it (they need numpy, scipy and torch).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
D_OUT, D_IN = 3, 4
Rules = dict[str, Callable[[np.ndarray], np.ndarray]]


def byzfl_rules() -> tuple[Any, Any]:
    """ByzFL's aggregators and preaggregators. Raises `ModuleNotFoundError` where it is not installed."""
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl")
        if found is None:
            raise ModuleNotFoundError("byzfl is not installed")
        bare = types.ModuleType("byzfl")
        bare.__path__ = list(found.submodule_search_locations or ())
        sys.modules["byzfl"] = bare
    return tuple(importlib.import_module(f"byzfl.aggregators.{name}") for name in ("aggregators", "preaggregators"))  # type: ignore[return-value]


def rules(byzantine: int, bound: float) -> Rules:
    """Our rule and its keys, as JSON -> ByzFL's function of the vectors (n, d)."""
    plain, before = byzfl_rules()

    def clipped(X: np.ndarray) -> np.ndarray:
        return np.mean(before.Clipping(bound)(X.copy()), axis=0)

    def median(X: np.ndarray) -> np.ndarray:
        return plain.GeometricMedian(nu=1e-13, T=20_000)(X)

    def named(rule: str, **keys: object) -> str:
        return json.dumps({"rule": rule, **keys})

    return {
        named("norm-clipping", threshold=bound): clipped,
        named("geometric-median"): median,
        named("krum", byzantine=byzantine): plain.Krum(byzantine),
        named("multi-krum", byzantine=byzantine): plain.MultiKrum(byzantine),
        named("centered-clipping", tau=bound, iterations=1): lambda X: plain.CenteredClipping(L=1, tau=bound)(X),
        named("centered-clipping", tau=bound, iterations=5): lambda X: plain.CenteredClipping(L=5, tau=bound)(X),
        named("geometric-median", byzantine=byzantine, nnm=True): lambda X: median(before.NNM(byzantine)(X)),
        named("krum", byzantine=byzantine, nnm=True): lambda X: plain.Krum(byzantine)(before.NNM(byzantine)(X)),
        named("multi-krum", byzantine=byzantine, nnm=True): lambda X: plain.MultiKrum(byzantine)(
            before.NNM(byzantine)(X)
        ),
        named("norm-clipping", threshold=bound, byzantine=byzantine, nnm=True): lambda X: clipped(
            before.NNM(byzantine)(X)
        ),
    }


def cases() -> dict[str, tuple[np.ndarray, int]]:
    """Name -> (vectors (n, 12), byzantine clients, who come first)."""
    rng = np.random.default_rng(18)

    def honest(n: int) -> np.ndarray:
        return rng.standard_normal(D_OUT * D_IN) + 0.6 * rng.standard_normal((n, D_OUT * D_IN))

    flipped, far, small, skewed = honest(7), honest(9), honest(8), honest(11)
    flipped[:1] *= -3
    far[:2] = 40 + honest(2)
    small[:2] *= 0.01
    skewed[:5] += 2.5 * rng.standard_normal(D_OUT * D_IN)
    return {"one flipped": (flipped, 1), "two far": (far, 2), "two small": (small, 2), "two groups": (skewed, 3)}


def main() -> None:
    made = {}
    for name, (X, byzantine) in cases().items():
        bound = float(np.median(np.linalg.norm(X, axis=1))) * 0.8
        made[name] = {
            "changes": X.tolist(),
            "rules": [
                {"keys": json.loads(keys), "aggregate": np.asarray(rule(X.copy())).tolist()}
                for keys, rule in rules(byzantine, bound).items()
            ],
        }
    (HERE / "robust_rules.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
