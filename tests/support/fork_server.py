"""The process from which tests have others forked: itself forked from pytest's, which has imported all that runs need.

Started by Python anew it would import that again, five seconds in each process of pytest.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import posix
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import config

TESTS = Path(__file__).parent.parent
PRELOADED = [f"support.{name}" for name in ("projects", "processes", "coarse_losses")] + ["fedlora.runs.plots"]


def fork_server() -> Any:
    """multiprocessing's context. What is not imported yet, its server imports once. All tests share it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)  # where a Python that children start finds this
        patched.setattr(util, "spawnv_passfds", _forked)
        forkserver.ensure_running()
    return context


def _forked(path: bytes, args: Sequence[str], kept: Collection[int]) -> int:
    """In the place of `spawnv_passfds(PYTHON, [..., "-c", WHAT A SERVER DOES], descriptors)`: its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns where threads run: xdist has one, which waits
        child = os.fork()
    if child:
        return child
    try:
        _as_python_begins(kept)
        exec(args[-1], {})
    except Exception:  # otherwise its caller sees an EOFError, and nobody the cause
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _as_python_begins(kept: Collection[int]) -> None:
    """Takes back what pytest and conftest.py changed. Descriptors lead nowhere and stay taken, for objects of before
    may still close them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            os.dup2(nowhere, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(k, "w", 1, "utf-8", closefd=False) for k in (1, 2))
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    importlib.reload(warnings)  # pytest gathers them, and makes errors of them
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for handler in filter(None, (known() for known in logging._handlerList)):  # libraries' own, on pytest's stderr
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # setStream flushes the old one first, which pytest may have closed
            handler.flush = sys.stderr.flush  # type: ignore[method-assign]  # as transformers sets it
    os.fsync = posix.fsync
    config.update("jaxtyping_disable", True)
    forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]  # its lock is held by who starts a server
