"""An experiment of two methods in one set-up, its claims, its pilot and its runs, all made up: small, so that every
command takes little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import load_experiment
from support.command_line import invoke
from support.made_results import whole, write_result

SMALL = """
title = "Small"
question = "Which?"
rows = "method"
reference = "old"
metric = "test, last"
[run.model]
path = "demo"
[run.data]
train = "demo"
[run.evaluate]
metric = "loss"
[run.run]
rounds = 2
[axes.setup]
here = {}
[axes.method]
old = { "method.name" = "fedit" }
new = { "method.name" = "glora" }
[profiles.pilot]
seeds = [10, 11]
[profiles.mini]
seeds = [0, 1, 2, 3]
[profiles.same]
seeds = [0, 1, 2, 3]
"""
CLAIMS = """
[families.which]
question = "Is the new one better?"
experiment = "small"
pairs = [["new", "old"]]
setups = ["here"]
margin = 0.01
cap = 4
"""
PAGE = "".join(
    f"<!-- filled: small mini {kind} -->\n<!-- end -->\n\n" for kind in ("scores", "differences", "seeds", "rates")
)


def small_world(place: Path) -> Path:
    """experiments/small.toml, claims.toml, page.md, and the pilot's results in results."""
    (place / "experiments").mkdir(parents=True)
    (place / "experiments" / "small.toml").write_text(SMALL)
    (place / "claims.toml").write_text(CLAIMS)
    (place / "page.md").write_text(PAGE.replace("<!-- filled: small mini rates -->\n<!-- end -->\n", ""))
    make(place, "pilot")
    return place


def make(place: Path, profile: str, wanted: Callable[[str, int], bool] = lambda label, seed: True) -> list[str]:
    """Results of the profile: log-loss 0.6, of `new` 0.1 less, and of a seed its hundredth more. Returns digests."""
    experiment, made = load_experiment(place / "experiments" / "small.toml"), []
    for run in Grid(experiment, profile).runs:
        label = run.cell["method"]
        if wanted(label, run.seed):
            loss = 0.6 - 0.1 * (label == "new") + 0.01 * (run.seed % 10) + 0.001 * (label == "new") * (run.seed % 2)
            write_result(place / "results", whole(run, "loss", {"loss": round(loss, 4), "accuracy": 0.5 + loss / 10}))
            made.append(run.digest)
    return made


def where(place: Path, *more: str) -> list[str]:
    """Options of a command. more: "work", "claims"."""
    said = ["--experiments", str(place / "experiments"), "--results", str(place / "results")]
    said += ["--work", str(place / "work")] if "work" in more else []
    return said + (["--claims", str(place / "claims.toml")] if "claims" in more else [])


def planned(place: Path) -> Path:
    """`fedlora experiment plan small`. Returns the plan's path."""
    invoke("experiment", "plan", "small", *where(place, "work", "claims"))
    return place / "results" / "plans" / "small.json"
