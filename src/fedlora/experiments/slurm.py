"""Runs as array jobs on Slurm, by a script of our own. What is queued is asked of `squeue`: a driver may die at any
moment, and the next one finds its tasks there. No accounting database is needed.

WORK/slurm/NAME-ID.json      the tasks of an array, written before it is submitted
WORK/slurm/NAME-ID-K.log     what task K printed
"""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.grid import Planned, as_text
from fedlora.experiments.here import KILLED, TRIES, Ended
from fedlora.experiments.work import Work

_ARRAY = 1000  # tasks of one array: a site's MaxArraySize is 1001 unless it was changed
_LOOK = 10.0  # seconds between two looks into the queue
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={job} --array=0-{last} --time={time} --cpus-per-task={cores} --requeue --open-mode=append
#SBATCH --signal=B:USR1@120 --output={folder}/{job}-%a.log
{options}
# Before the time limit: end, and queue this task again; it resumes. scancel and preemption send TERM.
trap 'kill "$run"; wait "$run"; scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"; exit' USR1
trap 'kill "$run"; wait "$run"; exit' TERM
{python} -m fedlora.experiments.work {folder}/{job}.json "$SLURM_ARRAY_TASK_ID" &
run=$!
wait "$run"
"""


@dataclass(frozen=True)
class Asked:
    """What a task asks for. time: as Slurm takes it, "04:00:00". options: further ones of sbatch, "--partition=gpu"."""

    time: str
    gpus: int = 0
    memory: str | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if wrong := [one for one in self.options if not one.startswith("--") or len(one.split()) > 1]:
            raise ConfigError(f"--option takes one option of sbatch, such as --partition=gpu; got {wrong[0]!r}.")

    def words(self) -> list[str]:
        found = [f"--gpus-per-task={self.gpus}", "--ntasks=1"] if self.gpus else []
        return [*found, *([f"--mem={self.memory}"] if self.memory else []), *self.options]


def slurm(runs: Sequence[Planned], work: Work, name: str, asked: Asked, follow: Sequence[str] = ()) -> Ended:
    """The runs, a task each; a run whose task is gone without a word gets a second one.

    Args:
        name: of the experiment at its profile, by which its tasks are found again. follow: submit what is missing and
            return, and let this command be one more job, which begins when all tasks have ended.
    """
    left = {run.digest: run for run in runs}
    ours: set[str] = set()
    while left:
        queue, tries = _queued(work, name), _tries(work, name)
        for run in [run for run in left.values() if run.digest not in queue]:
            if work.line(run) is not None:
                yield left.pop(run.digest), work.why(run)
            elif (why := work.why(run)) and (run.digest in ours or tries[run.digest] >= TRIES):
                yield left.pop(run.digest), why
            elif tries[run.digest] >= TRIES:
                yield left.pop(run.digest), f"{KILLED}; --force forgets that, and gives it new tries"
        new = [run for run in left.values() if run.digest not in queue]
        for start in range(0, len(new), _ARRAY):
            _submit(new[start : start + _ARRAY], work, name, asked)
        ours |= {run.digest for run in new}
        if follow:
            if jobs := {task.partition("_")[0] for task in _queued(work, name).values()}:
                _sbatch([
                    f"--job-name={name}-next", f"--dependency=afterany:{':'.join(sorted(jobs))}", "--requeue",
                    f"--time={asked.time}", "--open-mode=append", f"--output={work.folder / 'slurm' / 'next.log'}",
                    *asked.options, f"--wrap={shlex.join(follow)}",
                ])  # fmt: skip
            return
        end = time.monotonic() + (_LOOK if left else 0)
        while time.monotonic() < end:
            yield None
            time.sleep(0.5)


def forget(work: Work, name: str, runs: Sequence[Planned]) -> None:
    """Forget how often these runs were submitted."""
    gone = [run.digest for run in runs]
    for path in _batches(work, name):
        told = json.loads(files.read(path))
        files.write(path, json.dumps({**told, "forgotten": [*told["forgotten"], *gone]}))


def _submit(runs: Sequence[Planned], work: Work, name: str, asked: Asked) -> None:
    folder, job = (work.folder / "slurm").resolve(), f"{name}-{secrets.token_hex(4)}"
    for run in runs:
        work.failure(run).unlink(missing_ok=True)
    root = None if work.data_root is None else str(work.data_root.resolve())
    told = {"data_root": root, "runs": [as_text(run) for run in runs], "forgotten": []}
    told["digests"] = [run.digest for run in runs]
    files.write(folder / f"{job}.json", json.dumps(told))
    text = _SCRIPT.format(
        job=job, last=len(runs) - 1, time=asked.time, cores=max(cores_of(run) for run in runs),
        folder=shlex.quote(str(folder)), python=shlex.quote(sys.executable),
        options="\n".join(f"#SBATCH {word}" for word in asked.words()),
    )  # fmt: skip
    _sbatch([], text)


def _sbatch(words: Sequence[str], text: str = "") -> None:
    _call(["sbatch", "--parsable", *words], text)


def _call(words: Sequence[str], text: str = "") -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120)
    except FileNotFoundError as error:
        raise ConfigError(f"{words[0]} is not here: call this on a machine that submits to Slurm.") from error
    if done.returncode:
        raise ConfigError(f"{words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _queued(work: Work, name: str) -> dict[str, str]:
    """Digest -> task of what waits or runs. By squeue, because sacct needs a database."""
    batches = {path.stem: json.loads(files.read(path))["digests"] for path in _batches(work, name)}
    lines = _call(["squeue", "--me", "-h", "-r", "-o", "%j|%i"]).splitlines()
    tasks = [line.split("|") for line in lines if line.partition("|")[0] in batches]
    return {batches[job][int(task.partition("_")[2] or 0)]: task for job, task in tasks}


def _tries(work: Work, name: str) -> Counter[str]:
    """Digest -> how often it was submitted, and not forgotten."""
    each = [json.loads(files.read(path)) for path in _batches(work, name)]
    return Counter(digest for told in each for digest in told["digests"] if digest not in told["forgotten"])


def _batches(work: Work, name: str) -> list[Path]:
    return sorted((work.folder / "slurm").glob(f"{name}-" + "[0-9a-f]" * 8 + ".json"))


def cores_of(run: Planned) -> int:
    """The number of cores that a run keeps busy; 1 if it takes what it finds."""
    workers = run.config.run.workers
    return workers if isinstance(workers, int) else run.config.run.threads or 1
