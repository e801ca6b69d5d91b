"""A grid on Slurm: an array script whose task k runs shard k, ends in order before its limit, and is queued again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlora.runs.config import RunConfig

_SCRIPT = """\
#!/bin/bash
# Written by `fedlora experiment sbatch`. Submit it by: bash {file}
{options}

if [ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]; then  # called by bash
{submit}
fi

# Before the time limit: end in order, queue this task again; it resumes. (scancel and preemption send TERM.)
trap 'kill "$run"; wait "$run"; scontrol requeue "$SLURM_JOB_ID"; exit' USR1
trap 'kill "$run"; wait "$run"; exit' TERM
{command} --shard "$SLURM_ARRAY_TASK_ID/{shards}" &
run=$!
wait "$run"
"""
_ONCE = '  exec sbatch "$0"'
_TWICE = """\
  search=$(sbatch --parsable "$0") || exit  # the search, and the runs that need none
  exec sbatch --dependency="afterany:${search%;*}" "$0"  # the runs that the search decides"""
_LIMIT = 120  # seconds before the time limit; a round must fit, and Slurm may be a minute late


def cores_of(config: RunConfig) -> int:
    """The number of cores that a run keeps busy; 1 if it takes what it finds."""
    workers = config.run.workers
    return workers if isinstance(workers, int) else config.run.threads or 1


def array_script(
    file: Path, command: Sequence[str], shards: int, options: Mapping[str, str], more: Sequence[str], *, search: bool
) -> str:
    """The script.

    Args:
        file: where it will be.
        command: the words of `fedlora experiment run`, without a shard.
        options: of sbatch, name -> value. more: further ones, as "--partition=gpu"; they take precedence.
        search: whether the runs that count wait for a search; then the array is submitted twice.
    """
    fixed = {"array": f"1-{shards}", "requeue": "", "open-mode": "append", "signal": f"B:USR1@{_LIMIT}", **options}
    lines = [f"--{name}={shlex.quote(value)}" if value else f"--{name}" for name, value in fixed.items()]
    return _SCRIPT.format(
        file=shlex.quote(str(file)), options="\n".join(f"#SBATCH {line}" for line in [*lines, *more]),
        submit=_TWICE if search else _ONCE, command=shlex.join(command), shards=shards,
    )  # fmt: skip
