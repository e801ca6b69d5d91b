"""Flower's SuperNode as a process that ends when its work ends, and with the process that started it.

`flower-supernode` alone may stay as a shell: where a reply is an error that Flower does not try again (429, 500), its
main function returns, and where its heartbeat fails, that thread ends; the process lives on and the site is offline for
ever. Here both end the process, so that `fedlora flower node` sees it and starts another.

And its loop pulls one message and sends one reply. Where a SuperLink dies between the two, a reply is left over, and
from then on each reply waits for the next message: every round sees that site late. An idle loop sends what is left.

    python -m fedlora.flower.site.supernode ARGUMENTS OF flower-supernode
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from fedlora.flower.site.owner import OWNER

BROKEN_OFF = 70  # exit code: the connection broke in a way that Flower does not try again
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    _end_with_owner()
    threading.excepthook = _thread_failed
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    loop._pull_and_store_message = with_replies_left(loop._pull_and_store_message)
    sys.argv[0] = "flower-supernode"
    flower_supernode()  # leaves by an exception of its own where it ends on purpose
    _leave("the connection broke off, and Flower does not try again")


def with_replies_left(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Flower's pull, which returns the run of a message that came, or None: with none, the run of a reply that was
    never sent, so that the loop sends it."""

    def pulled(*, state: Any, **more: Any) -> int | None:
        run: int | None = pull(state=state, **more)
        if run is not None:
            return run
        with state.lock_msg_store:
            left = [entry.message.metadata for entry in state.msg_store.values() if not entry.is_retrieved]
        return next((int(found.run_id) for found in left if found.reply_to_message_id), None)

    return pulled


def _end_with_owner() -> None:
    """Be asked to end when the process that started this one is gone, however it went."""
    owner = os.environ.get(OWNER, "")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if owner.isdigit() and os.getppid() != int(owner):
        raise SystemExit("fedlora: the process that started this SuperNode is gone")


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    name = failed.thread.name if failed.thread is not None else "unknown"
    _leave(f"the thread {name} ended with {failed.exc_type.__name__}: {failed.exc_value}")


def _leave(why: str) -> None:
    print(f"fedlora: {why}", file=sys.stderr, flush=True)
    os._exit(BROKEN_OFF)


if __name__ == "__main__":
    main()
