"""`fedlora flower renew`: certificates and all derived files of a federation's folder anew."""

from __future__ import annotations

from typing import Annotated

import typer

from fedlora.cli.flower.common import Folder, needed
from fedlora.cli.screen import console


def renew(
    folder: Folder,
    user: Annotated[str | None, typer.Option(help="as whom the units run (default: who owns the folder)")] = None,
    memory: Annotated[str, typer.Option(help="the memory limit of the server's unit")] = "8G",
) -> None:
    """The next certificates; units, proxy, app, join files as federation.toml and policy.toml now say.

    For a certificate that ends, another name or port in federation.toml, a folder that was moved, an upgrade. Keys,
    settings, policy and what the rounds left stay as they are.
    """
    needed()
    from fedlora.flower.setup.renewal import renew as renewed

    done = renewed(folder, user=user, memory=memory)
    here = folder.resolve()
    lines = [
        *(["the SuperLink's own certificate is new: start `fedlora flower serve` again"] if done.loopback else []),
        *(["the proxy's certificate is new: systemctl reload fedlora-proxy"] if done.public else []),
        *(f"{path.relative_to(here)}: written anew" for path in done.changed),
        *(["join files have changed: where name, port or authority did, hand them out"] if done.handed else []),
    ]
    console.print("\n".join(lines or ["all is as it should be."]), markup=False, highlight=False, soft_wrap=True)


__all__ = ["renew"]
