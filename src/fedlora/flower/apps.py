"""The ServerApp and the ClientApp. Functions import torch themselves: a node's ClientApp process does not need it.

Run configuration: folder (the federation's, on the server). Node configuration: site (its site.toml).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from fedlora.core.text import shown
from fedlora.errors import AdapterFormatError, BudgetSpent, ConfigError, LedgerError, QuorumNotMet
from fedlora.flower import processes
from fedlora.flower.envelope import parts, receipt_of
from fedlora.flower.places import FederationFolder
from fedlora.flower.site.trainer import Do, TrainerFailed, ask

log = logging.getLogger(__name__)

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the federation in the run's folder to its end."""
    from fedlora.flower.inside import heartbeats_outlive_errors, http_inbox
    from fedlora.flower.server.federation import ending, play
    from fedlora.flower.server.journal import Journal
    from fedlora.flower.terms.facts import Disagreement

    if http_inbox(grid):  # Flower's own SIGINT does not reach a main thread that waits to push to a dead SuperLink
        processes.ends_with(os.getppid())
    home = FederationFolder(Path(str(context.run_config["folder"])))
    with _kept_log(home.logs / "serverapp.log"), heartbeats_outlive_errors(grid):
        try:
            summary = play(grid, home.path)
        except (ConfigError, AdapterFormatError, Disagreement, BudgetSpent, LedgerError) as error:
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
    """Answer with the node's resident trainer, and write a line to the site's log. A failure is answered in its own
    words, because Flower would replace the text of an exception raised here."""
    if (owner := processes.owner_of_this()) is not None:  # a ClientApp would wait for ever for a gone node
        processes.ends_with(owner)
    site_file = Path(str(context.node_config["site"]))
    began = time.monotonic()
    _say_receipt(message.content)
    try:
        reply = ask(site_file, do, message.content)
    except TrainerFailed as error:
        _say_work(do, message.content, None, time.monotonic() - began, error.full)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
    _say_work(do, message.content, reply, time.monotonic() - began)
    return Message(reply, reply_to=message)


def _say_receipt(asked: RecordDict) -> None:
    """Log that earlier work did not count, or had no weight, if the server says so."""
    with contextlib.suppress(Exception):
        if why := receipt_of(asked).why:
            _say(f"the server says: {shown(why, 1000)}")


def _say_work(do: Do, asked: RecordDict, reply: RecordDict | None, seconds: float, error: str = "") -> None:
    """Log the site's own work for the site. An error here costs no round."""
    with contextlib.suppress(Exception):
        round = int(json.loads(str(parts(asked, ConfigRecord)["config"]["parcel"]))["round"]) + (do == "train")
        metrics = parts(reply, MetricRecord)["metrics"] if reply is not None else {}
        _say(work_line(do, round, seconds, metrics, error))


def work_line(do: Do, round: int, seconds: float, metrics: Mapping[str, Any], error: str = "") -> str:
    """A message's work in words, for the site's operator. error: "" if all went well.

    Example:
        >>> work_line("train", 3, 14.21, {"num-examples": 120, "loss": 0.412})
        'round 3: trained in 14.2 s, loss 0.4120; 120 examples here'
    """
    if error:
        return f"round {round}: {do} failed after {seconds:.1f} s: {error}"
    loss = metrics.get("loss")
    ending = f", loss {loss:.4f}" if isinstance(loss, int | float) else ""
    did = {"train": "trained", "evaluate": "measured"}[do]
    return f"round {round}: {did} in {seconds:.1f} s{ending}; {int(metrics.get('num-examples', 0))} examples here"


def _say(line: str) -> None:
    """Print to stderr, where the site's node prints too."""
    print(line, file=sys.stderr, flush=True)
