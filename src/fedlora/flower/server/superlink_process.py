"""Flower's SuperLink as a process that accepts an answer only in the name of the key that signed it.

Flower knows the sender (each request is signed with the node's key), but believes what the message says about its
sender: a site that has learned the id of another's message could answer it in that site's name, and the real answer
would be dropped silently. Here both must be the same node. A forged answer is refused with HTTP 409, which the sender's
log shows, and `serve` names the sender; nothing was stored, so the real answer still counts.

flwr 1.41 and 1.42 compare the key with the request's node, and not with the message's source.

And its database waits longer for a lock. The 5 seconds of flwr 1.41 and 1.42 are too few for 100 MB adapters on a busy
machine: its SuperExec ends at the first error of the database, and the SuperLink with it.

    python -m fedlora.flower.server.superlink_process ARGUMENTS OF flower-superlink
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_PATIENCE = 60_000  # milliseconds until "database is locked"
SAYS = "fedlora: "  # begins each line of the SuperLink's log that `serve` repeats


def main() -> None:
    from flwr.supercore import sql_mixin
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers

    fleet_handlers.push_messages = under_own_name(fleet_handlers.push_messages)
    vars(sql_mixin)["SQLITE_PRAGMAS"] += (("busy_timeout", str(_PATIENCE)),)  # imported there: typed as not exported
    sys.argv[0] = "flower-superlink"
    flower_superlink()


def under_own_name(push: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler of answers, restricted to answers whose sender is the node that signed the request."""

    def pushed(request: Any, state: Any) -> Any:
        signer = request.node.node_id
        others = sorted({message.metadata.src_node_id for message in request.messages_list} - {signer})
        if others:
            from fastapi import HTTPException

            who = {node.node_id: node.name for node in state.get_node_info(node_ids=[signer, *others])}
            names = [who.get(node) or f"node {node}" for node in (signer, others[0])]
            text = f"{names[0]} sent an answer in the name of {names[1]}: refused; the answer of {names[1]} counts"
            print(f"{SAYS}{text}", file=sys.stderr, flush=True)
            raise HTTPException(409, "an answer in another node's name is refused")
        return push(request=request, state=state)

    return pushed


if __name__ == "__main__":
    main()
