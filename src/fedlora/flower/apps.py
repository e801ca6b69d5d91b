"""The ServerApp and the ClientApp. Imports that need torch stand inside: a node's ClientApp process does without.

Run configuration: folder (of the federation, on the server), resume, evaluate. Node configuration: client (its name),
config (the run.toml on that node), folder (a private directory for its trainer's socket and state), resident.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The federation of the run's folder, to its end."""
    from fedlora.flower.federation import play

    asked = context.run_config
    summary = play(
        grid, Path(str(asked["folder"])), resume=bool(asked.get("resume")), evaluate=bool(asked.get("evaluate"))
    )
    print(f"fedlora: {summary}", flush=True)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One round of this node: by its resident trainer, or in this process where resident = false."""
    said = context.node_config
    config, client, folder = Path(str(said["config"])), str(said["client"]), Path(str(said["folder"]))
    if said.get("resident", True):
        from fedlora.flower.resident import ask

        return Message(ask(config, client, folder, message.content), reply_to=message)
    from fedlora.flower.resident import node_work, private_directory

    private_directory(folder)
    return Message(node_work(config, client, folder)(message.content), reply_to=message)
