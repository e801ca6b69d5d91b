"""Methods from elsewhere are first-class: listed, checked, built, run, checkpointed and resumed like those built in.

A plugin here is a real distribution: a module and a dist-info folder with entry points on the Python path. Kinds of
evidence: end-to-end (the command line, a run of a tiny transformer, the console script as a process), contract (a
plugin that cannot be used is a row that says why, and never a traceback).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedlora import METHODS, build
from fedlora.errors import HyperparameterError
from fedlora.methods.registry import find, plugins
from fedlora.runs.folder import RunFolder
from support.command_line import Said, invoke
from support.processes import Program
from support.projects import configured, make_project, ran

MODULE = '''
"""FedIT under another name, with a hyper-parameter and a state of its own."""

from dataclasses import dataclass
from typing import ClassVar

from fedlora import LoRA, Method
from fedlora.errors import HyperparameterError
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True, eq=False)
class ToyState:
    mean: LoRA


@dataclass(frozen=True)
class Toy(Method[ToyState]):
    name: ClassVar[str] = "toy-mean"
    paper: ClassVar[str] = "a plugin [of the tests]"
    State: ClassVar[type] = ToyState
    one_rank: ClassVar[bool] = True
    claims: ClassVar[frozenset] = frozenset({"halves"})

    step: float = 1.0

    def __post_init__(self):
        if not 0 < self.step <= 1:
            raise HyperparameterError(f"toy-mean: step is a share, in (0, 1]; got {self.step}.")

    def init(self, seed):
        return ToyState(seed)

    def aggregate(self, state, updates):
        old, new = state.mean.factors, mean_factors(updates).factors
        return ToyState(LoRA(*(o + self.step * (n - o) for o, n in zip(old, new, strict=True))))

    def readout(self, state, client, rank):
        return state.mean

    def effective(self, state):
        return state.mean

    def diagnostics(self, state):
        return {"rank": state.mean.rank}


@dataclass(frozen=True)
class Needy(Toy):
    """A hyper-parameter without a default, and one that JSON does not know."""

    must: float = None
    other: object = frozenset({1})
'''
BROKEN = {
    "gone": "nowhere_to_be_found:Method",
    "quits": "quitting:Method",
    "no-method": "json:JSONDecoder",
    "no-class": "json:dumps",
    "fedit": "toy_mean:Toy",
}


def install(folder: Path, package: str, points: dict[str, str]) -> None:
    """What pip leaves of a package: its metadata, beside its modules."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[fedlora.methods]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, one of them with a sound method."""
    folder = tmp_path / "site"
    install(folder, "toy-package", {"toy-mean": "toy_mean:Toy"})
    (folder / "toy_mean.py").write_text(MODULE)
    (folder / "quitting.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # what "module:Class" adds to it is gone afterwards
    yield folder
    for name in ("toy_mean", "quitting", "my_method"):
        sys.modules.pop(name, None)


def test_an_installed_method_is_built_by_its_name(site: Path) -> None:
    """With its hyper-parameters; errors are those of a built-in one."""
    import toy_mean  # type: ignore[import-not-found]

    assert [point.name for point in plugins()] == ["toy-mean"]
    assert build("toy-mean") == toy_mean.Toy() == build("toy_mean:Toy")
    assert build("toy-mean", step=0.5) == toy_mean.Toy(step=0.5)
    for hparams, says in (
        ({"stap": 1.0}, "'stap'; did you mean 'step'"),
        ({"step": 2.0}, "toy-mean: step .*got 2.0"),
    ):
        with pytest.raises(HyperparameterError, match=says):
            build("toy-mean", **hparams)  # type: ignore[arg-type]
    with pytest.raises(HyperparameterError, match="'toy-maen'; did you mean 'toy-mean'"):
        build("toy-maen")


def test_a_plugin_that_cannot_be_used_is_a_row_that_says_why(site: Path, wide: None) -> None:
    """By hand: no module, a module that leaves, a class and a function that are no methods, a name that is ours."""
    install(site, "broken-package", {**BROKEN, "needy": "toy_mean:Needy"})
    listed = json.loads(invoke("methods", "--json").stdout)
    whys = {name: facts["error"] for name, facts in listed.items() if "error" in facts}
    assert set(whys) == {"gone", "quits", "no-method", "no-class", "fedit@broken-package"}
    for name, says in {
        "gone": "No module named 'nowhere_to_be_found'",
        "quits": "SystemExit: 3",
        "no-method": "a class that derives from fedlora.Method",
        "no-class": "a class that derives from fedlora.Method",
        "fedit@broken-package": "fedit is built in",
    }.items():
        assert says in whys[name] and listed[name]["package"] == "broken-package"
    assert listed["needy"]["hyper-parameters"] == {"step": 1.0, "must": None, "other": "frozenset({1})"}
    assert "fedit" not in [point.name for point in plugins()]  # or a run of FedIT would name that package
    said = " ".join(invoke("methods").stdout.split())
    assert "gone (broken-package)" in said and "SystemExit: 3" in said
    assert build("fedit") == METHODS["fedit"]() and "package" not in listed["fedit"]


def test_a_name_that_two_packages_offer_is_nobodys(site: Path) -> None:
    install(site, "other-package", {"toy-mean": "toy_mean:Needy"})
    with pytest.raises(HyperparameterError, match=r"toy_mean:Needy of other-package, toy_mean:Toy of toy-package"):
        find("toy-mean")
    assert find("toy_mean:Toy").__name__ == "Toy"


# ---- fedlora methods check -------------------------------------------------------------------------------------------


def test_check_says_what_is_claimed_and_what_was_measured(site: Path, main: Callable[..., Said], wide: None) -> None:
    said = main("methods", "check", "toy-mean", "step=0.5")
    table = " ".join(said.out.split())
    assert said.code == 0 and not said.err
    assert "Contracts of toy-mean step=0.5" in table and "│ exact │ no │ off the mean" in table
    asked = main("methods", "check", "toy-mean", "--json").out
    facts = json.loads(asked)
    assert facts["sound"] and facts["claims"] == ["halves"]
    always = ["rank", "alive", "order", "purity", "sums"]
    assert {f["contract"]: f["claimed"] for f in facts["contracts"]} == dict.fromkeys(always, "always") | {
        "exact": "no", "gauge": "no", "readouts": "no", "halves": "yes",
    }  # fmt: skip
    assert main("methods", "--json", "check", "toy-mean").out == asked


# ---- runs ------------------------------------------------------------------------------------------------------------


def last_state(folder: RunFolder) -> str:
    return max((folder.path / "checkpoints").glob("round-*.safetensors")).name


def test_an_installed_method_runs_and_resumes_to_the_bit(site: Path, tmp_path: Path) -> None:
    """Expected: the digest of the last checkpoint of an uninterrupted run, which differs from another step's."""
    project = make_project(tmp_path / "project")
    config = configured(project, "method.name=toy-mean", "method.step=0.5", "clients.ranks=[4]", "clients.count=3")
    whole = ran(config, tmp_path / "whole")
    ran(config, tmp_path / "cut", rounds=1)
    cut = ran(config, tmp_path / "cut", resume=True)
    assert last_state(whole) == last_state(cut) and last_state(whole).startswith("round-00003")
    other = ran(configured(project, "method.name=toy-mean", "clients.ranks=[4]", "clients.count=3"), tmp_path / "other")
    assert last_state(other) != last_state(whole)
    assert "toy-mean" in (whole.path / "adapter" / "README.md").read_text()
    assert whole.read_json("manifest.json")["versions"]["toy-package"] == "1.0"


def test_a_method_beside_the_user_is_found_by_the_console_script(
    site: Path, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch,
    program: Callable[..., Program],
) -> None:  # fmt: skip
    """A script has its own folder on the path, not the one where it is called: the check and the run find it alike."""
    project = make_project(tmp_path / "project")
    (project / "my_method.py").write_text(MODULE)
    script = tmp_path / "bin" / "fedlora"
    script.parent.mkdir()
    script.write_text(f"import os\nos.chdir({str(project)!r})\nfrom fedlora.cli import main\nmain()\n")
    sets = [f"--set={key}" for key in ("method.name=my_method:Toy", "clients.ranks=[4]", "run.rounds=1")]
    done = program(script, "methods", "check", "my_method:Toy").ended()
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(project)
    assert str(project) not in sys.path and "" not in sys.path  # as in the script
    ran_here = main("run", "config.toml", *sets, "--json")
    assert ran_here.code == 0 and json.loads(ran_here.out)["rounds"] == 1, ran_here.err
