"""[robust] from a run's file to all that the run leaves; what cannot be kept is refused before a round. Kind:
end-to-end, contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError, FedLoRAError
from fedlora.runs.config import parse_config
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from fedlora.runs.robust import RobustSection
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping
from support.command_line import invoke, options
from support.projects import configured, ran, same_run

KRUM = ("robust.rule=krum", "robust.byzantine=0", "run.rounds=2")


def test_keys_make_the_rules_that_they_name() -> None:
    for keys, rule in {
        (("rule", "none"),): None,
        (("rule", "norm-clipping"),): NormClipping(),
        (("rule", "norm-clipping"), ("threshold", 2.0)): NormClipping(2.0),
        (("rule", "geometric-median"), ("byzantine", 0.2), ("nnm", True)): NNM(GeometricMedian(), 0.2),
        (("rule", "krum"), ("byzantine", 2)): Krum(2),
        (("rule", "multi-krum"), ("byzantine", 0.25), ("nnm", True)): NNM(MultiKrum(0.25), 0.25),
        (("rule", "centered-clipping"), ("tau", "median"), ("iterations", 1)): CenteredClipping(None, 1),
    }.items():
        assert RobustSection.model_validate(dict(keys)).build() == rule


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"rule": "krum"}, "needs robust.byzantine"),
        ({"rule": "norm-clipping", "nnm": True}, "nnm needs robust.byzantine"),
        ({"rule": "norm-clipping", "byzantine": 1}, "byzantine is for .*nnm"),
        ({"rule": "krum", "byzantine": 0.5}, "below one half"),
        ({"rule": "norm-clipping", "threshold": "mean"}, "threshold"),
    ],
)
def test_keys_that_make_no_rule_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config({"model": {"name": "m"}, "data": {"train": "t.csv"}, "robust": keys})


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("robust.rule=krum", "robust.byzantine=1"), r"krum \(f = 1\) needs 5 clients, but a round has 3"),
        (("robust.rule=norm-clipping", "method.name=fedit"), "averages B and A"),
        (
            ("run.keep_uploads=last", "method.name=fedsa-lora", "clients.ranks=4", "clients.count=3"),
            "never leaves a client",
        ),
        (("server.gauge_stress=10", "method.name=ffa-lora"), "gauge_stress needs both factors shared"),
        (("run.keep_uploads=last", "server.stream=true"), "server.stream keeps none"),
        (("server.quorum=3", "run.participation=0.6"), "can never be met: 2 of 3 clients take part"),
        (("robust.rule=norm-clipping", "method.rho=0.5"), "svd with that rank"),
        (("robust.rule=norm-clipping", "method.name=hetlora"), "HetLoRA.*weights or votes"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_first_round(project: Path, sets: tuple[str, ...], why: str) -> None:
    with pytest.raises(FedLoRAError, match=why):
        prepare(configured(project, *sets))


@pytest.fixture(scope="module")
def defended(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str, str]:
    """`fedlora run` with Krum: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("defended") / "run"
    result = invoke("run", project / "config.toml", "--out", out, *options(KRUM))
    return RunFolder(out), result.stdout, result.stderr


def test_metrics_summary_card_and_screen_say_what_it_did(defended: tuple[RunFolder, str, str]) -> None:
    folder, out, err = defended
    for line in folder.metrics():
        clients = line["robust"]["clients"]
        gone = [name for name, one in clients.items() if one["coefficient"] == 0]
        assert line["robust"]["rule"] == "krum" and len(gone) == 2
        assert {name: one["weight"] for name, one in clients.items()} == line["weights"]
        assert all(bool(one["reason"]) == (name in gone) and one["norm"] > 0 for name, one in clients.items())
        assert f"round {line['round']}: krum left out {', '.join(gone)} (2 of 3 clients)" in " ".join(err.split())
    summed = folder.read_json("summary.json")["robust"]
    assert sum(one["left_out"] for one in summed.values()) == 2 * len(folder.metrics())
    assert "| robust rule | krum" in (folder.path / "adapter" / "README.md").read_text()
    assert "What krum did" in out


def test_a_run_with_a_rule_resumes_to_the_same_bits_and_never_as_another_one(
    defended: tuple[RunFolder, str, str], project: Path, tmp_path: Path
) -> None:
    ran(configured(project, *KRUM), tmp_path / "run", rounds=1)
    again = ran(configured(project, *KRUM), tmp_path / "run", resume=True)
    same_run(again, defended[0])
    assert [line["robust"] for line in again.metrics()] == [line["robust"] for line in defended[0].metrics()]
    with pytest.raises(FedLoRAError, match=r"robust\.rule is 'krum' there"):
        ran(configured(project, "run.rounds=2"), tmp_path / "run", resume=True)
