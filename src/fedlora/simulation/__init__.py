"""The in-process engine: a federation around one `Server`, as a generator over rounds.

    for record in simulate(server, clients, trainer, start(server, seed_adapter), rounds=10):
        record.state                      # all there is to store: a run continues from it, bit for bit
        record.losses, record.metrics, record.seconds, record.bytes

Knows no model and no data: `Trainer` and `Evaluator` are what it needs of them. What varies is handed in: who does
the work (`Workers`), how the server takes uploads in (its own options), what happens to an upload on its way
(`hooks`), and, in experiments, who lies (`adversary`). `play` yields what happens in between, too.
"""

from fedlora.core.messages import ClientMemory, as_pruned
from fedlora.core.trainer import Failed, Job, OneByOne, Trained, Trainer, Workers
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.simulation.engine import play, simulate
from fedlora.simulation.hooks import UploadHook
from fedlora.simulation.records import ClientDone, Evaluator, RoundRecord
from fedlora.simulation.traffic import Traffic

__all__ = [
    "ClientDone", "ClientMemory", "Evaluator", "Failed", "Job", "OneByOne", "RoundRecord", "RunState", "Traffic",
    "Trained", "Trainer", "UploadHook", "Workers", "as_pruned", "play", "simulate", "start",
]  # fmt: skip
