"""join.toml, a site's key, and the server's certificate. Kinds of evidence: contract, *attack* (other files), real TLS
handshakes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms.certificates import new_key, verdict, write_server
from fedlora.flower.terms.joining import JoinFile, site_key
from support.shown_certificates import authority, server_files


@pytest.mark.parametrize("text", ["", "x = [", 'id = "fed"\n', 'federation = "../up"\n', "federation = 1979-05-27\n"])
def test_what_is_no_join_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "join.toml").write_text(text)
    with pytest.raises(ConfigError, match="join file"):
        JoinFile.read(tmp_path / "join.toml")


def test_a_key_of_flowers_kind_is_taken_and_no_private_one(tmp_path: Path) -> None:
    private, public = new_key()
    made = tmp_path / "made"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(made)], check=True)
    (tmp_path / "ours.pub").write_bytes(public)
    for path in (tmp_path / "ours.pub", tmp_path / "made.pub"):
        assert site_key(path).startswith("ecdsa-sha2-nistp384 ") and len(site_key(path).split()) == 2
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    (tmp_path / "ours").write_bytes(private)
    for name, words in (("ours", "private key"), ("other.pub", "elliptic curve"), ("none", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            site_key(tmp_path / name)


def test_one_certificate_is_good_for_the_name_and_for_loopback(tmp_path: Path) -> None:
    """And the next one by the same authority is, too."""
    write_server(tmp_path, "fl.example.org")
    first, ca = (tmp_path / "server.crt").read_bytes(), (tmp_path / "ca.crt").read_bytes()
    for name in ("fl.example.org", "localhost", "127.0.0.1"):
        assert verdict(tmp_path, name)[1]
    assert "Hostname mismatch" in verdict(tmp_path, "other.example.org")[0]
    write_server(tmp_path, "fl.example.org")
    assert (tmp_path / "server.crt").read_bytes() != first and (tmp_path / "ca.crt").read_bytes() == ca
    assert verdict(tmp_path, "fl.example.org")[1] and (tmp_path / "server.key").stat().st_mode & 0o77 == 0
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        write_server(tmp_path, "fl.example.org")


@pytest.mark.parametrize(("end", "words"), [(-0.5, "expired"), (10, "renew it soon"), (30.5, "valid for 30 days")])
def test_what_a_node_would_say_of_a_certificate(tmp_path: Path, end: float, words: str) -> None:
    by = authority()
    server_files(tmp_path, by, ["fl.example.org"], begin=-1, end=end)
    (tmp_path / "ca.crt").write_text(by.pem)
    assert words in verdict(tmp_path, "fl.example.org")[0]
    (tmp_path / "ca.crt").write_text(authority("another").pem)
    assert not verdict(tmp_path, "fl.example.org")[1]
    (tmp_path / "server.crt").unlink()
    assert "server.crt" in verdict(tmp_path, "fl.example.org")[0]
