"""Why a server cannot be reached, or does not let a site in. Kinds of evidence: each fault made on purpose, real TLS on
loopback; Flower's numbers are those of flwr/supercore/error/base.py."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site import reach
from fedlora.flower.site.reach import Found, clock_trouble, look, private_key
from fedlora.flower.terms.joining import JoinFile
from support.shown_certificates import answering, authority, server_files

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def written_key(path: Path, key: object = None) -> Path:
    made: ec.EllipticCurvePrivateKey = key or ec.generate_private_key(ec.SECP384R1())  # type: ignore[assignment]
    form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(made.private_bytes(serialization.Encoding.PEM, form, plain))
    return path


def found_at(port: int, folder: Path, name: str = "127.0.0.1") -> Found:
    """What the site with this folder, which has the authority's certificate, finds there with a new key."""
    written_key(folder / "key")
    return look(JoinFile("fed-1", "acme", 4, name, port, "", "{}", {}), SiteFolder(folder))


def _hasty(request: httpx.Request) -> httpx.Request:
    request.extensions["timeout"] = httpx.Timeout(0.3).as_dict()
    return request


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Found]:
    """What a site finds at a server that answers so, with TLS and a certificate of 127.0.0.1."""
    ca = authority()
    (tmp_path / "ca.crt").write_text(ca.pem)
    files = server_files(tmp_path / "server", ca, ["127.0.0.1"])

    def ask(status: int, body: bytes = b"", **how: object) -> Found:
        with answering(status, body, files=files, **how) as port:  # type: ignore[arg-type]
            return found_at(port, tmp_path)

    return ask


@pytest.mark.parametrize(
    ("status", "body", "fate", "words"),
    [
        (400, b'{"code": 2003}', "admitted", "knows this site's key"),
        (412, b'{"code": 2004}', "not admitted", "was removed"),
        (502, b"<html>", "no federation", "no SuperLink stands behind it (502)"),
        (401, b"no such key", "refused", "status 401: no such key"),
        (404, b"nothing", "refused", "status 404: nothing"),
        (200, b"hello", "refused", "not as Flower does"),
        (400, b'{"code": 77}', "refused", '{"code": 77}'),
        (500, b'["list"]', "refused", "status 500"),
    ],
)
def test_each_answer_has_its_meaning(
    asked: Callable[..., Found], status: int, body: bytes, fate: str, words: str
) -> None:
    found = asked(status, body)
    assert (found.fate, words in found.why) == (fate, True), found


@pytest.mark.parametrize(("late", "words"), [(30.0, "30 seconds ahead of"), (-600.0, "10 minutes behind")])
def test_a_clock_that_is_off_is_told_with_its_number(asked: Callable[..., Found], late: float, words: str) -> None:
    for status, body in ((401, b""), (400, b'{"code": 2003}')):
        found = asked(status, body, late=late)
        assert found.fate == "clock" and words.split()[-1] in found.why
        told = re.search(r"clock is (\d+) (second|minute)s", found.why)
        assert told and abs(int(told[1]) * (60 if told[2] == "minute" else 1) - abs(late)) < 2


def test_what_the_superlink_takes_is_no_trouble() -> None:
    """flwr takes a signature whose age by the server's clock is above -5 s and below 305 s, as our pages say."""
    assert (reach.AHEAD, reach.BEHIND) == (5, 305)
    assert not clock_trouble(3.0) and not clock_trouble(-250.0)
    assert "6 seconds ahead" in clock_trouble(6.0) and "310 seconds" not in clock_trouble(-310.0)
    assert "2 hours behind" in clock_trouble(-7_200.0) and "9 days ahead" in clock_trouble(9 * 86_400.0)


def test_a_server_that_says_no_time_and_one_without_tls(asked: Callable[..., Found], tmp_path: Path) -> None:
    found = asked(401, b"", dated=False)
    assert found.fate == "refused"
    with answering(412, b'{"code": 2004}') as port:
        found = found_at(port, tmp_path)
    assert found.fate == "silent" and "SSL" in found.why


@pytest.mark.parametrize(
    ("names", "begin", "end", "other", "words"),
    [
        (["127.0.0.1"], -9, -2, False, "expired"),
        (["127.0.0.1"], 2, 9, False, "not yet valid"),
        (["fl.example.org", "10.0.0.1"], -1, 9, False, "not valid for '127.0.0.1'"),
        (["127.0.0.1"], -1, 9, True, "issuer certificate"),
    ],
)
def test_each_kind_of_certificate_that_is_not_believed(
    tmp_path: Path, names: list[str], begin: float, end: float, other: bool, words: str
) -> None:
    ca, another = authority(), authority("another CA")
    (tmp_path / "ca.crt").write_text(ca.pem)
    files = server_files(tmp_path / "s", another if other else ca, names, begin, end)
    with answering(400, files=files) as port:
        found = found_at(port, tmp_path)
    assert found.fate == "certificate" and words in found.why, found  # OpenSSL's words, and now by this clock
    assert f"{datetime.now(UTC):%Y-%m-%d}" in found.why


def test_another_authority_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    ca, twin = authority(), authority()
    (tmp_path / "ca.crt").write_text(ca.pem)
    with answering(400, files=server_files(tmp_path / "s", twin, ["127.0.0.1"])) as port:
        found = found_at(port, tmp_path)
    assert found.fate == "certificate" and "join file" in found.why


def test_a_closed_port_an_unknown_name_a_silent_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = httpx.Client.send
    monkeypatch.setattr(httpx.Client, "send", lambda self, request, **how: sending(self, _hasty(request), **how))
    (tmp_path / "ca.crt").write_text(authority().pem)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = found_at(free.getsockname()[1], tmp_path)
    assert closed.fate == "closed" and "nothing listens at port" in closed.why
    unknown = found_at(443, tmp_path, "no-such-host.invalid")
    assert unknown.fate == "name" and "'no-such-host.invalid' is not known" in unknown.why
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(8)
        said = found_at(mute.getsockname()[1], tmp_path)
    assert said.fate == "silent" and "handshake" in said.why


def test_a_key_of_another_kind_or_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        private_key(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="another kind"):
        private_key(written_key(tmp_path / "ed", ed25519.Ed25519PrivateKey.generate()))
    (tmp_path / "broken").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(ConfigError, match="broken cannot be read"):
        private_key(tmp_path / "broken")
    (tmp_path / "ca.crt").write_text("nonsense")
    found = found_at(9, tmp_path)
    assert found.fate == "silent" and "certificate" in found.why
