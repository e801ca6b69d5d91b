"""The closed front door: a real nginx with the file of examples/deploy, but its ports, in front of a SuperLink that
only writes down what reaches it. Kind: *attack*."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.flower.terms.certificates import write_server
from support.containers import PLACE
from support.machines import PROGRAMS, answers, free_port, machines_needed, until

pytestmark = [pytest.mark.deployment, machines_needed("nginx", machines=False)]
TEXT = (PLACE / "nginx.conf").read_text(encoding="utf-8")
FLEET = re.findall(r"[^|(]+", re.findall(r"/v1/fleet/[(]([a-z|-]+)[)] HTTP", TEXT)[0])
BODY_LIMIT, LISTED_LIMIT, CALL_LIMIT = 16 * 2**20, 512 * 2**10, 16 * 2**10


def nginx_in(folder: Path, port: int, superlink_port: int) -> list[str]:
    """The file in that federation's folder, and the command that runs it."""
    (folder / "proxy").mkdir(exist_ok=True)
    text = TEXT.replace("listen 443 ssl", f"listen {port} ssl").replace(
        "127.0.0.1:18080", f"127.0.0.1:{superlink_port}"
    )
    (folder / "nginx.conf").write_text(text)
    return [NGINX, "-p", str(folder), "-e", "proxy/error.log", "-c", "nginx.conf"]


NGINX = shutil.which("nginx", path=PROGRAMS) or "nginx"


@dataclass
class Behind:
    """What stands in for the SuperLink: answers 200 "reached", and keeps the heads and bodies of what came."""

    port: int
    came: list[tuple[bytes, bytes]] = field(default_factory=list)

    def serve(self, certs: Path) -> socket.socket:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certs / "server.crt", certs / "server.key")
        listening = socket.create_server(("127.0.0.1", self.port), backlog=200)
        threading.Thread(target=self._accept, args=(listening, context), daemon=True).start()
        return listening

    def _accept(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(plain, context), daemon=True).start()

    def _talk(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        try:
            with context.wrap_socket(plain, server_side=True) as link:
                data = b""
                while more := link.recv(65536):
                    data += more
                    head, mark, body = data.partition(b"\r\n\r\n")
                    if not mark:
                        continue
                    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
                    length, received = int(found[1]) if found else 0, bytearray(body)
                    while len(received) < length:
                        received += link.recv(65536)
                    self.came.append((head, bytes(received)))
                    data = bytes(received[length:])
                    link.sendall(b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Length: 7\r\n\r\nreached")
        except OSError:
            return


def link_to(port: int, context: ssl.SSLContext, seconds: float = 10) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=seconds)
    return context.wrap_socket(plain, server_hostname="fl.example.org")


def whole(answer: bytes) -> bool:
    """Whether the first answer in it is all there."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and length is not None and len(body) >= int(length[1])


@dataclass
class Door:
    port: int
    ca: Path
    folder: Path
    behind: Behind

    def raw(self, request: bytes, alpn: str = "http/1.1", seconds: float = 10, *, one: bool = False) -> bytes:
        """What comes back for these bytes, over TLS that is verified against the proxy's CA and name. one: no more than
        one answer is read; nginx waits 5 s for the rest of a body that it has refused."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.set_alpn_protocols([alpn])
        with link_to(self.port, context, seconds) as link:
            link.sendall(request)
            answer = b""
            with contextlib.suppress(OSError):
                while not (one and whole(answer)) and (more := link.recv(65536)):
                    answer += more
            return answer

    def ask(self, first: str, *headers: str, body: bytes = b"") -> bytes:
        lines = [first, "Host: fl.example.org", "Connection: close", f"Content-Length: {len(body)}", *headers]
        return self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("a federation")  # with a space
    write_server(folder / "certs", "fl.example.org")
    port, behind = free_port(), Behind(free_port())
    program = nginx_in(folder, port, behind.port)
    checked = subprocess.run([*program, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr and "emerg" not in checked.stderr
    listening = behind.serve(folder / "certs")
    nginx = subprocess.Popen(program)
    try:
        until(lambda: answers(port), 10, "nginx answers")
        yield Door(port, folder / "certs" / "ca.crt", folder, behind)
    finally:
        nginx.terminate()
        nginx.wait(10)
        listening.close()


def code(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0


OF_A_NODE = ["flwr-public-key: k", "flwr-signature: s", "flwr-timestamp: t", "Content-Type: application/protobuf"]
OF_A_STRANGER = [
    "X-Forwarded-For: 10.0.0.1", "Forwarded: for=10.0.0.1", "X-Real-IP: 10.0.0.1", "Authorization: Bearer x",
    "Cookie: a=b", "flwr-task-token: x", "flwr-superexec-signature: x", "X-Original-URL: /v1/control/list-runs",
    "X-HTTP-Method-Override: GET", "Upgrade: h2c",
]  # fmt: skip


def test_what_nodes_ask_for_passes_with_the_headers_of_a_node_alone(door: Door) -> None:
    before = len(door.behind.came)
    answer = door.ask("POST /v1/fleet/pull-messages HTTP/1.1", *OF_A_NODE, *OF_A_STRANGER, body=b"asked")
    assert code(answer) == 200 and answer.endswith(b"reached")
    assert b"uvicorn" not in answer and b"nginx/" not in answer
    head, body = door.behind.came[before]
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/fleet/pull-messages HTTP/1.1" and body == b"asked"
    sent = {line.split(":")[0].lower(): line.split(": ", 1)[1] for line in lines[1:]}
    assert sent["flwr-public-key"] == "k" and sent["flwr-signature"] == "s" and sent["flwr-timestamp"] == "t"
    assert sent["x-forwarded-for"] == "127.0.0.1"  # of the one who connected, here loopback
    of_a_node = {header.split(":")[0].lower() for header in OF_A_NODE}
    assert set(sent) == {"host", "content-length", "x-forwarded-for", *of_a_node}


OTHER_PATHS = """
    / /health /docs /openapi.json /v1/control/list-runs /v1/control/start-run /v1/runtime/get-nodes /closed
    /v1/fleet /v1/fleet/ /v1/fleet/other /v1/fleet/pull-messages/ /v1/fleet/pull-messages?x=1
    /v1/fleet/../control/list-runs /v1/fleet/..%2fcontrol/list-runs /v1/fleet/%2e%2e/control/list-runs
    /v1/fleet/.%2e/control/list-runs /v1/fleet/%252e%252e/control/list-runs /v1/fleet/..;/control/list-runs
    /v1/fleet/pull-messages/../../control/list-runs /v1/fleet/./pull-messages /v1/fleet/pull-messages/..
    //v1/control/list-runs //v1/fleet/pull-messages /v1//fleet/pull-messages /v1/fleet//pull-messages
    /V1/FLEET/PULL-MESSAGES /v1/Fleet/pull-messages /v1/fleet/pull%2dmessages /v1/%66leet/pull-messages
    /v1/fleet/pull-messages%00 /v1/fleet/pull-messages%0a /v1/fleet/pull-messages%20HTTP/1.1
    /v1/fleet/pull-messages;x /v1/fleet/pull-messages#x /v1\\control\\list-runs /v1/fleet/\u00e9 *
    http://127.0.0.1/v1/control/list-runs https://fl.example.org/v1/control/list-runs
    https://fl.example.org/v1/fleet/pull-messages
"""
OTHER_METHODS = ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "post"]
CLOSED = [
    *(f"{method} /v1/fleet/pull-messages HTTP/1.1" for method in OTHER_METHODS),
    *(f"POST {path} HTTP/1.1" for path in OTHER_PATHS.split()),
    "POST /v1/fleet/" + "a" * 7000 + " HTTP/1.1",
    "POST /v1/fleet/pull-messages HTTP/1.1 x HTTP/1.1",
    "CONNECT 127.0.0.1:18080 HTTP/1.1",
    "POST /v1/fleet/pull-messages HTTP/1.0",
    "POST /v1/fleet/pull-messages HTTP/2.0",
    "POST  /v1/fleet/pull-messages HTTP/1.1",
    "POST /v1/fleet/pull-messages",
    "PRI * HTTP/2.0",
]


@pytest.mark.parametrize("first", CLOSED, ids=lambda line: line[:60])
def test_every_other_request_is_403_and_nothing_of_it_reaches_the_superlink(door: Door, first: str) -> None:
    before = len(door.behind.came)
    answer = door.ask(first)
    assert (code(answer) == 403 or b" HTTP/" not in first.encode()) and b"html" not in answer, answer[:300]
    assert answer.endswith(b"closed\n") or first.startswith("HEAD")  # an HTTP/0.9 request gets no head
    assert b"nginx/" not in answer and b"reached" not in answer
    assert len(door.behind.came) == before


SMUGGLED = b"POST /v1/control/list-runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
TRICKS = {
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n5\r\nasked\r\n0\r\n\r\n",
    "length and chunked": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "chunked in disguise": b"Content-Length: 0\r\nTransfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
    "a negative length": b"Content-Length: -1\r\n\r\n" + SMUGGLED,
    "a length in hexadecimal": b"Content-Length: 0x10\r\n\r\n" + SMUGGLED,
    "no host": b"",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_second_request_cannot_be_smuggled_in(door: Door, trick: str) -> None:
    before = len(door.behind.came)
    head = b"POST /v1/fleet/pull-messages HTTP/1.1\r\n"
    host = b"" if trick == "no host" else b"Host: fl.example.org\r\nConnection: close\r\n"
    answer = door.raw(head + host + (TRICKS[trick] or b"Content-Length: 0\r\n\r\n"))
    assert code(answer) == 403, answer[:300]
    assert len(door.behind.came) == before


def test_the_second_request_of_a_connection_is_held_against_the_same_list(door: Door) -> None:
    """Two requests in one write, as with keep-alive: the first passes, the second does not."""
    before = len(door.behind.came)
    first = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
    answer = door.raw(first + SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert [int(part.split(b" ")[0]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 403]
    assert [head.split(b"\r\n")[0] for head, _ in door.behind.came[before:]] == [b"POST /v1/fleet/get-run HTTP/1.1"]


def plain(answer: bytes) -> bool:
    """Whether it is a line of ours, and no page of nginx; the name `nginx` stands in `Server` alone."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return b"html" not in answer and b"nginx" not in body and b"nginx/" not in head and len(body) < 20


@pytest.mark.parametrize("call", [*FLEET, "other"])
def test_a_call_has_no_larger_body_than_an_honest_one(door: Door, call: str) -> None:
    """push-messages lists a reply's objects, each of which costs the SuperLink a write: one such call with 16 MB took
    it away from everybody for half a minute. push-object carries one, of at most 5 MB. The others carry none."""
    limit = {"push-object": BODY_LIMIT, "push-messages": LISTED_LIMIT}.get(call, CALL_LIMIT)
    before = len(door.behind.came)
    head = f"POST /v1/fleet/{call} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {limit + 1}\r\n\r\n"
    answer = door.raw(head.encode(), one=True)
    assert code(answer) == 413 and plain(answer), answer
    assert len(door.behind.came) == before
    if call != "other":
        assert code(door.ask(f"POST /v1/fleet/{call} HTTP/1.1", body=b"x" * min(limit, 6 * 2**20))) == 200
    log = door.folder / "proxy" / "access.log"  # written once the connection is closed
    until(lambda: f'"POST /v1/fleet/{call} HTTP/1.1" 413' in log.read_text(), 5, "a line in the log")
    assert '"remote' not in log.read_text()


def test_a_flood_of_replies_waits_and_then_is_told_to_try_again(door: Door) -> None:
    """One a second is more than a site ever answers; three times thirty at once are not all let in."""
    codes: list[int] = []
    answers: list[bytes] = []

    def push() -> None:
        head = b"POST /v1/fleet/push-messages HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        answer = door.raw(head, seconds=2)
        answers.append(answer)
        codes.append(code(answer))

    pushing = [threading.Thread(target=push) for _ in range(60)]
    for one in pushing:
        one.start()
    for one in pushing:
        one.join()
    assert codes.count(503) >= 20 and codes.count(200) <= 10
    assert all(plain(answer) for answer in answers if code(answer) == 503)
    assert code(door.ask("POST /v1/fleet/get-run HTTP/1.1")) == 200, "and other calls pass meanwhile"


def test_a_superlink_with_another_certificate_gets_nothing(door: Door, tmp_path: Path) -> None:
    """Whoever takes the SuperLink's port on the server's loopback while it is down learns nothing of the sites."""
    folder, port, false = tmp_path / "fed", free_port(), Behind(free_port())
    shutil.copytree(door.folder, folder)
    write_server(tmp_path / "other", "localhost")
    listening = false.serve(tmp_path / "other")
    nginx = subprocess.Popen(nginx_in(folder, port, false.port))
    try:
        until(lambda: answers(port), 10, "nginx answers")
        other = Door(port, folder / "certs" / "ca.crt", folder, false)
        answer = other.ask("POST /v1/fleet/get-run HTTP/1.1", body=b"private")
        assert code(answer) == 502 and plain(answer)  # nodes try again after it
        assert not false.came
    finally:
        nginx.terminate()
        nginx.wait(10)
        listening.close()


def test_an_honest_burst_is_not_refused(door: Door) -> None:
    """A round of a large adapter: thousands of small objects over two connections, as fast as they are answered."""
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    context = ssl.create_default_context(cafile=str(door.ca))
    codes: list[bytes] = []

    def push() -> None:
        with link_to(door.port, context) as link, link.makefile("rb") as said:
            for _ in range(1000):
                link.sendall(head)
                codes.append(said.readline())
                while said.readline() != b"\r\n":
                    pass
                said.read(7)

    pushing = [threading.Thread(target=push) for _ in range(2)]
    for one in pushing:
        one.start()
    for one in pushing:
        one.join()
    assert codes == [b"HTTP/1.1 200 OK\r\n"] * 2000


def test_the_log_names_what_was_refused_and_holds_no_body(door: Door) -> None:
    door.ask("POST /v1/control/start-run HTTP/1.1", "flwr-signature: very-secret", body=b"private")
    door.ask("POST /v1/fleet/activate-node HTTP/1.1", "flwr-signature: very-secret", body=b"private")
    log = (door.folder / "proxy" / "access.log").read_text()
    assert '"POST /v1/control/start-run HTTP/1.1" 403' in log
    assert '"POST /v1/fleet/activate-node HTTP/1.1" 200' in log
    assert '"POST /v1/fleet/push-object HTTP/1.1" 200' not in log  # thousands a round say nothing
    for path in (door.folder / "proxy").rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert "very-secret" not in text and "private" not in text and os.path.getsize(path) < 10**6
