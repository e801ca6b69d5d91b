"""`init`, `admit`, `remove`, `renew` on real folders, and the files that they read and write. Kinds of evidence:
*contract* (the base model is a real tiny one), *attack* (other files), real TLS handshakes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.members import admit, remove, renew
from fedlora.flower.terms.certificates import new_key, verdict, write_server
from fedlora.flower.terms.joining import JoinFile, site_key
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from support.certificates import authority, pem, server_files
from support.command_line import Said
from support.deployed_folders import federation_folder
from support.training_data import save_encoder

RUN = """\
# our study
[model]
name = "base"
[data]
label_names = ["no", "yes"]      # in this order
max_length = 16
[lora]
target_modules = ["query"]
"""


def key(folder: Path, name: str) -> Path:
    (folder / f"{name}.pub").write_bytes(new_key()[1])
    return folder / f"{name}.pub"


def clients(fed: FederationFolder) -> dict[str, object]:
    return dict(Policy.read(fed.policy).clients)


def test_init_keeps_the_runs_file_and_makes_all_the_rest(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Comments stay; paths become absolute; a second federation begins from the first one's file and start."""
    save_encoder(tmp_path / "base")
    (tmp_path / "run.toml").write_text(RUN)
    words = ("--server-name", "FL.example.org", "--sites", "acme=2,berlin=4", "--set", "run.rounds=7")
    said = main("flower", "init", tmp_path / "fed", "--config", tmp_path / "run.toml", *words)
    assert said.code == 0, said.err
    fed = FederationFolder(tmp_path / "fed")
    text, settings = fed.settings.read_text(), FederationSettings.load(fed.settings)
    assert "# our study" in text and "# in this order" in text and "[network]" in text
    assert settings.model.name == str(tmp_path / "base") and settings.run.rounds == 7
    assert (settings.network.name, settings.network.port, settings.server.quorum) == ("fl.example.org", 443, 2)
    join = JoinFile.read(fed.join)
    assert join.address == "fl.example.org:443" and join.settings().run.rounds == 7 and len(join.facts["base"]) == 64
    assert clients(fed) == {"acme": 2, "berlin": 4} and verdict(fed.certificates, "fl.example.org")[1]
    assert fed.path.stat().st_mode & 0o777 == 0o700 and not [*fed.keys.iterdir()]
    again = main("flower", "init", tmp_path / "two", "--config", fed.settings, "--start", fed.start, *words[:4])
    assert again.code == 0, again.err
    three = ("--set", 'data.label_names=["a","b","c"]')
    wrong = main("flower", "init", tmp_path / "no", "--config", fed.settings, "--start", fed.start, *words[:4], *three)
    assert "a head of 2 rows" in wrong.error() and "3 classes" in wrong.err
    other = FederationSettings.load(tmp_path / "two" / "federation.toml")
    assert other.id != settings.id and other.run.rounds == 7


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.train=x.csv"], "site.toml"),
        (["server.quorum=3"], "can never be met"),
        (["run.workers=4"], "fedlora run"),
        (["model.name=/nowhere/base"], "nowhere"),
    ],
)
def test_what_no_round_could_play_is_refused_before_anything_is_made(
    sets: list[str], words: str, tmp_path: Path, main: Callable[..., Said]
) -> None:
    save_encoder(tmp_path / "base")
    (tmp_path / "run.toml").write_text(RUN)
    more = [word for one in sets for word in ("--set", one)]
    said = main("flower", "init", tmp_path / "fed", "--config", tmp_path / "run.toml", "--server-name", "a.b",
                "--sites", "acme=2,berlin=4", *more)  # fmt: skip
    assert words in said.error() and not (tmp_path / "fed").exists()


def test_sites_come_change_and_go(tmp_path: Path) -> None:
    fed = federation_folder(tmp_path / "fed")
    one, two = key(tmp_path, "1"), key(tmp_path, "2")
    assert admit(fed.path, "one", None, one) == admit(fed.path, "one", None, two) == 2
    assert fed.key("one").read_text().split() == two.read_text().split()
    assert admit(fed.path, "dublin", 4, one) == 4 and clients(fed) == {"one": 2, "two": 2, "dublin": 4}
    assert admit(fed.path, "dublin", 6, None) == 6 and clients(fed)["dublin"] == 6
    remove(fed.path, "dublin")
    assert clients(fed) == {"one": 2, "two": 2} and [path.stem for path in fed.keys.iterdir()] == ["one"]


def test_what_cannot_be_a_member_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    fed = federation_folder(tmp_path / "fed", server={"quorum": 2})
    one = key(tmp_path, "1")
    admit(fed.path, "one", None, one)
    before = fed.policy.read_text()
    for name, rank, file, words in (
        ("two", None, one, "already belongs to 'one'"), ("new", None, one, "give it a rank"),
        ("two", None, None, "has no key here"), ("ONE", 4, key(tmp_path, "3"), "exists already"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            admit(fed.path, name, rank, file)
    with pytest.raises(ConfigError, match="there is no site 'three'"):
        remove(fed.path, "three")
    with pytest.raises(ConfigError, match="can never be met"):
        remove(fed.path, "two")
    assert fed.policy.read_text() == before and [path.stem for path in fed.keys.iterdir()] == ["one"]


def test_the_next_certificate_and_join_file(tmp_path: Path) -> None:
    """Another name is in both; without a change the sites need nothing."""
    fed = federation_folder(tmp_path / "fed")
    first = (fed.certificates / "server.crt").read_bytes()
    assert not renew(fed.path) and (fed.certificates / "server.crt").read_bytes() != first
    fed.settings.write_text(fed.settings.read_text().replace("fl.example.org", "new.example.org"))
    assert renew(fed.path) and JoinFile.read(fed.join).server.name == "new.example.org"
    assert verdict(fed.certificates, "new.example.org")[1]


# ---- join.toml, a site's key, the server's certificate ---------------------------------------------------------------


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
    server_files(tmp_path, authority(), ["fl.example.org"], begin=-1, end=end)
    assert words in verdict(tmp_path, "fl.example.org")[0]
    (tmp_path / "ca.crt").write_text(pem(authority("another")))
    assert not verdict(tmp_path, "fl.example.org")[1]
    (tmp_path / "server.crt").unlink()
    assert "server.crt" in verdict(tmp_path, "fl.example.org")[0]
