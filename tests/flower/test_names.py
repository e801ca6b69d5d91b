"""A site's name names files and commands: one grammar wherever a name comes in. Kind of evidence: *attack*."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.names import sites
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.site_file import Site

HOSTILE = [
    "", " ", ".", "..", "../up", "/etc", "a/b", "a\\b", "-rf", ".hidden", "a b", "a\nb", "a\n", "\x1b[2J", "\u202egpj",
    "é", "a;b", "$(id)", "a%n", "a\x00b", "x" * 64,
]  # fmt: skip
GOOD = ["a", "acme", "_9", "A.b-c_d", "x" * 63]


def in_a_policy(name: str, place: Path) -> None:
    file = place / "policy.toml"
    file.write_text(tomli_w.dumps({"clients": {name: 4}}))
    Policy.read(file)


def in_a_site_file(name: str, place: Path) -> None:
    file = place / "site.toml"
    file.write_text(tomli_w.dumps({"name": name, "data": "d.csv", "model": "demo"}))
    Site.read(file)


def in_sites(name: str, place: Path) -> None:
    if name not in sites(f"{name}=4,other=8"):  # spaces around a name are none of it
        raise ConfigError(f"{name!r} cannot be the name of a site")


def in_a_join_file(name: str, place: Path) -> None:
    certificates.write_public(place, "fl.example.org")
    ca, file = (place / "ca.crt").read_text(), place / "join.toml"
    file.write_text(JoinFile("fed-1", name, 4, "fl.example.org", 443, ca, json.dumps({}), {}).text())
    JoinFile.read(file)


def in_a_request(name: str, place: Path) -> None:
    file, private = place / "request.toml", certificates.new_key()[0]
    join = JoinFile("fed-1", name, 4, "fl.example.org", 443, "", "{}", {})
    file.write_text(Request.make(join, private, {}).text())
    Request.read(file)


@pytest.mark.parametrize("entrance", [in_a_policy, in_a_site_file, in_sites, in_a_join_file, in_a_request])
def test_a_name_is_the_same_at_every_entrance(entrance: Callable[[str, Path], None], tmp_path: Path) -> None:
    """Before, the policy let 11 of these in, '..' and '/etc' among them, and site.toml one of 64 letters."""
    for name in GOOD:
        entrance(name, tmp_path)
    let_in = []
    for name in HOSTILE:
        try:
            entrance(name, tmp_path)
            let_in.append(name)
        except ConfigError as error:
            said = str(error)
            assert "the name of a site" in said or "has a NUL" in said or name.strip() == "", (name, said)
    assert let_in == []
