"""The ServerApp and the ClientApp. Functions import torch themselves: a node's ClientApp process does not need it.

Run configuration: folder (the federation's, on the server). Node configuration: site (its site.toml).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from fedlora.core.process import ends_with
from fedlora.errors import AdapterFormatError, BudgetSpent, ConfigError, LedgerError, QuorumNotMet
from fedlora.flower import processes
from fedlora.flower.places import FederationFolder
from fedlora.flower.site.trainer import Do, TrainerFailed, ask

log = logging.getLogger(__name__)

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the federation in the run's folder to its end."""
    from fedlora.flower.inside import http_inbox
    from fedlora.flower.server.federation import ending, play
    from fedlora.flower.server.journal import Journal

    if http_inbox(grid):  # Flower's own SIGINT does not reach a main thread that waits to push to a dead SuperLink
        ends_with(os.getppid())
    home = FederationFolder(Path(str(context.run_config["folder"])))
    with _kept_log(home.logs / "serverapp.log"):
        try:
            summary = play(grid, home.path)
        except (ConfigError, AdapterFormatError, BudgetSpent, LedgerError) as error:
            log.exception("the rounds are refused")
            Journal(home.server).ended("refused", str(error))
            raise
        except QuorumNotMet:  # the strategy has told it, and `serve` tries again
            raise
        except Exception:
            log.exception("the rounds failed")
            raise
        print(f"fedlora: {ending(summary)}", flush=True)


@contextlib.contextmanager
def _kept_log(path: Path) -> Iterator[None]:
    """Also write fedlora's log to a file, because Flower shows a ServerApp's output to nobody."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        package = logging.getLogger("fedlora")
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        try:
            yield
        finally:
            package.removeHandler(handler)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round on this node."""
    return _answered(message, context, "train")


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure this node's own readout on its held-out data."""
    return _answered(message, context, "evaluate")


def _answered(message: Message, context: Context, do: Do) -> Message:
    """Answer with the node's resident trainer. A failure is answered in its own words, because Flower would replace the
    text of an exception raised here."""
    if (owner := os.environ.get(processes.OWNER)) is not None:  # a ClientApp would wait for ever for a gone node
        ends_with(int(owner))
    try:
        return Message(ask(Path(str(context.node_config["site"])), do, message.content), reply_to=message)
    except TrainerFailed as error:
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
