"""The server: one method lifted over all modules. It opens a round, takes uploads in, and closes it to a new state.

It knows no method by name, no engine and no network. How uploads are taken in is the round's own affair: kept until
the end or added up (`uploads`), or one clipped and noised sum (`private_round`).
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.server.sampling import sample_clients
    from fedlora.server.server import Server, start
    from fedlora.server.state import RunState, ServerState, Tally

__getattr__ = face(
    "fedlora.server",
    {
        "sampling": ("sample_clients",),
        "server": ("Server", "start"),
        "state": ("RunState", "ServerState", "Tally"),
    },
)

__all__ = ["RunState", "Server", "ServerState", "Tally", "sample_clients", "start"]
