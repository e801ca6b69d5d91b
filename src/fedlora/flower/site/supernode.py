"""Flower's SuperNode as a process that ends when its work ends, and runs no other app than that of the fedlora here.

Each repair names the flwr that needs it:

* 1.41, 1.42: if a reply gets an error that Flower does not retry (429, 500), `flower-supernode` returns and its process
  lives on as a shell; if its heartbeat fails, that thread ends alone. The site is then offline for ever. Here both end
  the process, so that whoever watches it (systemd, compose) starts another.
* 1.41, 1.42: its loop pulls one message and sends one reply. If a SuperLink dies between the two, a reply is left over,
  and from then on each reply waits for the next message: every round gets that site's reply late. An idle loop
  therefore sends what is left.
* Not a fault: a server sends the Flower app to run here, and its code could do all that this user may. The app's bytes
  are compared on arrival, before Flower opens them: any app but `bundle()` is refused, and the server is told.

    python -m fedlora.flower.site.supernode PID ARGUMENTS OF flower-supernode       PID: of the node that started it
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from fedlora.core.process import killed_with
from fedlora.core.text import quoted
from fedlora.flower.bundle import bundle, digest
from fedlora.flower.site.trainer import say

BROKEN_OFF = 70  # exit code: the connection broke in a way that Flower does not retry


def main() -> None:
    killed_with(int(sys.argv[1]))  # an orphan would keep the site online, without a trainer
    threading.excepthook = _thread_failed
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    loop._pull_and_store_message = watched(loop._pull_and_store_message)
    sys.argv[:2] = ["flower-supernode"]
    flower_supernode()  # raises its own exception if it ends on purpose
    _leave("the connection broke off, and Flower does not try again")


class NotOurs(Exception):
    """The server's app is not that of the fedlora here; the text has both digests."""


def watched(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Flower's pull, first called once the site is online, which it reports. It returns the run of a message that came;
    otherwise that of a reply that was never sent, so that the loop sends it, or None. It requests the app of each run
    that is new to it: any but that of the fedlora here never reaches Flower, and the server's message is answered with
    an error that says so."""
    online = threading.Event()

    def pulled(*, receive: Any, get_run: Any, get_fab: Any, state: Any, object_store: Any, **more: Any) -> int | None:
        came: list[Any] = []
        runs: list[Any] = []

        def received() -> Any:
            came.append(receive())
            return came[-1]

        def described(*asked: Any) -> Any:
            runs.append(get_run(*asked))
            return runs[-1]

        def fetched(*asked: Any) -> Any:
            app = get_fab(*asked)
            require_ours(app.content, runs[-1])
            return app

        if not online.is_set():
            online.set()
            say("admitted: online, waiting for work.")
        more |= {"state": state, "object_store": object_store}
        try:
            run = pull(receive=received, get_run=described, get_fab=fetched, **more)
        except NotOurs as refused:
            from flwr.app import Error, Message
            from flwr.common.constant import ErrorCode
            from flwr.supernode import start_client_internal as loop

            say(f"waiting: {refused}")
            error = Error(ErrorCode.INVALID_FAB, f"this site runs no such app: {refused}")
            reply = Message(error, reply_to=came[0][0])
            loop._insert_message(reply, state, object_store)
            return int(reply.metadata.run_id)
        return left_over(state) if run is None else run

    return pulled


def left_over(state: Any) -> int | None:
    """The run of a reply in Flower's state that was never sent; None if there is none."""
    with state.lock_msg_store:
        left = [entry.message.metadata for entry in state.msg_store.values() if not entry.is_retrieved]
    return next((int(found.run_id) for found in left if found.reply_to_message_id), None)


def require_ours(app: bytes, run: Any) -> None:
    """Raises `NotOurs` if these bytes are another app, or if the server's name for it differs: Flower looks for the
    unpacked app in a folder of that name, and with `..` in it that is any folder of this machine."""
    from flwr.cli.config_utils import get_fab_metadata

    if app != bundle():
        raise NotOurs(
            f"the server's Flower app has the SHA-256 {digest(app)}, and that of the fedlora here {digest(bundle())}. "
            f"Nothing of it was unpacked or run. Install the server's version of fedlora."
        )
    own = (*get_fab_metadata(app), digest(app))
    called = (run.fab_id, run.fab_version, run.fab_hash)
    if called != own:
        raise NotOurs(
            f"the server's app is {' '.join(own)}, but the server calls it {quoted(' '.join(map(str, called)))}: "
            f"Flower would run the content of a folder of that name. Nothing was run."
        )


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    name = failed.thread.name if failed.thread is not None else "unknown"
    _leave(f"the thread {name} ended with {failed.exc_type.__name__}: {failed.exc_value}")


def _leave(why: str) -> NoReturn:
    say(f"the SuperNode ends: {why}")
    os._exit(BROKEN_OFF)


if __name__ == "__main__":
    main()
