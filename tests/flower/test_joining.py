"""join.toml and request.toml. Kinds of evidence: *round trip*, and *attack*: files edited, swapped, cut, of others."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedlora.errors import ConfigError
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.names import server_name, sites
from fedlora.flower.terms.policy import Policy

SETTINGS = {"id": "fed-1", "model": {"task": "classification"}, "train": {"lr": 1e-05, "clip": 1.0}, "none": None}


@pytest.fixture(scope="module")
def join(tmp_path_factory: pytest.TempPathFactory) -> JoinFile:
    folder = tmp_path_factory.mktemp("public")
    certificates.write_public(folder, "fl.example.org")
    ca = (folder / "ca.crt").read_text()
    facts = {"base": "ab" * 32, "labels": ("no", "yes"), "versions": {"fedlora": "0.1.0"}, "unknown": None}
    return JoinFile("fed-1", "acme", 8, "fl.example.org", 443, ca, json.dumps(SETTINGS), facts)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_join_file_comes_back_whatever_mail_did_to_its_lines(join: JoinFile, ends: str, tmp_path: Path) -> None:
    (tmp_path / "join.toml").write_bytes(b"\xef\xbb\xbf" + join.text().replace("\n", ends).encode())
    read = JoinFile.read(tmp_path / "join.toml")
    assert (read.federation, read.site, read.rank, read.address) == ("fed-1", "acme", 8, "fl.example.org:443")
    assert read.ca.strip() == join.ca.strip()
    assert json.loads(read.settings) == {k: v for k, v in SETTINGS.items() if v is not None}
    assert read.facts == {"base": "ab" * 32, "labels": ["no", "yes"], "versions": {"fedlora": "0.1.0"}}
    assert read.text() == join.text()


def test_every_value_of_a_join_file_is_guarded(join: JoinFile, tmp_path: Path) -> None:
    """Each line that says something, changed or left out, is noticed."""
    lines = join.text().splitlines()
    path, told = tmp_path / "join.toml", 0
    for k, line in enumerate(lines):
        if "=" not in line or line.startswith("#"):
            continue
        for other in (
            lines[:k] + lines[k + 1 :],
            [*lines[:k], line.replace("e", "f").replace("8", "9"), *lines[k + 1 :]],
        ):
            if other != lines:
                path.write_text("\n".join(other))
                with pytest.raises(ConfigError, match="join file"):
                    JoinFile.read(path)
                told += 1
    assert told > 15


def test_a_request_is_signed_by_its_key(join: JoinFile, tmp_path: Path) -> None:
    private, public = certificates.new_key()
    request = Request.make(join, private, {"base": "cd", "labels": ("no", "yes"), "template": None})
    path = tmp_path / "request.toml"
    path.write_text(request.text().replace("\n", "\r\n"))
    read = Request.read(path)
    assert (read.federation, read.site, read.public_key) == ("fed-1", "acme", public.decode().strip())
    assert read.facts == {"base": "cd", "labels": ["no", "yes"]} and read.fingerprint in path.read_text()
    other = certificates.new_key()[1].decode().strip()
    for old, new in (
        ("fed-1", "fed-2"), ('site = "acme"', 'site = "cork"'), ('"cd"', '"ce"'), (public.decode().strip(), other),
        ('    "no",\r\n    "yes",', '    "yes",\r\n    "no",'),
    ):  # fmt: skip
        path.write_text(request.text().replace("\n", "\r\n").replace(old, new))
        with pytest.raises(ConfigError, match=r"changed after .*signed"):
            Request.read(path)
    path.write_text(request.text().replace("[facts]", "[fact]"))
    with pytest.raises(ConfigError, match=r"its request\.toml again"):
        Request.read(path)


def test_other_files_are_named(join: JoinFile, tmp_path: Path) -> None:
    private, public = certificates.new_key()
    path = tmp_path / "file"
    for content, words in (
        (private, "holds a private key"),
        (public, "cannot be read"),
        (join.text().encode(), "fedlora-join/1.*fedlora-request/1"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a = 1\n" * 200_000, "1,200,000 bytes.* 1,048,576 "),
        (b"a = [" + b"[" * 5000, "cannot be read"),
        (b"format = 'fedlora-request/1'\n[facts.versions]\ntorch = 07:32:00", "time is not JSON"),
        (b"title = 'x'", "format = None, and 'fedlora-request/1'"),
        (Request.make(join, private, {}).text().encode().replace(b"request/1", b"request/2"), "fedlora-request/2"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            Request.read(path)
    path.write_text(Request.make(join, private, {}).text())
    with pytest.raises(ConfigError, match=r"fedlora-request/1.*fedlora-join/1"):
        JoinFile.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        JoinFile.read(tmp_path / "nothing.toml")


def test_fingerprints_are_those_of_ssh(tmp_path: Path) -> None:
    """Reference: ssh-keygen, where it is installed."""
    public = certificates.new_key()[1]
    (tmp_path / "key.pub").write_bytes(public)
    try:
        said = subprocess.run(
            ["ssh-keygen", "-l", "-f", tmp_path / "key.pub"], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert certificates.fingerprint(public.decode()) == said.stdout.split()[1]


def test_keys_of_other_kinds_are_refused() -> None:
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    edwards = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*form).decode()
    with pytest.raises(ConfigError, match=r"Flower .*'ssh-ed25519'.*ssh-keygen"):
        certificates.public_key(edwards)
    pem = ec.generate_private_key(ec.SECP384R1()).public_key()
    text = pem.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    with pytest.raises(ConfigError, match="OpenSSH"):
        certificates.public_key(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no site"), ("acme", "without a rank"), ("acme=", "whole number from 1"),
        ("acme=0", "from 1 to 4096"),
        ("acme=-2", "whole number from 1"), ("acme=1e3", "whole number"), ("acme=99999999999", "whole number"),
        ("acme=5000", "got 5000"), ("acme=8,acme=4", "exists already"), ("acme=8,ACME=4", "as 'acme'"),
        ("../up=8", "the name of a site"), ("a b=8", "cannot be"), ("é=8", "cannot be"),
        (".a=8", "cannot be"),
        ("-a=8", "cannot be"), (f"{'a' * 64}=8", "up to 63 letters"), ("=8", "cannot be"),
    ],
)  # fmt: skip
def test_odd_sites_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sites(text)


@pytest.mark.parametrize(
    "name",
    [
        "https://fl.example.org", "fl.example.org/x", "10.0.0.1", "::1", "[::1]", "fl.example.org:443", "", "-fl.org",
        "fl..org", "*.example.org", "größe.org", "a" * 300, "fl example",
    ],
)  # fmt: skip
def test_odd_server_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"such as fl\.example\.org; got"):
        server_name(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", float("inf")), ("rank", 4.5), ("rank", True), ("rank", 0), ("port", float("inf")), ("port", 70_000),
     ("port", "443"), ("server", "a b"), ("server", "a\nb"), ("federation", "fed\n1"), ("federation", ""),
     ("site", "../x")],
)  # fmt: skip
def test_a_join_file_with_a_value_that_no_server_writes_is_refused(
    name: str, value: Any, join: JoinFile, tmp_path: Path
) -> None:
    """Its check is right: anybody can calculate it. Before: tracebacks, a rank of 4.5 read as 4, any port and name."""
    path = tmp_path / "join.toml"
    path.write_text(replace(join, **{name: value}).text())
    with pytest.raises(ConfigError) as refused:
        JoinFile.read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("line", ["__dataclass_self__ = 1", '"x\\ny" = 1', "[clients.acme]"])
def test_a_policy_with_a_key_of_nobody_s_or_a_client_without_a_rank_is_refused(line: str, tmp_path: Path) -> None:
    """Before: a traceback, a message of two lines, and a client that no round could serve."""
    text = f"{line}\n" if line.startswith("[") else f"{line}\n[clients]\nacme = 4\n"
    with pytest.raises(ConfigError) as refused:
        Policy.of(text, tmp_path / "policy.toml")
    assert "\n" not in str(refused.value)
