"""Certificates of any name, date and authority, and a server that shows them. No evidence by itself."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from support.certificates import DAY, Key, named, new_key, signed, write_server


@dataclass(frozen=True)
class Authority:
    """Who vouches for servers."""

    key: Key
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()


def authority(name: str = "a CA") -> Authority:
    key = new_key()
    return Authority(key, signed(named(name), key, named(name), key, -DAY, 30 * DAY))


def server_files(
    folder: Path, by: Authority, names: Sequence[str], begin: float = -1, end: float = 30
) -> tuple[Path, Path]:
    """(certificate, key) of a server of those names, from `begin` to `end` days from now."""
    key = new_key()
    made = signed(named(names[0]), key, by.certificate.subject, by.key, begin * DAY, end * DAY, names)
    write_server(folder, made, key)
    return folder / "server.crt", folder / "server.key"


@contextlib.contextmanager
def answering(
    status: int, body: bytes = b"", *, files: tuple[Path, Path] | None = None, late: float = 0.0, dated: bool = True
) -> Iterator[int]:
    """A server on loopback that answers everything so; its port. files: with TLS. late: seconds of its clock behind
    ours. dated: whether it says its time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response_only(status)
            if dated:
                self.send_header("Date", self.date_time_string(time.time() - late))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *said: Any) -> None: ...

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None: ...

    server = Quiet(("127.0.0.1", 0), Handler)
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*map(str, files))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
