"""The only entrance to a federation: nginx in front of the SuperLink, with its own configuration.

Flower's open-source SuperLink has no accounts: whoever reaches its port can run Python on the server. So it listens on
loopback, and this proxy passes only the requests that SuperNodes make:

    a site --TLS, the server's name--> nginx --TLS, loopback--> SuperLink
           POST /v1/fleet/NAME passes; every other request gets 403 and goes nowhere

A request passes by its raw first line. nginx's reading of a path (dots, escapes, double slashes, a full URL) plays no
role, so no second reading of it can reach another part of the SuperLink.
"""

from __future__ import annotations

from pathlib import Path

from fedlora.flower.setup.templates import filled, plain

FLEET = (
    "activate-node", "confirm-message-received", "deactivate-node", "get-fab", "get-run", "pull-messages",
    "pull-object", "push-messages", "push-object", "register-node", "send-node-heartbeat", "unregister-node",
)  # fmt: skip
"""What a SuperNode of flwr 1.41 and 1.42 calls. All are POST to /v1/fleet/."""

BODY_LIMIT = 16 * 2**20
"""Bytes of one object. Flower cuts arrays into chunks of 5 MiB; an app is at most 10 MiB."""

CALL_LIMIT = 16 * 2**10
"""Bytes of a call that carries no object: a few ids and a key."""

CONNECTIONS = 8192
"""At once. Whoever opens one and says nothing is cut off after 10 s, before any limit by address can count him: to
fill all of them takes 819 new ones a second. Idle ones cost some kilobytes each."""

FILES = 2 * CONNECTIONS + 256
"""Of one process: each connection may have one of its own to the SuperLink."""

_LISTED = 80
"""Bytes of one object in a list of them: its id is 64 letters."""


def listed_limit(tensors: int) -> int:
    """Bytes of the call that lists the objects of a reply with this many tensors: one object per tensor and one per 5
    MB of it, at most four per tensor and 400 more in total."""
    return _LISTED * (400 + 4 * tensors)


_HEADERS = (
    "Accept", "Content-Type", "User-Agent", "flwr-component-name", "flwr-package-name", "flwr-package-version",
    "flwr-public-key", "flwr-signature", "flwr-timestamp", "x-flwr-client",
)  # fmt: skip
"""The headers that go on. Others, such as Authorization or X-Forwarded-For, are not looked at."""


def nginx_configuration(folder: Path, *, name: str, tensors: int, port: int = 443, superlink_port: int = 18080) -> str:
    """The text of FED/proxy/nginx.conf.

    It works for root (workers then run as nobody) and for any user. It writes only below FED/proxy/state, and no body
    touches a disk. Sites see the certificate FED/public/server.crt.

    Args:
        folder: FED. Its `proxy/state` must exist before nginx is started.
        name: the server's, as sites call it.
        tensors: in the largest reply: two for each adapted module, and the heads.
        port: where sites connect.
        superlink_port: the SuperLink's, on loopback.

    Raises:
        ConfigError: a path or name that an nginx configuration cannot contain.
    """
    home, name = (plain(word, "nginx's configuration") for word in (folder.resolve(), name))
    ipv6 = Path("/proc/net/if_inet6").exists()  # nginx does not start on a missing address
    return filled(
        "nginx.conf", at=f"{home}/proxy", certs=f"{home}/certs", public=f"{home}/public", name=name, port=port,
        ipv6=ipv6, superlink_port=superlink_port, headers=_HEADERS, calls=FLEET, body=BODY_LIMIT, small=CALL_LIMIT,
        listed=listed_limit(tensors), files=FILES, connections=CONNECTIONS,
    )  # fmt: skip


__all__ = ["BODY_LIMIT", "CALL_LIMIT", "CONNECTIONS", "FILES", "FLEET", "listed_limit", "nginx_configuration"]
