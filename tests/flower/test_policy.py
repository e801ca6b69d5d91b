"""policy.toml, and the names in it. Kinds of evidence: contract, *attack* (names of files)."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms.policy import Policy, policy_text, server_name, sites, with_client, without_client
from fedlora.flower.terms.settings import Site

HOSTILE = ["", " ", ".", "..", "../up", "/etc", "a/b", "a\\b", "-rf", ".hidden", "a b", "a\nb", "\x1b[2J", "é", "a;b",
           "$(id)", "a%n", "x" * 64]  # fmt: skip
EDITED = """\
deadline = 60.0  # we are slow
[clients]
# the first to come
acme = 8   # Anna's
"b.c" = { "q.lora" = 3 }

cork = 2
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_a_path_or_an_option(name: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(tomli_w.dumps({"clients": {name: 4}}))
    for entrance in (
        lambda: Policy.read(tmp_path / "policy.toml"),
        lambda: sites(f"{name}=4") if name.strip() else sites("=4"),
        lambda: Site.of({"name": name, "data": {"train": "d"}, "model": {"path": "m"}}, tmp_path),
    ):
        with pytest.raises(ConfigError):
            entrance()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "clients: Field required"),
        ("[clients]\n", "nobody could take part"),
        ("[clients]\na = 0\n", "whole number from 1"),
        ("[clients]\na = {q = true}\n", "whole number from 1"),
        ("colour = 1\n[clients]\na = 8\n", "colour: Unexpected keyword argument"),
        ("max_upload_mb = -1\n[clients]\na = 8\n", "max_upload_mb"),
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
    assert without_client(text, "b.c") == text.replace('"b.c" = { "q.lora" = 3 }\n', "")
    (tmp_path / "policy.toml").write_text(policy_text({"acme": 8, "b.c": {"q": 2, "v": 3}}))
    read = Policy.read(tmp_path / "policy.toml")
    assert read.clients == {"acme": 8, "b.c": {"q": 2, "v": 3}} and read.deadline == 600


@pytest.mark.parametrize("name", ["https://a.b", "a.b:443", "127.0.0.1", "::1", "a_b.c", "", "é.org"])
def test_a_servers_name_is_one_of_a_certificate(name: str) -> None:
    with pytest.raises(ConfigError, match="--server-name"):
        server_name(name)
