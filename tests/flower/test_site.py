"""`fedlora flower site` and a site's checks. Kinds of evidence: real files, each fault made on purpose."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.flower.places import SiteFolder
from fedlora.flower.site import site_checks
from fedlora.flower.site.reach import private_key
from fedlora.flower.terms.agreement import versions_here
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from fedlora.training.digests import base_digest
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.shown_certificates import answering, authority, server_files
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROWS = "text,label\n" + "".join(f"w{k} w{k + 1},{'no' if k % 3 == 0 else 'yes'}\n" for k in range(30))


class Place:
    """A machine of a site: a base model, data, and the server's join file."""

    def __init__(self, folder: Path, port: int) -> None:
        self.root = folder
        self.base = save_model(folder / "base", bert(), classifies=True)
        self.data = folder / "notes.csv"
        self.data.write_text(ROWS)
        self.ca = authority()
        self.site = SiteFolder(folder / "site")
        self.settings: dict[str, Any] = {"data": {"labels": ["no", "yes", "maybe"], "max_length": 16}}
        self.port, self.federation = port, "fed-1"
        self.facts: dict[str, Any] = {}  # what the server knows

    def join(self, name: str = "acme") -> Path:
        settings = FederationSettings.from_travelling(
            json.dumps({"id": self.federation, "lora": {"targets": ["query"]}, **self.settings})
        )
        said = JoinFile(
            self.federation,
            name,
            4,
            "127.0.0.1",
            self.port,
            self.ca.pem,
            settings.travelling(),
            self.facts,
        )
        (self.root / "join.toml").write_text(said.text())
        return self.root / "join.toml"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Place(tmp_path, free.getsockname()[1])


@pytest.fixture
def made(place: Place, main: Callable[..., Said]) -> Callable[..., Said]:
    def make(*more: object) -> Said:
        return main("flower", "site", place.site.path, "--join", place.join(), "--data", place.data, "--model",
                    place.base, *more)  # fmt: skip

    return make


def test_a_site_is_made_from_the_join_file_and_says_what_comes_next(place: Place, made: Callable[..., Said]) -> None:
    """Its files and their modes; the request holds the public half and nothing of the data; the server is away."""
    said = made("--device", "cpu")
    assert said.code == 0, said.err
    here = place.site
    request = Request.read(here.request)
    assert (request.federation, request.site, request.public_key) == (
        "fed-1",
        "acme",
        here.public_key.read_text().strip(),
    )
    private_key(here.key)
    assert here.key.stat().st_mode & 0o777 == 0o600 and here.path.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE" not in here.request.read_text() and "notes" not in here.request.read_text()
    assert here.join.read_bytes() == (place.root / "join.toml").read_bytes()
    site = Site.read(here.site)
    assert (site.name, site.data, site.model, site.device) == ("acme", str(place.data), str(place.base), "cpu")
    assert "24 examples to train on" in said.out and "yes 16, maybe 0" in said.out
    assert "nothing listens at port" in said.out and "not yet" in said.out
    assert request.fingerprint in said.out and f"fedlora flower node {here.path}" in said.out
    again = made()
    assert again.code == 2 and "site 'acme'" in again.err and "--rotate" in again.err
    assert Request.read(here.request) == request


def test_what_a_check_advises_is_shown_whole(place: Place, made: Callable[..., Said]) -> None:
    """The last words of the longest of these lines, of a server without a SuperLink: before, "..." stood there."""
    with answering(502, files=server_files(place.root / "server", place.ca, ["127.0.0.1"])) as place.port:
        said = made()
    assert said.code == 0 and "federation is over." in said.out, said.out


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        (ROWS.replace("w4 w5,yes", "w4 w5,perhaps"), [], "'perhaps'"),
        (ROWS, ["--text", "note"], "no column 'note'; "),
        ("text,label\n", [], "no rows"),
        ("text,label\nw1 w2,yes\n", [], "notes.csv, the file of 'acme'"),  # one example, and shares to hold out of it
    ],
)
def test_data_that_no_round_could_use_are_refused_before_anything_is_made(
    place: Place, made: Callable[..., Said], rows: str, more: list[str], words: str
) -> None:
    place.data.write_text(rows)
    said = made(*more)
    assert said.code == 2 and words in said.err and "nothing was sent" in said.err
    assert not place.site.path.exists()


def test_another_base_model_or_version_than_the_servers_is_refused_before_anything_is_made(
    place: Place, made: Callable[..., Said]
) -> None:
    """One byte of one weight; another version of fedlora; another minor one of torch is none."""
    place.facts = {"base": base_digest(place.base), "versions": versions_here()}
    weights = place.base / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    said = made()
    assert said.code == 2 and "was not made" in said.err and not place.site.path.exists()
    assert place.facts["base"][:12] in said.err  # both sides' are named
    weights.write_bytes(good)
    place.facts["versions"]["fedlora"] = "9.9.0"
    said = made()
    assert said.code == 2 and "fedlora is 9.9.0" in said.err and not place.site.path.exists()
    place.facts["versions"] = {**versions_here(), "torch": "2.0.0"}
    said = made()
    assert said.code == 0 and "as the server's" in said.out
    assert Request.read(place.site.request).facts["base"] == place.facts["base"]


def test_options_that_are_missing_or_contradict(
    place: Place, made: Callable[..., Said], main: Callable[..., Said]
) -> None:
    assert "--data is missing" in main("flower", "site", place.site.path, "--join", place.join()).err
    assert "not made by `fedlora flower site`" in main("flower", "site", place.site.path, "--rotate").err
    assert "leave out --join, --data, --model" in made("--rotate").err
    (place.site.path / "sub").mkdir(parents=True)
    assert "is not empty" in made().err


def test_a_key_is_rotated_with_its_request(place: Place, made: Callable[..., Said], main: Callable[..., Said]) -> None:
    assert made().code == 0
    here, old = place.site, Request.read(place.site.request)
    before = here.key.read_bytes()
    said = main("flower", "site", here.path, "--rotate")
    assert said.code == 0, said.err
    new = Request.read(here.request)
    assert new.fingerprint != old.fingerprint and new.fingerprint in said.out and "--rotate" in said.out
    assert here.key.read_bytes() != before and here.key.stat().st_mode & 0o777 == 0o600
    assert here.public_key.read_text().strip() == new.public_key
    rows = {what: sound for what, _, sound in site_checks.checked_files(here)[0]}
    assert rows["key"] is True and not here.key.with_name("key.new").exists()


def test_a_new_join_file_is_taken_and_key_and_data_stay(
    place: Place, made: Callable[..., Said], main: Callable[..., Said]
) -> None:
    """The server has another authority and port, the folder another place; another site's file is refused."""
    assert made().code == 0
    moved = place.root / "moved"
    place.site.path.rename(moved)
    here = SiteFolder(moved)
    before = (here.key.read_bytes(), here.site.read_bytes(), here.request.read_bytes())
    place.ca, place.port = authority("another"), 4430
    said = main("flower", "site", moved, "--join", place.join())
    assert said.code == 0 and "127.0.0.1:4430" in said.out, said.err
    assert here.ca.read_text() == place.ca.pem and JoinFile.read(here.join).port == 4430
    assert (here.key.read_bytes(), here.site.read_bytes(), here.request.read_bytes()) == before
    assert "nothing was changed" in main("flower", "site", moved, "--join", place.join()).out  # an old file, as a rule
    assert "the site 'berlin'" in main("flower", "site", moved, "--join", place.join("berlin")).err
    place.federation = "fed-2"
    assert "for the federation fed-2, but" in main("flower", "site", moved, "--join", place.join()).err
    assert JoinFile.read(here.join).federation == "fed-1"


def test_the_checks_name_each_fault_of_a_folder(place: Place, made: Callable[..., Said]) -> None:
    assert made().code == 0
    here = place.site
    assert all(sound for _, _, sound in site_checks.checked_files(here)[0])
    faults: list[tuple[Callable[[], object], str, str]] = [
        (lambda: here.key.unlink(), "key", "cannot be read"),
        (lambda: here.site.write_text(here.site.read_text().replace("acme", "other")), "site", "for 'acme'"),
        (lambda: here.join.write_text("nonsense = 1"), "site", "join"),
    ]
    for break_it, what, words in faults:
        break_it()
        wrong = {name: found for name, found, sound in site_checks.checked_files(here)[0] if sound is False}
        assert words in wrong[what], wrong


def test_doctor_tells_a_site_and_looks_at_its_server(
    place: Place, made: Callable[..., Said], main: Callable[..., Said]
) -> None:
    files = server_files(place.root / "server", place.ca, ["127.0.0.1"])
    with answering(400, b'{"code": 2003}', files=files, late=60.0) as port:
        place.port = port
        assert made().code == 0
        said = main("doctor", place.site.path)
    assert said.code == 2 and "clock is 60 seconds ahead" in said.err
    with answering(400, b'{"code": 2003}', files=files) as port:
        place.port = port
        (place.site.join).write_bytes(place.join().read_bytes())
        said = main("doctor", place.site.path)
    assert said.code == 0 and "knows this site's key" in said.out and "24 examples" in said.out, said.err


def test_a_node_refuses_files_that_are_wrong_before_it_sends_anything(
    place: Place, made: Callable[..., Said], main: Callable[..., Said]
) -> None:
    assert made().code == 0
    place.data.unlink()
    said = main("flower", "node", place.site.path)
    assert said.code == 2 and "notes.csv does not exist" in said.err and "Nothing was sent" in said.err
    assert "not made by `fedlora flower site`" in main("flower", "node", place.base).err
