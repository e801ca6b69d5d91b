"""Runs on a cluster whose machines share their folders: as array jobs on Slurm, or as tasks of a Ray cluster.

On Slurm by a script of our own. What is queued is asked of `squeue`: a driver may die at any moment, and the next one
finds its tasks there. No accounting database is needed.

WORK/slurm/NAME-ID.json      the tasks of an array, written before it is submitted
WORK/slurm/NAME-ID-K.log     what task K printed
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError, counted
from fedlora.experiments.grid import Planned, as_text
from fedlora.experiments.here import KILLED, LOOK, TRIES, Ended
from fedlora.experiments.work import Work, begin

log = logging.getLogger(__name__)
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


def cores_of(runs: Sequence[Planned]) -> int:
    """The most cores that one of these runs keeps busy; 1 if it takes what it finds."""
    each = [(run.config.run.workers, run.config.run.threads) for run in runs]
    return max(workers if isinstance(workers, int) else threads or 1 for workers, threads in each)


# ---- Slurm -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a task asks for. time: as Slurm takes it, "04:00:00". options: further ones of sbatch, "--partition=gpu"."""

    time: str
    gpus: int = 0
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if wrong := [one for one in self.options if not one.startswith("--") or len(one.split()) > 1]:
            raise ConfigError(f"--option takes one option of sbatch, such as --partition=gpu; got {wrong[0]!r}.")

    def words(self) -> list[str]:
        return [*([f"--gpus-per-task={self.gpus}", "--ntasks=1"] if self.gpus else []), *self.options]


def slurm(runs: Sequence[Planned], work: Work, name: str, asked: Asked) -> Ended:
    """The runs, a task each; a run whose task is gone without a word gets a second one.

    Args:
        name: of the experiment at its profile, by which its tasks are found again.
    """
    left = {run.digest: run for run in runs}
    ours: set[str] = set()
    while left:
        queue, tries = _queued(work, name), Counter(d for of in _batches(work, name).values() for d in of)
        for run in [run for run in left.values() if run.digest not in queue]:
            why, spent = work.why(run), tries[run.digest] >= TRIES
            if work.line(run) is not None or (why is not None and (run.digest in ours or spent)):
                yield left.pop(run.digest), why
            elif spent:
                yield left.pop(run.digest), f"{KILLED}; --force forgets that, and gives it new tries"
        new = [run for run in left.values() if run.digest not in queue]
        for start in range(0, len(new), _ARRAY):
            _submit(new[start : start + _ARRAY], work, name, asked)
        ours |= {run.digest for run in new}
        end = time.monotonic() + (_LOOK if left else 0)
        while time.monotonic() < end:
            yield None
            time.sleep(0.5)


def forget(work: Work, name: str) -> None:
    """Forget how often the experiment's runs were submitted, but for arrays of which something is still queued."""
    living = {job for job, _ in _tasks(name)}
    for path in _batches(work, name):
        if path.stem not in living:
            path.unlink()


def _submit(runs: Sequence[Planned], work: Work, name: str, asked: Asked) -> None:
    folder, job = (work.folder / "slurm").resolve(), f"{name}-{secrets.token_hex(4)}"
    for run in runs:
        work.failure(run).unlink(missing_ok=True)
    root = None if work.data_root is None else str(work.data_root.resolve())
    tasks = {"data_root": root, "digests": [run.digest for run in runs], "runs": [as_text(run) for run in runs]}
    files.write(folder / f"{job}.json", json.dumps(tasks))
    text = _SCRIPT.format(
        job=job, last=len(runs) - 1, time=asked.time, cores=cores_of(runs), folder=shlex.quote(str(folder)),
        python=shlex.quote(sys.executable), options="\n".join(f"#SBATCH {word}" for word in asked.words()),
    )  # fmt: skip
    _call(["sbatch", "--parsable"], text)


def _call(words: Sequence[str], text: str = "") -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120)
    except FileNotFoundError as error:
        raise ConfigError(f"{words[0]} is not here: call this on a machine that submits to Slurm.") from error
    if done.returncode:
        raise ConfigError(f"{words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _tasks(name: str) -> list[tuple[str, int]]:
    """(the array's name, the task's number) of what waits or runs. By squeue, because sacct needs a database."""
    lines = [line.split("|") for line in _call(["squeue", "--me", "-h", "-r", "-o", "%j|%i"]).splitlines()]
    return [(job, int(task.partition("_")[2] or 0)) for job, task in lines if job.startswith(f"{name}-")]


def _queued(work: Work, name: str) -> set[str]:
    """Digests of what waits or runs."""
    batches = {path.stem: digests for path, digests in _batches(work, name).items()}
    return {batches[job][number] for job, number in _tasks(name) if job in batches}


def _batches(work: Work, name: str) -> dict[Path, list[str]]:
    """The file of each array -> its digests."""
    paths = sorted((work.folder / "slurm").glob(f"{name}-" + "[0-9a-f]" * 8 + ".json"))
    return {path: json.loads(files.read(path))["digests"] for path in paths}


# ---- Ray ---------------------------------------------------------------------------------------------------------


def ray_tasks(runs: Sequence[Planned], work: Work, gpus: int | None) -> Ended:
    """The runs, as many at a time as the cluster of RAY_ADDRESS, or of this machine, has cores and GPUs for. If a node
    dies, Ray begins its tasks again on another one, where they resume.

    Args:
        gpus: of each run; None: one for each run that is not for the CPU, if the cluster has GPUs.

    Raises:
        ConfigError: no Ray, no such cluster, or none of its nodes has room for a run.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--backend ray needs Ray: pip install 'fedlora[ray]'.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what Ray will do one day
            ray.init("auto", log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers here or at RAY_ADDRESS: {str(error).splitlines()[0]} Start one (ray start --head)."
        ) from error
    if gpus is None:
        on_gpu = any(run.config.model.device != "cpu" for run in runs)
        gpus = int(on_gpu and any(node.get("GPU", 0) for node in _nodes(ray)))
    asked = {"CPU": cores_of(runs), "GPU": gpus}
    if not _room(ray, asked):
        raise ConfigError(
            f"a run asks for {counted(asked['CPU'], 'core')} and {counted(gpus, 'GPU')}, and none of the cluster's "
            f"{counted(len(_nodes(ray)), 'node')} has both. Ask for less (run.threads, run.workers, --gpus), or add a "
            f"node."
        )
    task = ray.remote(run_of_fedlora).options(num_cpus=asked["CPU"], num_gpus=gpus, max_retries=TRIES)
    left = {task.remote(os.getcwd(), work, run): run for run in runs}
    warned = False
    try:
        while left:
            done, _ = ray.wait(list(left), num_returns=1, timeout=LOOK)
            for one in done:
                try:
                    why = ray.get(one)
                except ray.exceptions.RayError as error:
                    why = f"{type(error).__name__}: {error}".splitlines()[0]
                yield left.pop(one), why
            if not done:
                if not warned and not _room(ray, asked):
                    log.warning("%s wait: no living node has room for one", counted(len(left), "run"))
                    warned = True
                yield None
    finally:
        for one in left:
            ray.cancel(one, force=True)


def run_of_fedlora(folder: str, work: Work, run: Planned) -> str | None:
    """In the process of a task, which Ray calls by this name. folder: where relative paths start."""
    os.chdir(folder)
    begin()
    return work(run)


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _room(ray: Any, asked: dict[str, int]) -> bool:
    return any(all(node.get(name, 0) >= number for name, number in asked.items()) for node in _nodes(ray))
