"""One thread and no network for every test, and the fixtures of several packages.

Nothing of fedlora is imported at the top: the process that hands tests to workers needs none of it.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.command_line import Said
    from support.processes import Program
    from support.projects import Finished

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # transformers starts threads for the dozen tensors of a model
os.environ["HF_HOME"] = _STATE = tempfile.mkdtemp(prefix="fedlora-hub-")  # no model out of this user's cache
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)
pytest.register_assert_rewrite("support")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background; tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m chooses."""
    from support.tiers import divide

    divide(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Little of what imports and collecting make is garbage; looking for it took two seconds of each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What the tests imported stays until they end; without this every full collection of garbage looks at it again.
    The little that is garbage stays, too: to look for it takes longer than it is worth. What tests make goes by its
    counts of references, nearly all of it: Python's 700 new objects are passed some fifty times in a test."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Bitwise tests need a fixed thread count; small matrices are fastest with one. Imported here, since the process
    that hands tests to workers needs none of it. And for an accelerator that is not there, torch keeps each seed with a
    traceback, for three quarters of a millisecond."""
    import torch

    torch.set_num_threads(1)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """Files need not survive a power cut here. Processes of their own do wait for the disk; that one which refuses is
    heard is asked in test_checkpoint.py."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _coarse_losses() -> None:
    """Half of the time of the tests of privacy went into digits of epsilon that they do not ask for."""
    import support.coarse_losses  # noqa: F401


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The entry point `fedlora ARGS`, in this process, where errors become exit codes."""
    from support.command_line import entry_point

    return entry_point(monkeypatch, capsys)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal as wide as it takes."""
    from support.command_line import widen

    widen(monkeypatch)


@pytest.fixture
def drawn() -> Iterator[None]:
    """The pictures of runs and comparisons, which other tests go without."""
    from support.command_line import drawing

    with drawing():
        yield


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: a model, some text, a config. Read-only: a test that changes a file makes its own."""
    from support.projects import make_project

    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def finished(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`fedlora run config.toml --out ...`, GLoRA on ranks 2, 4, 4. Tests read it and change nothing."""
    from support.projects import finished_run

    return finished_run(project, tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="session")
def forked() -> Any:
    """The context of processes that are forked from this one: for tests that kill processes."""
    return multiprocessing.get_context("fork")


@pytest.fixture(scope="session")
def program(forked: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Program]:
    """`python SCRIPT ARGS` without the seconds in which Python imports torch."""
    from support.processes import Program, begun, script

    def begin(path: Path, *args: object) -> Program:
        said = tmp_path_factory.mktemp("said")
        return Program(begun(forked, script, path, [str(arg) for arg in args], said), said)

    return begin


@pytest.fixture
def fine_losses() -> Iterator[None]:
    """Epsilon to the digits that users have."""
    from support.coarse_losses import fine

    with fine():
        yield
