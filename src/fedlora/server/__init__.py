"""The server: one method applied to all modules. It opens a round, takes in uploads, and closes it to a new state.

It knows no method by name, no engine and no network. A kind of round, `Kept`, `Streamed` or `Private`, decides what
happens to uploads and in which terms the method gets them. Start with `rounds`.
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.server.kept import Kept
    from fedlora.server.private import Private
    from fedlora.server.sampling import sample_clients
    from fedlora.server.server import Server, start
    from fedlora.server.state import RunState, ServerState, Tally
    from fedlora.server.streamed import Streamed

__getattr__ = face(
    "fedlora.server",
    {
        "kept": ("Kept",),
        "private": ("Private",),
        "sampling": ("sample_clients",),
        "server": ("Server", "start"),
        "state": ("RunState", "ServerState", "Tally"),
        "streamed": ("Streamed",),
    },
)

__all__ = ["Kept", "Private", "RunState", "Server", "ServerState", "Streamed", "Tally", "sample_clients", "start"]
