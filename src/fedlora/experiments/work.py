"""One planned run in its folder, resumed if it was begun: the same function here, on Slurm and on Ray.

It writes WORK/runs/DIGEST and, if it fails, WORK/failures/DIGEST.json. Nothing else.

python -m fedlora.experiments.work TASKS NUMBER      one run of a file of tasks (`slurm`)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import DataError, FedLoRAError, LostUpdate, QuorumNotMet, UploadRefused
from fedlora.experiments import results
from fedlora.experiments.grid import LEDGER, Planned, from_text, with_ledger
from fedlora.runs.folder import RunFolder
from fedlora.runs.identity import digest_of

_DIVERGED = (UploadRefused, QuorumNotMet, LostUpdate)  # its training diverged, and would do so again


@dataclass(frozen=True)
class Work:
    """folder: for run folders and failures. data_root: for the data of `data.task`."""

    folder: Path
    data_root: Path | None = None

    def run_folder(self, run: Planned) -> RunFolder:
        return RunFolder(self.folder / "runs" / run.digest)

    def failure(self, run: Planned) -> Path:
        return self.folder / "failures" / f"{run.digest}.json"

    def why(self, run: Planned) -> str | None:
        """Why it failed, in one line; None if it did not."""
        with suppress(FileNotFoundError):
            return str(json.loads(files.read(self.failure(run)))["error"])
        return None

    def line(self, run: Planned) -> dict[str, Any] | None:
        """Its line of results; None if it is neither finished nor failed for good."""
        found = results.make(run, self.run_folder(run))
        if found is None and self.failure(run).exists():
            failure = json.loads(files.read(self.failure(run)))
            return results.failed(run, failure["error"]) if failure["diverged"] else None
        return found

    def __call__(self, run: Planned) -> str | None:
        """None, or one line that says why it failed."""
        for _ in self.steps(run):
            pass
        return self.why(run)

    def steps(self, run: Planned) -> Iterator[None]:
        """The run, round by round. What fails is kept in `failure`, and does not end the others."""
        from fedlora.runs.execution import execute  # imports transformers, only in processes that run
        from fedlora.runs.preparation import prepare
        from fedlora.runs.tracking import Called

        folder = self.run_folder(run)
        self.failure(run).unlink(missing_ok=True)
        try:
            if folder.finished():
                return
            config = with_ledger(run.config, str((folder.path / LEDGER).resolve()))
            prepared = prepare(config, self.data_root)
            if digest_of(run.config) != run.digest:  # else new data would stand under the name of the old
                raise DataError("a file that the run reads changed after the experiment was started. Start it again.")
            for _ in execute(prepared, folder, resume=True, called=Called(run.label, run.experiment)):
                yield
        except Exception as error:
            kind = "" if isinstance(error, FedLoRAError) else f"{type(error).__name__}: "
            failure = {
                "run": run.label, "error": f"{kind}{error}".splitlines()[0], "diverged": isinstance(error, _DIVERGED),
                "traceback": "".join(traceback.format_exception(error)),
            }  # fmt: skip
            with suppress(OSError):  # a full disk; the driver sees that the run has not ended
                files.write(self.failure(run), json.dumps(failure, indent=2) + "\n")
        finally:
            gc.collect()  # models have reference cycles, and a process makes many runs


def begin(gpus: str = "") -> None:
    """How a process begins that makes runs. gpus: its own, for CUDA_VISIBLE_DEVICES; "" leaves it those of its
    parent."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # CUDA reads it when the process first uses a GPU
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()


def main(tasks: Path, number: int) -> int:
    """A task of an array job. tasks: {"data_root", "runs"}, in WORK/slurm."""
    begin()
    array = json.loads(files.read(tasks))
    root = None if array["data_root"] is None else Path(array["data_root"])
    why = Work(tasks.parents[1], root)(from_text(array["runs"][number]))
    print(why or "done", flush=True)
    return int(why is not None)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
