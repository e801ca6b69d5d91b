"""The only door of a federation: nginx in front of the SuperLink, with a configuration of its own.

Flower's open-source SuperLink has no accounts: whoever reaches its port can run Python on the server. So it listens on
loopback, and this proxy passes what SuperNodes ask for, and nothing else:

    a site --TLS, the server's name--> nginx --TLS, loopback--> SuperLink
           POST /v1/fleet/NAME passes; every other request is answered 403 and goes nowhere

A request passes by its raw first line. What nginx would make of a path (dots, escapes, double slashes, a full URL) is
never asked, so there is no second reading of it that could reach another part of the SuperLink.
"""

from __future__ import annotations

from pathlib import Path

from fedlora.errors import ConfigError

FLEET = (
    "activate-node", "confirm-message-received", "deactivate-node", "get-fab", "get-run", "pull-messages",
    "pull-object", "push-messages", "push-object", "register-node", "send-node-heartbeat", "unregister-node",
)  # fmt: skip
"""What a SuperNode of flwr 1.41 calls. All are POST to /v1/fleet/."""

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
    """Bytes of the call that says what a reply of so many tensors is made of: one object for each and one for each 5 MB
    of it, four to a tensor and 400 more in all."""
    return _LISTED * (400 + 4 * tensors)


_HEADERS = (
    "Accept", "Content-Type", "User-Agent", "flwr-component-name", "flwr-package-name", "flwr-package-version",
    "flwr-public-key", "flwr-signature", "flwr-timestamp", "x-flwr-client",
)  # fmt: skip
"""The headers that go on. Others, such as Authorization or X-Forwarded-For, are not looked at."""


def nginx_configuration(
    folder: Path, *, name: str, tensors: int, port: int = 443, superlink_port: int = 18080, listen: str = ""
) -> str:
    """The text of FED/proxy/nginx.conf.

    Works for root (workers are then nobody) and for any user. It writes below FED/proxy/state only, and no body
    touches a disk. The certificate that sites see is FED/public/server.crt.

    Args:
        folder: FED. Its `proxy/state` must exist before nginx is started.
        name: the server's, as sites call it.
        tensors: of the largest reply: two for each adapted module, and the heads.
        port: that sites connect to.
        superlink_port: of the SuperLink, on loopback.
        listen: an address of this machine to listen on. All of them, where it is empty.

    Raises:
        ConfigError: a path or name that cannot stand in an nginx configuration.
    """
    home = folder.resolve()
    for word in (str(home), name, listen):
        if not word.isprintable() or set(word) & set("\"'\\${};"):
            raise ConfigError(
                f"{word!r} cannot stand in a configuration of nginx: it has a quote, a backslash, one of ${{}}; or "
                f"something that is not printed. Take another folder or name."
            )
    passed = "\n".join(
        f"        proxy_set_header {header} $http_{header.lower().replace('-', '_')};" for header in _HEADERS
    )
    return _TEMPLATE.format(
        at=home / "proxy", certs=home / "certs", public=home / "public", name=name, port=port, passed=passed,
        listens=_listens(listen, port), superlink_port=superlink_port, body=BODY_LIMIT, calls="|".join(FLEET),
        small=CALL_LIMIT, listed=listed_limit(tensors), gate=_GATE,
        files=FILES, connections=CONNECTIONS,
    )  # fmt: skip


def _listens(address: str, port: int) -> str:
    where = [f"{address}:{port}"] if address else [f"{port}", *([f"[::]:{port}"] if _has_ipv6() else [])]
    return "\n".join(f"        listen {one} ssl;" for one in where)


def _has_ipv6() -> bool:
    """Whether this machine does; nginx does not start on an address that is not there."""
    return Path("/proc/net/if_inet6").exists()


_TEMPLATE = """\
# Written by `fedlora flower init`. Run: nginx -c {at}/nginx.conf
# One door: SuperNodes' calls to {name}:{port} go to the SuperLink on loopback; everything else is 403.
daemon off;
worker_processes 1;
pid "{at}/state/nginx.pid";
lock_file "{at}/state/nginx.lock";
error_log "{at}/state/error.log" warn;
worker_rlimit_nofile {files};

events {{
    worker_connections {connections};
}}

http {{
    server_tokens off;
    default_type text/plain;

    # The first line of a request, as it came: method, path and version at once.
    map $request $passes {{
        default 0;
        "~^POST /v1/fleet/({calls}) HTTP/1[.]1$" 1;
    }}
    # Flower sends bodies of a known length. Chunked ones are a way to smuggle a second request.
    map $http_transfer_encoding $chunked {{
        default 1;
        "" 0;
    }}
    # What is worth a line: nodes that come, and whatever is refused. Never a body, a key or a signature.
    map "$status $request" $notable {{
        default 1;
        "~^2.. POST /v1/fleet/(activate|register|deactivate|unregister)-node " 1;
        "~^2" 0;
    }}
    log_format plain escape=json
        '$time_iso8601 $remote_addr "$request" $status in=$request_length out=$bytes_sent s=$request_time';
    access_log "{at}/state/access.log" plain if=$notable;

    # By address. An honest node has four requests open at most; those above the rate wait, they are not refused.
    # 503, since nodes try again after it (after 429 they end).
    limit_req_zone $binary_remote_addr zone=requests:10m rate=500r/s;
    limit_req_zone $binary_remote_addr zone=replies:10m rate=1r/s;
    limit_conn_zone $binary_remote_addr zone=connections:10m;
    limit_req_log_level warn;
    limit_req_status 503;
    limit_conn_status 503;

    client_body_buffer_size {body};
    client_body_in_single_buffer on;
    client_header_buffer_size 4k;
    large_client_header_buffers 4 8k;
    client_header_timeout 10s;    # from the connection on: TLS and the headers
    client_body_timeout 30s;
    send_timeout 30s;
    keepalive_timeout 75s;
    keepalive_requests 100000;
    reset_timedout_connection on;
    client_body_temp_path "{at}/state/temp-body";
    proxy_temp_path "{at}/state/temp-proxy";
    fastcgi_temp_path "{at}/state/temp-fastcgi";
    uwsgi_temp_path "{at}/state/temp-uwsgi";
    scgi_temp_path "{at}/state/temp-scgi";

    upstream superlink {{
        server 127.0.0.1:{superlink_port} max_fails=0;
        keepalive 16;
        keepalive_timeout 3s;    # uvicorn closes idle connections after 5 s
    }}

    server {{
{listens}
        server_name {name};

        ssl_certificate "{public}/server.crt";
        ssl_certificate_key "{public}/server.key";
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;
        ssl_session_cache shared:tls:2m;
        ssl_session_tickets off;

        # Malformed requests too: one line, and no page of nginx. (Its name, not its version, stands in every answer's
        # `Server`, which nginx without other modules cannot leave out.)
        error_page 400 403 404 405 408 411 414 421 431 494 495 496 497 500 501 505 =403 /closed;
        error_page 413 502 503 504 /failed;

        proxy_http_version 1.1;
        proxy_pass_request_headers off;
        proxy_set_header Host localhost;
        proxy_set_header Connection "";
        proxy_set_header X-Forwarded-For $remote_addr;
{passed}
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate "{certs}/ca.crt";
        proxy_ssl_name localhost;
        proxy_ssl_server_name on;
        proxy_ssl_protocols TLSv1.2 TLSv1.3;
        proxy_next_upstream off;
        proxy_connect_timeout 5s;
        proxy_read_timeout 60s;
        proxy_send_timeout 60s;
        proxy_max_temp_file_size 0;
        proxy_redirect off;
        proxy_hide_header Server;

        # What a node says of a reply lists its objects, and the SuperLink writes each of them down.
        location = /v1/fleet/push-messages {{
            client_max_body_size {listed};
            limit_req zone=replies burst=30;
{gate}
        }}

        location = /v1/fleet/push-object {{
            client_max_body_size {body};
{gate}
        }}

        location / {{
            client_max_body_size {small};
{gate}
        }}

        location = /closed {{
            internal;
            return 403 "closed\\n";
        }}

        location = /failed {{
            internal;
            return 503 "not now\\n";    # with the code that it failed with
        }}
    }}
}}
"""

_GATE = """\
            if ($passes = 0) { return 403; }
            if ($chunked) { return 403; }
            limit_req zone=requests burst=2000 delay=1000;
            limit_conn connections 64;
            proxy_pass https://superlink;"""

__all__ = ["BODY_LIMIT", "CALL_LIMIT", "CONNECTIONS", "FILES", "FLEET", "listed_limit", "nginx_configuration"]
