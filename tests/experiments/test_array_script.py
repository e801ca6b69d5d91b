"""The array script of `fedlora experiment sbatch`, with stand-ins for Slurm's commands; tests/clusters has them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.slurm import array_script
from support.command_line import invoke
from support.grids import GRID

SBATCH = '#!/bin/bash\necho "$@" >> said\ncase "$1" in --parsable) echo "71;here";; *) echo "Submitted";; esac\n'
SCONTROL = '#!/bin/bash\necho "scontrol $@" >> said\n'
RUN = """#!/bin/bash
trap 'echo ended >> said; exit 130' TERM
echo $@ > said
while :; do sleep 0.05; done
"""


def stand_ins(folder: Path) -> dict[str, str]:
    """An environment in which sbatch and scontrol write what they are asked into the file `said`."""
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("profile", "waves"),
    [("mini", ["--parsable {}", "--dependency=afterany:71 {}"]), ("plain", ["{}"])],
)
def test_bash_submits_the_search_and_then_the_runs_that_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, waves: list[str]
) -> None:
    """Twice with a dependency; once if there is one value to search."""
    (tmp_path / "two.toml").write_text(GRID + "[profiles.plain]\nseeds = [0]\ntune = [1e-2]\n")
    monkeypatch.chdir(tmp_path)
    words = ["two.toml", "--profile", profile, "--shards", 3, "--time", "04:00:00", "--gpus", 1, "--memory", "16G"]
    invoke("experiment", "sbatch", *words, "--option", "--partition=gpu", "--work", "my work")
    script = tmp_path / "my work" / "slurm" / f"two-{profile}.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    options = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert options[-1] == "--partition=gpu" and {"--array=1-3", "--requeue", "--gpus-per-task=1"} < {*options}
    assert shlex.split(next(one for one in options if one.startswith("--output"))) == [
        f"--output={script.with_suffix('')}-%A_%a.log"
    ]
    done = subprocess.run(["bash", script], cwd=tmp_path, env=stand_ins(tmp_path))
    assert done.returncode == 0
    assert (tmp_path / "said").read_text().splitlines() == [wave.format(script) for wave in waves]


@pytest.mark.parametrize(("number", "queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_task_ends_its_run_in_order_and_at_its_limit_is_queued_again(
    tmp_path: Path, number: signal.Signals, queued: bool
) -> None:
    """The run notes its shard, and that it was asked to end. Who cancels a job does not want it again."""
    run = tmp_path / "run"
    run.write_text(
        "#!/bin/bash\ntrap 'echo ended >> said; exit 130' TERM\necho $@ > said\nwhile :; do sleep 0.05; done\n"
    )
    run.chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(array_script(script, [str(run), "a b"], 4, {}, [], search=True))
    environment = {**stand_ins(tmp_path), "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "99"}
    task = subprocess.Popen(["bash", script], cwd=tmp_path, env=environment)
    while not (tmp_path / "said").exists():
        time.sleep(0.02)
    time.sleep(0.1)
    task.send_signal(number)
    task.wait(10)
    assert (tmp_path / "said").read_text().splitlines() == [
        "a b --shard 2/4",
        "ended",
        *["scontrol requeue 99"] * queued,
    ]


def test_sigterm_ends_a_grid_like_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script sends: the command leaves its runs, and says how to go on. Here the run is the signal."""
    (tmp_path / "two.toml").write_text(GRID)
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.jsonl").write_text('{"text": "a", "label": 0}\n')
    monkeypatch.setattr("fedlora.cli.experiment_runs.problems", lambda *_: [])
    monkeypatch.setattr("fedlora.cli.experiment_runs.run_stages", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    invoke("experiment", "run", "two.toml", "--work", tmp_path / "work", code=130)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--option", "partition gpu"], "got 'partition gpu'"), (["--workers", "auto"], "--workers auto")],
)
def test_what_slurm_cannot_take_is_refused(tmp_path: Path, options: list[str], why: str) -> None:
    (tmp_path / "two.toml").write_text(GRID)
    words = ["experiment", "sbatch", tmp_path / "two.toml", "--time", "10", "--work", tmp_path / "work"]
    refused = invoke(*words, *options, code=1)
    assert isinstance(refused.exception, ConfigError) and why in str(refused.exception)
    assert not (tmp_path / "work").exists()


def test_the_page_writes_the_script_that_it_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experiment and its commands, each as it stands; nothing is run."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n# (\S+)\n(.*?)```", page, flags=re.S)
    (tmp_path / toml[0]).write_text(toml[1])
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("fedlora ")]
    assert [words[1] for words in commands] == ["run", "sbatch", "run"]
    for words in commands:
        if words[1] == "run":
            invoke(*words, "--plan", code=1)  # its data are not here
        else:
            invoke(*words)
    (submitted,) = re.findall(r"^bash (\S+)$", page, flags=re.M)
    assert Path(submitted).is_file()
