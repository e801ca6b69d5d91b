"""The server: one method applied to all modules. It opens a round, takes in uploads, and closes it to a new state.

It knows no method by name, no engine and no network. The round decides how it takes in uploads: it keeps them until
the end, adds them up (`uploads`), or makes one clipped and noised sum (`private_round`).
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
