"""A Flower app of two shims without fedlora in it, and a server's folder to run it: rounds that take seconds."""

from __future__ import annotations

from pathlib import Path

from fedlora.flower.bundle import _FILES
from fedlora.flower.server.superlink import SuperLink
from fedlora.flower.terms import certificates
from support.machines import free_port

APP = {
    "pyproject.toml": _FILES["pyproject.toml"]
    .replace("fedlora-app", "changed-app")
    .replace("fedlora_app", "changed")
    .replace("server_app:", "server:")
    .replace("client_app:", "client:"),
    "LICENSE": "none\n",
    "changed/__init__.py": "",
    "changed/server.py": """\
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    folder = Path(str(context.run_config["folder"]))
    while not (folder / "enough").exists():
        asked = [Message(RecordDict(), node, "train", group_id="fed-1-1-0") for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(asked, timeout=60):
            with (folder / "replies").open("a") as file:
                file.write((reply.error.reason if reply.has_error() else "done") + "\\n")
""",
    "changed/client.py": "from flwr.clientapp import ClientApp\n\napp = ClientApp()\n",
}


def packed() -> bytes:
    from flwr.cli.build import build_fab_from_files

    return build_fab_from_files({name: text.encode() for name, text in APP.items()})[0]


def settings_with_port(home: Path, port: int) -> None:
    """A server's settings, of which its SuperLink reads the port alone."""
    text = f'id = "f"\n[data]\nlabel_names = ["a", "b"]\n[network]\nsuperlink_port = {port}\n'
    (home / "federation.toml").write_text(text)


def small_link(home: Path) -> SuperLink:
    """A server's folder, as far as its SuperLink needs one."""
    home.mkdir()
    settings_with_port(home, free_port())
    certificates.write_server(home / "certs", "localhost")
    return SuperLink(home)
