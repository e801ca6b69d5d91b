"""[attack] from a run's file to everything that the run leaves: loud in all of it, and refused where it has no place.
Kind: end-to-end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.attacks import choose_attackers
from fedlora.runs import plots
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.command_line import Said, invoke
from support.projects import configured

FLIP = ("attack.kind=sign-flip", "attack.fraction=0.4", "run.rounds=2")
NAMES = ["site-1", "site-2", "site-3"]
ATTACKER = choose_attackers(NAMES, 0.4, seed=0)
WORDS = f"sign-flip (s = 1) by 1 of 3 clients ({ATTACKER[0]})"


@pytest.fixture(scope="module")
def attacked(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str, str]:
    """`fedlora run` under attack: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("attacked") / "run"
    sets = [a for s in (*FLIP, "run.keep_uploads=last", "run.readouts=true") for a in ("--set", s)]
    result = invoke("run", project / "config.toml", "--out", out, *sets)
    return RunFolder(out), result.stdout, result.stderr


def test_the_screen_says_so_before_and_after_and_so_does_an_audit(
    attacked: tuple[RunFolder, str, str], tmp_path: Path
) -> None:
    folder, out, err = attacked
    loud = f"UNDER ATTACK, on purpose: {WORDS}"
    assert err.count(loud) == 2 and "under attack" in out and WORDS in out
    words = ("--methods", "glora", "--conditions", "10", "--plot", tmp_path / "audit.png")
    assert invoke("audit", "--from-run", folder.path, *words).stderr.count(loud) == 1


def test_every_file_says_so(attacked: tuple[RunFolder, str, str]) -> None:
    """Manifest, summary, each line, each upload; and each card, the adapter's, the best one's, each client's own: a
    warning before the first table, a row in it, and a tag."""
    folder, facts = attacked[0], {"what": "sign-flip (s = 1)", "kind": "sign-flip", "clients": list(ATTACKER)}
    assert folder.read_json("manifest.json")["attack"] == folder.read_json("summary.json")["attack"] == facts
    for line in folder.metrics():
        assert line["attack"]["what"] == "sign-flip (s = 1)" and list(line["attack"]["clients"]) == list(ATTACKER)
        assert set(line["attack"]["clients"][ATTACKER[0]]) == {"change", "honest", "left_out"}
    for name in NAMES:
        upload = json.loads((folder.uploads(2) / name / "upload.json").read_text(encoding="utf-8"))
        assert upload["attack"] == "sign-flip (s = 1)" and upload["byzantine"] is (name in ATTACKER)
    cards = [*folder.path.glob("*/README.md"), *folder.path.glob("clients/*/README.md")]
    assert len(cards) == 5
    for card in cards:
        text = card.read_text(encoding="utf-8")
        assert text.index("**Do not use this adapter.") < text.index("| | |")
        assert f"| attack | {WORDS} |" in text and "- under-attack\n" in text.split("---")[1]


def test_every_picture_of_it_says_so(attacked: tuple[RunFolder, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    titles: dict[str, str] = {}
    monkeypatch.setattr(plots, "saved", lambda figure, path: titles.update({path.name: figure.get_suptitle()}))
    plots.plot_run(attacked[0])
    assert {*titles} == {"metric.png", "spectrum.png"}
    assert all(f"UNDER ATTACK, on purpose: {WORDS}." in " ".join(title.split()) for title in titles.values())


def test_label_flips_are_in_the_data_of_the_liars_only(project: Path) -> None:
    """Three classes: 0 and 2 change places. The uploads are what training made of them."""
    plain = prepare(configured(project))
    flipped = prepare(configured(project, "attack.kind=label-flip", f"attack.clients=['{NAMES[1]}']"))
    for name in NAMES:
        before, after = plain.parts[name], flipped.parts[name]
        assert before.text == after.text and before.labels is not None and after.labels is not None
        assert list(after.labels) == ([2 - y for y in before.labels] if name == NAMES[1] else list(before.labels))
    assert flipped.manifest["attack"] == {"what": "label-flip", "kind": "label-flip", "clients": [NAMES[1]]}
    digests = [p.manifest["data"]["train"][NAMES[1]]["sha256"] for p in (plain, flipped)]
    assert digests[0] != digests[1]
    assert plain.manifest["data"]["test"] == flipped.manifest["data"]["test"]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["attack.kind=sign-flip"], "attack.fraction (of all clients) or attack.clients"),
        (["attack.kind=sign-flip", "attack.clients=['site-1','site-2','site-3']"], "all 3 clients are byzantine"),
        (["attack.kind=gauge", "attack.fraction=0.4", "method.name=ffa-lora"], "needs both factors shared"),
    ],
)
def test_what_cannot_be_is_one_line(
    project: Path, tmp_path: Path, main: Callable[..., Said], sets: list[str], words: str
) -> None:
    """Exit code 2 before anything is written."""
    more = [a for s in sets for a in ("--set", s)]
    assert words in main("run", project / "config.toml", "--out", tmp_path / "run", *more).error()
    assert not (tmp_path / "run").exists()
