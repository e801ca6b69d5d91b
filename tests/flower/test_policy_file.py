"""policy.toml changed in place. Kind of evidence: *contract*: what is read back is what was asked, and every other line
is as it was."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.flower.setup.policy_file import policy_text, with_client, without_client
from fedlora.flower.terms.policy import Policy

EDITED = """\
deadline = 60.0  # we are slow
[clients]
# the first to come
acme = 8   # Anna's
"b.c" = { "q.lora" = 3 }

cork = 2
"""


def test_a_new_policy_has_the_defaults_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(policy_text({"acme": 8, "b.c": {"q": 2, "v": 3}}))
    read = Policy.read(tmp_path / "policy.toml")
    assert read.clients == {"acme": 8, "b.c": {"q": 2, "v": 3}} and read.deadline == 600


def test_a_site_comes_changes_and_goes_and_other_lines_stay() -> None:
    text = with_client(EDITED, "dublin", 16)
    assert text == EDITED + "dublin = 16\n"
    assert with_client(text, "acme", 4) == text.replace("acme = 8   # Anna's", "acme = 4   # Anna's")
    assert with_client(text, "b.c", 5) == text.replace('"b.c" = { "q.lora" = 3 }', '"b.c" = 5')
    assert without_client(text, "b.c") == text.replace('"b.c" = { "q.lora" = 3 }\n', "")
    assert without_client(text, "dublin") == EDITED


def test_a_table_in_the_middle_and_a_file_without_a_last_line_end() -> None:
    text = "[clients]\nacme = 8\n\n[other]\nacme = 1"
    assert with_client(text, "cork", 2) == "[clients]\nacme = 8\ncork = 2\n\n[other]\nacme = 1"
    assert without_client(with_client(text, "cork", 2), "acme") == "[clients]\ncork = 2\n\n[other]\nacme = 1"
    assert tomllib.loads(with_client("[clients]\nacme = 8", "cork", 2))["clients"] == {"acme": 8, "cork": 2}


@pytest.mark.parametrize(
    "text",
    [
        "clients = { acme = 8, cork = 2 }\n",
        "[clients]\nacme = 8\n[clients.cork]\nq = 2\n",
        "clients.acme = 8\nclients.cork = 2\n",
    ],
)
def test_other_forms_are_changed_too(text: str) -> None:
    before = tomllib.loads(text)["clients"]
    assert tomllib.loads(with_client(text, "dublin", 4))["clients"] == {**before, "dublin": 4}
    assert tomllib.loads(without_client(text, "cork"))["clients"] == {"acme": 8}
