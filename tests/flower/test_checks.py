"""`fedlora flower site`, its checks, and why a server is not reached. Kinds: real files, each fault made on purpose; a
server that answers as a test says."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.flower.places import SiteFolder
from fedlora.flower.site.checks import look, private_key
from fedlora.flower.terms.facts import Facts, model_facts
from fedlora.flower.terms.joining import Address, JoinFile
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from support.certificates import authority, pem, server_files
from support.command_line import Said
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ROWS = "text,label\n" + "".join(f"w{k} w{k + 1},{'no' if k % 3 == 0 else 'yes'}\n" for k in range(30))
CA = authority()


class Place:
    """A machine of a site: a base model, data, and the server's join file."""

    def __init__(self, folder: Path) -> None:
        self.root, self.site = folder, SiteFolder(folder / "site")
        self.base = save_model(folder / "base", bert(), classifies=True)
        self.data = folder / "notes.csv"
        self.data.write_text(ROWS)
        tables: dict[str, Any] = {"data": {"label_names": ["no", "yes", "maybe"], "max_length": 16}}
        self.settings = FederationSettings(id="fed-1", lora={"target_modules": ["query"]}, **tables)  # type: ignore[arg-type]
        self.facts: Facts = {}

    def join(self, port: int = 9) -> JoinFile:
        server = Address(name="127.0.0.1", port=port, ca=pem(CA))
        return JoinFile(federation="fed-1", server=server, agreed=self.settings.agreed(), facts=dict(self.facts))

    def made(self, main: Callable[..., Said], *more: object) -> Said:
        (self.root / "join.toml").write_text(self.join().text())
        return main("flower", "site", self.site.path, "--name", "acme", "--join", self.root / "join.toml", "--data",
                    self.data, "--model", self.base, *more)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_site_is_made_from_the_join_file_and_says_what_comes_next(place: Place, main: Callable[..., Said]) -> None:
    said = place.made(main, "--set", "model.device=cpu")
    assert said.code == 0, said.err
    here, site = place.site, Site.read(place.site.site)
    assert private_key(here.key).key_size == 384
    assert here.key.stat().st_mode & 0o777 == 0o600 and here.path.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE" not in here.public_key.read_text() and here.join.read_text() == place.join().text()
    assert (site.name, site.data, site.model, site.own["model"]["device"]) == (
        "acme", str(place.data), str(place.base), "cpu",
    )  # fmt: skip
    assert "examples to train on" in said.out and "maybe 0" in said.out and "key.pub" in said.out
    assert place.made(main).code == 2  # the folder stays


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        (ROWS.replace("w4 w5,yes", "w4 w5,perhaps"), [], "'perhaps'"),
        (ROWS, ["--set", "data.text=note"], "no column 'note'"),
        (ROWS, ["--set", "train.learning_rate=1"], "train.learning_rate"),
        ("text,label\n", [], "no rows"),
    ],
)
def test_what_no_round_could_use_is_refused_before_anything_is_made(
    place: Place, main: Callable[..., Said], rows: str, more: list[str], words: str
) -> None:
    place.data.write_text(rows)
    assert words in place.made(main, *more).error() and not place.site.path.exists()


def test_another_base_model_than_the_servers_is_refused(place: Place, main: Callable[..., Said]) -> None:
    """One byte of one weight; both sides' digests are named."""
    place.facts = model_facts(str(place.base), place.settings)
    weights = place.base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    said = place.made(main)
    assert said.code == 2 and place.facts["base"][:12] in said.err and not place.site.path.exists()


# ---- the server ------------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from support.deployed_folders import federation_folder, site_folder

    root = tmp_path_factory.mktemp("s")
    here = site_folder(root / "site", federation_folder(root / "fed"))
    return here, server_files(root / "server", CA, ["127.0.0.1"])


def answer(made: Any, status: int, code: int | None = None, **more: Any) -> str:
    body = json.dumps({"code": code, "detail": "so"}).encode()
    with answering(status, body, **{"files": made[1], **more}) as port:
        return look(at("127.0.0.1", port), made[0]).fate


def at(name: str, port: int) -> JoinFile:
    return JoinFile(federation="f", server=Address(name=name, port=port, ca=pem(CA)), agreed={}, facts={})


def test_each_obstacle_has_its_word(made: Any, tmp_path: Path) -> None:
    """Flower's codes: 2003, of an interval that it refuses; 2004, of a key that it does not know."""
    assert answer(made, 400, 2003) == "admitted"
    assert answer(made, 401, 2004) == "not admitted"
    assert answer(made, 502) == "no federation" and answer(made, 403) == "refused" and answer(made, 200) == "refused"
    assert answer(made, 401, 2004, late=3600.0) == "clock" and answer(made, 401, 2004, late=-3600.0) == "clock"
    assert answer(made, 401, 2004, dated=False) == "not admitted"
    other = server_files(tmp_path / "other", authority("another"), ["127.0.0.1"])
    assert answer(made, 400, 2003, files=other) == "certificate"
    assert answer(made, 400, 2003, files=server_files(tmp_path / "n", CA, ["fl.example.org"])) == "certificate"
    closed, unknown = look(at("127.0.0.1", 9), made[0]), look(at("no.such.invalid", 443), made[0])
    assert closed.fate == unknown.fate == "silent" and "refused" in closed.why and "not known" in unknown.why
