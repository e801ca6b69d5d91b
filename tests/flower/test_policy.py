"""policy.toml, and the names in it. Kinds of evidence: contract, *attack* (names of files)."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr")

from fedlora import Kept, Server, build
from fedlora.errors import ConfigError
from fedlora.flower.records import record_parcel
from fedlora.flower.terms.policy import Policy, policy_text, server_name, sites, with_client, without_client
from fedlora.flower.terms.site_file import Site
from support.flower_grid import RANKS, fates, play
from support.toy_federations import toy_federation, write_policy

HOSTILE = ["", " ", ".", "..", "../up", "/etc", "a/b", "a\\b", "-rf", ".hidden", "a b", "a\nb", "\x1b[2J", "é", "a;b",
           "$(id)", "a%n", "x" * 64]  # fmt: skip
EDITED = """\
deadline = 60.0  # we are slow
[clients]
# the first to come
acme = 8   # Anna's
"b.c" = 3

cork = 2
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_a_path_or_an_option(name: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(tomli_w.dumps({"clients": {name: 4}}))
    for entrance in (
        lambda: Policy.read(tmp_path / "policy.toml"),
        lambda: sites(f"{name}=4") if name.strip() else sites("=4"),
        lambda: Site.of({"name": name, "data": {"train": "d"}, "model": {"name": "m"}}, tmp_path),
    ):
        with pytest.raises(ConfigError):
            entrance()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'clients' is missing"),
        ("[clients]\n", "clients: must be not empty"),
        ("[clients]\na = 5000\n", "clients.a: must be at most 4096"),
        ("colour = 1\n[clients]\na = 8\n", "unknown key 'colour'"),
        ("deadline = -1\n[clients]\na = 8\n", "deadline"),
        ("[clients\n", "is not TOML"),
    ],
)
def test_a_bad_policy_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        Policy.read(tmp_path / "policy.toml")


def test_a_site_comes_changes_and_goes_and_other_lines_stay(tmp_path: Path) -> None:
    text = with_client(EDITED, {"dublin": 16})
    assert text == EDITED + "dublin = 16\n"
    assert with_client(text, {"acme": 4}) == text.replace("acme = 8   # Anna's", "acme = 4   # Anna's")
    assert without_client(text, "b.c") == text.replace('"b.c" = 3\n', "")
    (tmp_path / "policy.toml").write_text(policy_text({"acme": 8, "b.c": 3}))
    read = Policy.read(tmp_path / "policy.toml")
    assert read.clients == {"acme": 8, "b.c": 3} and read.deadline == 600


@pytest.mark.parametrize("name", ["https://a.b", "a.b:443", "127.0.0.1", "::1", "a_b.c", "", "é.org"])
def test_a_servers_name_is_one_of_a_certificate(name: str) -> None:
    with pytest.raises(ConfigError, match="--server-name"):
        server_name(name)


def test_a_policy_that_changes_holds_from_the_next_round_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One is removed, another gets a lower rank, and one comes back as a client that is new but for its own state; a
    file that cannot be used changes nothing, and is told once."""
    strategy, grid = toy_federation(tmp_path, Server(build("glora"), round=Kept(quorum=2)))

    def played(rounds: int, text: dict[str, int]) -> dict[str, str]:
        write_policy(tmp_path, text)
        play(strategy, grid, rounds)
        return fates(strategy)

    assert played(1, RANKS) == dict.fromkeys(RANKS, "trained")
    assert played(2, {"one": 2, "three": 2}) == {"one": "trained", "three": "trained"}
    assert set(strategy.state.clients) == {"one", "three"} and strategy.kept.receipts["two"].counted == 1
    ranks = [record_parcel(m.content)[0].client.rank for m in grid.sent if m.metadata.message_type == "train"]
    assert ranks == [2, 4, 3, 2, 2]
    assert played(3, RANKS) == dict.fromkeys(RANKS, "trained")
    caplog.clear()
    assert played(5, {"one": 2}) == dict.fromkeys(RANKS, "trained"), "the quorum can never be met by one"
    assert caplog.text.count("policy.toml is not taken") == 1 and "can never be met" in caplog.text
