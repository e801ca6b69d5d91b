"""The in-process engine: a federation around one `Server`, as a generator over rounds.

    for record in simulate(server, clients, trainer, start(server, seed_adapter), rounds=10):
        record.state                      # the complete state: a run continues from it, bit for bit
        record.losses, record.metrics, record.seconds, record.bytes

It knows no model and no data: it reaches them through `Trainer` and `Evaluator`. The caller passes what varies: who
works (`Workers`), what the server does with uploads (its round), what happens to an upload on its way (`hooks`),
and, in experiments, who is byzantine (`adversary`). `play` also yields events within a round.
"""

from fedlora.core.messages import ClientMemory
from fedlora.core.trainer import Failed, Job, OneByOne, Trained, Trainer, Workers
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.simulation.engine import play, simulate
from fedlora.simulation.records import ClientDone, Evaluator, RoundRecord
from fedlora.simulation.round import UploadHook
from fedlora.simulation.traffic import Traffic

__all__ = [
    "ClientDone", "ClientMemory", "Evaluator", "Failed", "Job", "OneByOne", "RoundRecord", "RunState", "Traffic",
    "Trained", "Trainer", "UploadHook", "Workers", "play", "simulate", "start",
]  # fmt: skip
