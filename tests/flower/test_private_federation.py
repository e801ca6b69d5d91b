"""A private federation's folder: settings, `init`, doctor, what sites can see, and rounds on real tiny models.

Kinds of evidence: *contract* (what is refused, written and said).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")
pytest.importorskip("opendp")
pytest.importorskip("dp_accounting")

from fedlora.errors import ConfigError
from fedlora.flower.server.doctor import checked_folder
from fedlora.flower.server.federation import ending
from fedlora.flower.server.init import make_federation
from fedlora.flower.server.members import admit
from fedlora.flower.site.checks import checked_work
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.flower.terms.site_file import Site
from fedlora.privacy import recompute
from fedlora.runs.privacy_section import SIMULATED
from support.federation_folders import RANKS, FederationOnDisk
from support.private_flower import leave
from support.training_data import LABELS

PRIVATE: dict[str, Any] = {
    "clipping_norm": 1.0, "noise_multiplier": 0.05, "delta": 1e-3, "population": "three sites", "ledger": "sites.jsonl",
    "members": list(RANKS), "dims": 4,
}  # fmt: skip
TABLES: dict[str, Any] = {
    "id": "f", "data": {"label_names": ["no", "yes"]}, "lora": {"target_modules": ["query"]}, "privacy": PRIVATE,
}  # fmt: skip


NETWORK = NetworkSection(name="fl.example.org")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"participation": 0.5}}, "asks all"),
        ({"server": {"quorum": 2}}, "server.quorum = 2 "),
        ({"robust": {"rule": "norm-clipping"}}, "no bound"),
        ({"data": {"validation": 0.1}}, r"data\.validation is a share .*without noise"),
        ({"data": {"test": 0.1}}, r"data\.test is a share .*without noise"),
        ({"privacy": {"members": None}}, r"privacy\.members is missing"),
        ({"privacy": {"members": ["a", "a"]}}, "names a site twice"),
        ({"privacy": {"delta": 0.4}}, "promises nothing"),
        ({"privacy": {"epsilon": 3.0}}, "give either privacy"),
        ({"privacy": {"ledger": ""}}, r"privacy\.ledger is missing"),
        ({"privacy": {"population": SIMULATED}}, "sites are real"),
    ],
)
def test_what_would_break_the_promise_is_refused(tmp_path: Path, tables: dict[str, Any], words: str) -> None:
    found = {**TABLES, **{name: {**TABLES.get(name, {}), **table} for name, table in tables.items()}}
    found["privacy"] = {k: v for k, v in found["privacy"].items() if v is not None}
    (tmp_path / "federation.toml").write_text(tomli_w.dumps(found))
    with pytest.raises(ConfigError, match=words):
        FederationSettings.load(tmp_path / "federation.toml")


# ---- the folder, its doctor, and what a site sees --------------------------------------------------------------------


def test_init_doctor_and_sites(tmp_path: Path) -> None:
    """`fedlora flower init` with [privacy] and no word of a quorum; who is no member is not admitted."""
    fed = FederationOnDisk(tmp_path, data={"validation": 0.0, "test": 0.0})
    run = {
        "model": {"name": str(fed.model)}, "lora": {"target_modules": ["query", "value"]}, "run": {"rounds": 3},
        "data": {"label_names": list(LABELS), "max_length": 16},
        "privacy": {k: v for k, v in PRIVATE.items() if k != "members"} | {"ledger": "ledgers/ledger.jsonl"},
    }  # fmt: skip
    (tmp_path / "ledgers").mkdir()  # what charges it writes beside it, so that nothing else may lie there
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    home = tmp_path / "made"
    settings = make_federation(home, tmp_path / "run.toml", [], NETWORK, RANKS, None)
    terms = settings.privacy
    assert terms is not None and terms.members == list(RANKS) and terms.rank == 4
    assert settings.server.quorum is None and settings.share("validation") == settings.share("test") == 0
    assert "ledger" not in settings.agreed()["privacy"] and str(tmp_path) not in str(settings.agreed())
    assert dict(Policy.read(home / "policy.toml").clients) == RANKS
    (serve,) = [row for row in checked_folder(home) if row[0] == "serve"]
    assert serve[2]
    (tmp_path / "key.pub").write_bytes(certificates.new_key()[1])
    with pytest.raises(ConfigError, match=r"'dublin' .* 3 members"):
        admit(home, "dublin", 4, tmp_path / "key.pub")

    join = JoinFile.read(home / "join.toml")
    site = Site("acme", {"data": {"train": str(tmp_path / "acme.jsonl")}, "model": {"name": str(fed.model)}})
    (row,) = [row for row in checked_work(join, site) if row[0] == "privacy"]
    assert "epsilon 706.09" in row[1] and "one site" in row[1] and "server is trusted" in row[1]

    with pytest.raises(ConfigError, match="this budget leaves nothing"):
        tables = {**run, "privacy": {**run["privacy"], "noise_multiplier": 50.0}}
        (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
        make_federation(tmp_path / "other", tmp_path / "run.toml", [], NETWORK, RANKS, None)


def test_a_private_federation_from_its_first_round_to_its_card(tmp_path: Path) -> None:
    """Real tiny models; one site is away. Adapter, card and summary do not tell of it; rounds are what was promised;
    the ledger is recomputed by dp-accounting."""
    fed = FederationOnDisk(tmp_path, data={"validation": 0.0, "test": 0.0}, privacy=PRIVATE, run={"rounds": 2})
    fed.write(data=fed.at_server())
    text = tomli_w.dumps({"deadline": 30.0, "clients": RANKS})
    (fed.home / "policy.toml").write_text(text)
    grid = fed.grid()
    leave(grid, "cork")
    summary = fed.play(grid)
    assert summary["privacy"]["epsilon"] == summary["privacy"]["epsilon_planned"]
    assert summary["seconds"] is None
    found = recompute(fed.home / "sites.jsonl")
    assert len(found.events) == 2 and found.epsilon == pytest.approx(summary["privacy"]["epsilon"], rel=1e-6)
    card = (fed.home / "server" / "adapter" / "README.md").read_text()
    assert "| differential privacy | epsilon " in card and "withheld, a private run" in card
    server = fed.home / "server"
    for path in (server / "summary.json", *(server / "adapter").iterdir()):
        words = path.read_bytes()
        assert b"offline" not in words and b"not online" not in words and str(tmp_path).encode() not in words, path
    assert not (server / "private").stat().st_mode & 0o077
    assert re.search("complete after 2 rounds.*epsilon", ending(summary))
    fed.write(run={"rounds": 3})
    with pytest.raises(ConfigError, match=r"run\.rounds was 2 and is 3"):
        fed.play()
    fed.write(run={"rounds": 2}, privacy={"clipping_norm": 2.0})
    with pytest.raises(ConfigError, match=r"privacy\.clipping_norm was 1\.0 and is 2\.0"):
        fed.play()
