"""`fedlora flower renew`: make a federation's certificates and all derived files again."""

from __future__ import annotations

from fedlora.cli.flower.common import Folder, needed
from fedlora.cli.screen import console


def renew(folder: Folder) -> None:
    """At the server: make new certificates, and write all derived files again.

    Proxy and join files become what federation.toml and policy.toml now say. Use it when a
    certificate is about to expire, after you changed the name or port in federation.toml, moved the folder, or
    upgraded. It leaves keys, settings, policy and results alone.
    """
    needed()
    from fedlora.flower.setup.renewal import renew as renewed

    done = renewed(folder)
    here = folder.resolve()
    lines = [
        *(["the SuperLink's own certificate is new: start `fedlora flower serve` again"] if done.loopback else []),
        *(["the proxy's certificate is new: sudo systemctl restart fedlora-proxy"] if done.public else []),
        *(f"{path.relative_to(here)}: written anew" for path in done.changed),
        *([f"hand every site its new join file: its {' and '.join(done.handed)} changed"] if done.handed else []),
    ]
    console.print("\n".join(lines or ["everything is up to date."]))
