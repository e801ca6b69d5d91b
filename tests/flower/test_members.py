"""`fedlora flower init | admit | remove | renew` and `doctor` of a server's folder. Kind of evidence: real folders,
made by the command line from a tiny model, each fault made on purpose."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import threading
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora import read_adapter
from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.opening import opening
from fedlora.flower.serving.standing import check_derived
from fedlora.flower.setup import checkup, members
from fedlora.flower.setup.project import with_sites
from fedlora.flower.setup.renewal import renew
from fedlora.flower.terms import certificates
from fedlora.flower.terms.agreement import Disagreement
from fedlora.flower.terms.certificates import verdict
from fedlora.flower.terms.facts import agreed
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.defence import DefenceSection
from fedlora.runs.sections import MethodSection
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]

RUN = """\
model = {{ path = "{base}" }}
lora = {{ targets = ["query", "value"] }}
run = {{ rounds = 6 }}
data = {{ max_length = 16 }}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of three sites, none of them admitted. Read-only: tests take a copy."""
    root = tmp_path_factory.mktemp("made")
    save_model(root / "base", bert(), classifies=True)
    (root / "run.toml").write_text(RUN.format(base="base"))
    invoke(
        "flower", "init", root / "fed", "--server-name", "fl.example.org", "--sites", "acme=8,berlin=4,cork=2",
        "--config", root / "run.toml", "--labels", "no,yes,maybe", "--port", "8443", "--superlink-port", free_port(),
    )  # fmt: skip
    return root


@pytest.fixture
def fed(made: Path, tmp_path: Path) -> FederationFolder:
    shutil.copytree(made / "fed", tmp_path / "fed")
    return FederationFolder(tmp_path / "fed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked(fed: FederationFolder, name: str, place: Path, *, join: JoinFile | None = None, **facts: Any) -> Path:
    """The request of a site whose base model is the server's, but for `facts`; as the site's file."""
    join = join or JoinFile.read(fed.join(name))
    own = {key: value for key, value in join.facts.items() if key != "targets"}
    path = place / f"{name}-{os.urandom(3).hex()}.toml"
    path.write_text(Request.make(join, certificates.new_key()[0], {**own, **facts}).text())
    return path


def snapshot(fed: FederationFolder) -> Mapping[str, bytes]:
    found = (p for p in fed.path.rglob("*") if p.is_file() and p.name != "members.lock")
    return {str(p.relative_to(fed.path)): p.read_bytes() for p in found}


def test_a_federation_is_made_without_anyones_data(made: Path) -> None:
    fed = FederationFolder(made / "fed")
    settings = FederationSettings.load(fed.settings)
    assert settings.data.labels == ["no", "yes", "maybe"] and settings.network.name == "fl.example.org"
    assert Policy.read(fed.policy).clients == {"acme": 8, "berlin": 4, "cork": 2}
    assert settings.server.quorum == 2
    start, _ = read_adapter(fed.start, scaling=settings.lora.unit)
    assert set(start.ranks.values()) == {8} and len(start.heads) == 2
    joins = {name: JoinFile.read(fed.join(name)) for name in ("acme", "berlin", "cork")}
    assert [j.rank for j in joins.values()] == [8, 4, 2] and joins["acme"].address == "fl.example.org:8443"
    assert joins["acme"].ca == (fed.public / "ca.crt").read_text()
    assert joins["acme"].facts["base"] == agreed(fed.agreement).base
    told = FederationSettings.from_travelling(joins["acme"].settings)
    assert told == FederationSettings.from_travelling(settings.travelling())
    for text in (j.text() for j in joins.values()):  # nothing of the server's alone travels
        assert "PRIVATE" not in text and str(made) not in text
    secret = [fed.path, fed.public / "ca.key", fed.public / "server.key", fed.certificates / "server.key"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)
    assert not list(fed.path.rglob("*.part")) and not (fed.path / "sites").exists()


def test_a_given_start_needs_no_model_and_must_fit(made: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('lora = { targets = ["query", "value"] }\n')

    def init(*more: object, name: str = "f") -> Said:
        fixed = ["--server-name", "fl.example.org", "--sites", "acme=8,berlin=4", "--config", config]
        return main("flower", "init", tmp_path / name, *fixed, "--start", made / "fed" / "start", *more)

    said = init("--labels", "no,yes,maybe")
    assert said.code == 0, said.err
    assert "CAP_NET_BIND_SERVICE" in said.out and "a round needs 2 of 2 (" in " ".join(said.out.split())
    start, _ = read_adapter(tmp_path / "f" / "start", scaling=2.0)
    kept, _ = read_adapter(made / "fed" / "start", scaling=2.0)
    assert all((start.modules[m].factors[1] == kept.modules[m].factors[1]).all() for m in kept.modules)
    assert init("--labels", "no,yes,maybe", "--set", "lora.scaling=4", "--port", 8443, name="four").code == 0
    other, _ = read_adapter(tmp_path / "four" / "start", scaling=2.0)  # the same update, in other units
    assert all((other.modules[m].delta() == kept.modules[m].delta()).all() for m in kept.modules)
    for more, words in (
        (["--labels", "no,yes"], "a head 'classifier.bias' of 3 rows"),
        (["--labels", "no,yes,maybe", "--set", 'lora.targets=["query"]'], "has lora.targets = ['query']"),
        (["--labels", "no,yes,maybe", "--set", 'lora.targets=["query","value","key"]'], "no module called 'key'"),
        (["--labels", "no,yes,maybe", "--set", "server.quorum=3"], "server.quorum = 3 can never"),
        (["--labels", "no,yes,maybe", "--sites", "acme=33"], "a matrix of 32 x 32"),
        ([], "data.labels is missing"),
    ):
        assert words in init(*more, name="g").error(), more
        assert not (tmp_path / "g").exists()


def test_texts_longer_than_the_base_model_reads_are_refused_before_round_1(
    made: Path, fed: FederationFolder, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """The tiny model has 16 positions. Before, init and doctor were content, and every round failed."""
    words = ("data.max_length = 17", "only 16 positions", "to 16 or less")
    error = main(
        "flower", "init", tmp_path / "f", "--server-name", "fl.example.org", "--sites", "a=8,b=4", "--config",
        made / "run.toml", "--labels", "no,yes,maybe", "--set", "data.max_length=17",
    ).error()  # fmt: skip
    assert all(said in error for said in (*words, "run.toml")) and not (tmp_path / "f").exists(), error
    renew(fed.path)  # it was copied to another place
    assert rows(fed)["serve"][1] is True
    fed.settings.write_text(fed.settings.read_text().replace("max_length = 16", "max_length = 17"))
    found, sound = rows(fed)["serve"]
    assert all(said in found for said in (*words, "federation.toml")) and sound is False


def test_a_federation_that_adds_uploads_up_can_be_played(made: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    given = (
        "flower", "init", tmp_path / "f", "--server-name", "fl.example.org", "--sites", "a=8,b=4,c=2", "--config",
        made / "run.toml", "--labels", "no,yes,maybe", "--start", made / "fed" / "start", "--set", "server.stream=true",
    )  # fmt: skip
    assert "svd with that rank" in main(*given, "--set", "method.rho=0.5").error() and not (tmp_path / "f").exists()
    said = main(*given)
    assert said.code == 0, said.err
    opening(tmp_path / "f")


def test_what_contradicts_itself_is_said_before_anything_is_made(tmp_path: Path, main: Callable[..., Said]) -> None:
    real = ["--server-name", "fl.example.org", "--sites", "a=2"]
    for more, words in (
        (real[:2], "--server-name is given"),
        (real[2:], "--sites is given"),
        (["--labels", "no,yes"], "--labels is for"),
        (["--port", "8443"], "--port is for"),
        (real, "--config is missing"),
        ([*real, "--config", tmp_path / "x", "--labels", "no,no"], "--labels must name"),
    ):
        assert words in main("flower", "init", tmp_path / "f", *more).error()
    assert "No such option" in main("flower", "init", tmp_path / "f", "--insecure").err  # a trial has TLS and keys, too
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "mine").touch()
    assert "f" in main("flower", "init", tmp_path / "f", *real).error() and (tmp_path / "f" / "mine").exists()


def test_a_site_is_admitted_and_asked_again_it_is_the_same(fed: FederationFolder, tmp_path: Path) -> None:
    request = asked(fed, "acme", tmp_path)
    done = members.admit(fed.path, request)
    assert (done.site, done.rank, done.before, done.old_key, done.known) == ("acme", 8, 8, None, False)
    assert fed.request("acme").read_bytes() == request.read_bytes()
    assert certificates.fingerprint(fed.key("acme").read_text()) == done.fingerprint
    before = snapshot(fed)
    assert members.admit(fed.path, request).known and snapshot(fed) == before


def test_a_new_site_is_invited_above_the_starts_rank(fed: FederationFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"new site.* no rank"):
        members.invite(fed.path, "dublin", None)
    assert members.invite(fed.path, "dublin", 16) == fed.join("dublin")
    assert JoinFile.read(fed.join("dublin")).facts == JoinFile.read(fed.join("acme")).facts  # targets too
    assert "dublin" not in Policy.read(fed.policy).clients  # not before its key is here
    done = members.admit(fed.path, asked(fed, "dublin", tmp_path))
    assert done.before is None and Policy.read(fed.policy).clients["dublin"] == 16
    assert list(Policy.read(fed.policy).clients) == ["acme", "berlin", "cork", "dublin"]
    with pytest.raises(ConfigError, match="takes part, with rank 16"):
        members.invite(fed.path, "dublin", 4)
    with pytest.raises(ConfigError, match="a matrix of 32 x 32"):
        members.invite(fed.path, "eve", 64)
    with pytest.raises(ConfigError, match="as 'dublin'"):
        members.invite(fed.path, "Dublin", 4)


def test_requests_of_others_are_refused_and_change_nothing(fed: FederationFolder, tmp_path: Path) -> None:
    good = asked(fed, "acme", tmp_path)
    join = JoinFile.read(fed.join("acme"))
    key = certificates.new_key()[0]

    def request(**changes: Any) -> Path:
        said = JoinFile(**{**{f: getattr(join, f) for f in JoinFile.__dataclass_fields__}, **changes})
        path = tmp_path / f"{said.federation}-{said.site}.toml"
        own = {name: value for name, value in join.facts.items() if name != "targets"}
        path.write_text(Request.make(said, key, own).text())
        return path

    before = snapshot(fed)
    for path, words in (
        (request(federation="fed-other"), "is for the federation 'fed-other'"),
        (request(site="eve"), "the site 'eve'"),
        (request(site="ACME"), "as 'acme'"),
        (fed.join("acme"), "fedlora-request/1"),
        (asked(fed, "acme", tmp_path, base="00" * 32), "the server's base model"),
        (asked(fed, "acme", tmp_path, labels=["no", "maybe", "yes"]), "classes"),
        (asked(fed, "acme", tmp_path, versions={"protocol": "fedlora/2"}), "fedlora/2"),
    ):
        with pytest.raises((ConfigError, Disagreement), match=words):
            members.admit(fed.path, path)
        assert snapshot(fed) == before, words
    members.admit(fed.path, good)
    copied = tmp_path / "copied.toml"
    said = JoinFile.read(fed.join("berlin"))
    copied.write_text(Request.make(said, key, {k: v for k, v in join.facts.items() if k != "targets"}).text())
    members.admit(fed.path, copied)
    copied.write_text(
        Request.make(
            JoinFile.read(fed.join("cork")), key, {k: v for k, v in join.facts.items() if k != "targets"}
        ).text()
    )
    with pytest.raises(ConfigError, match="belongs to 'berlin'"):
        members.admit(fed.path, copied)


def test_another_key_is_a_rotation_and_the_old_one_stays_away(fed: FederationFolder, tmp_path: Path) -> None:
    first, second = asked(fed, "acme", tmp_path), asked(fed, "acme", tmp_path)
    old = members.admit(fed.path, first).fingerprint
    with pytest.raises(ConfigError, match=r"another one.*--rotate") as error:
        members.admit(fed.path, second)
    new = Request.read(second).fingerprint
    assert old in str(error.value) and new in str(error.value)
    done = members.admit(fed.path, second, rotate=True)
    assert (done.old_key, done.fingerprint) == (old, new)
    with pytest.raises(ConfigError, match=r"acme-\S*-rotated-keys\.pub.*newest"):
        members.admit(fed.path, first, rotate=True)


def test_a_site_goes_and_comes_back(fed: FederationFolder, tmp_path: Path) -> None:
    fed.policy.write_text(fed.policy.read_text().replace("cork = 2", "cork = 2  # far away"))
    request, joined = asked(fed, "acme", tmp_path), JoinFile.read(fed.join("acme"))
    members.admit(fed.path, request)
    members.remove(fed.path, "acme")
    assert list(Policy.read(fed.policy).clients) == ["berlin", "cork"] and "# far away" in fed.policy.read_text()
    assert not fed.key("acme").exists() and len(list((fed.path / "removed").iterdir())) == 3
    with pytest.raises(ConfigError, match="no site 'acme'"):
        members.remove(fed.path, "acme")
    with pytest.raises(ConfigError, match=r"without 'cork': server\.quorum = 2 .*one site"):
        members.remove(fed.path, "cork")
    with pytest.raises(ConfigError, match=r"'\.\./\.\./etc'.* name of a site"):
        members.remove(fed.path, "../../etc")
    fresh, before = asked(fed, "acme", tmp_path, join=joined), snapshot(fed)
    with pytest.raises(ConfigError, match=r"'acme' is not in .*was removed .*--rank"):
        members.admit(fed.path, fresh)
    with pytest.raises(ConfigError, match=r"acme-\d{8}T\d{6}Z-removed-keys\.pub.* --rotate"):
        members.admit(fed.path, request, rank=3)
    assert snapshot(fed) == before
    assert members.admit(fed.path, fresh, rank=3).rank == 3
    assert list(Policy.read(fed.policy).clients) == ["berlin", "cork", "acme"]


@pytest.mark.parametrize("name", ["cork", "dublin"])
def test_a_removed_key_does_not_come_back(name: str, fed: FederationFolder, tmp_path: Path) -> None:
    """A stolen key, after the runbook's way: `remove`, then an invitation, of that site or of another name."""
    key, request = certificates.new_key()[0], tmp_path / "cork.toml"

    def ask(name: str) -> Path:
        own = {fact: value for fact, value in JoinFile.read(fed.join(name)).facts.items() if fact != "targets"}
        request.write_text(Request.make(JoinFile.read(fed.join(name)), key, own).text())
        return request

    members.admit(fed.path, ask("cork"))
    members.remove(fed.path, "cork")
    members.invite(fed.path, name, 2)
    ask(name)
    before = snapshot(fed)
    for rotate in (False, True):
        with pytest.raises(ConfigError, match=r"cork-\S*-removed-keys\.pub.*fedlora flower site FOLDER --rotate"):
            members.admit(fed.path, request, rotate=rotate)
    assert snapshot(fed) == before
    assert members.admit(fed.path, asked(fed, name, tmp_path)).rank == 2


@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_a_full_disk_nobody_is_asked_more_and_the_call_can_be_repeated(
    at: int, fed: FederationFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, before, written = asked(fed, "acme", tmp_path), fed.policy.read_text(), [0]
    write = files.write

    def full(path: Path, content: str | bytes) -> None:
        written[0] += 1
        if written[0] == at:
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        members.admit(fed.path, request, rank=4)
    assert written[0] == at and fed.policy.read_text() == before
    assert members.admit(fed.path, request, rank=4).rank == Policy.read(fed.policy).clients["acme"] == 4
    assert fed.key("acme").is_file() and fed.request("acme").read_bytes() == request.read_bytes()


@pytest.mark.parametrize("fact", ["base", "tokenizer", "labels", "scaling", "max_length", "architecture", "versions"])
def test_a_request_that_leaves_a_fact_out_is_refused_by_name(fed: FederationFolder, tmp_path: Path, fact: str) -> None:
    """Each alone, absent or empty. Before, silence passed for agreement."""
    known = JoinFile.read(fed.join("acme")).facts
    before = snapshot(fed)
    for empty in (None, type(known[fact])()):
        with pytest.raises(Disagreement, match=rf"'acme' does not say .*{fact[:3]}"):
            members.admit(fed.path, asked(fed, "acme", tmp_path, **{fact: empty}))
    assert snapshot(fed) == before


@pytest.mark.parametrize("package", ["protocol", "fedlora", "torch"])
def test_a_request_that_leaves_a_version_out_is_refused_if_it_must_match(
    fed: FederationFolder, tmp_path: Path, package: str
) -> None:
    known = JoinFile.read(fed.join("acme")).facts["versions"]
    for versions in ({**known, package: ""}, {k: v for k, v in known.items() if k != package}):
        request = asked(fed, "acme", tmp_path, versions=versions)
        if package == "torch":
            members.admit(fed.path, request, rotate=True)
            continue
        with pytest.raises(Disagreement, match=f"version of {package}"):
            members.admit(fed.path, request)


def test_a_forged_fact_is_refused(fed: FederationFolder, tmp_path: Path) -> None:
    for base in ("\x1b[2J\x1b]0;own\x07", "x" * 64):
        with pytest.raises(Disagreement, match="cannot be read: base = ") as raised:
            members.admit(fed.path, asked(fed, "acme", tmp_path, base=base))
        assert str(raised.value).isprintable()
    assert not fed.key("acme").exists()


def test_many_at_once_are_all_admitted(fed: FederationFolder, tmp_path: Path) -> None:
    names = [f"s{k}" for k in range(6)]
    for name in names:
        members.invite(fed.path, name, 4)
    requests = [asked(fed, name, tmp_path) for name in names]
    threads = [threading.Thread(target=members.admit, args=(fed.path, request)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names) < set(Policy.read(fed.policy).clients)


def rows(fed: FederationFolder) -> dict[str, tuple[str, bool | None]]:
    return {what: (found, sound) for what, found, sound in checkup.checked_folder(fed.path)}


def test_the_doctor_of_a_sound_folder(fed: FederationFolder, tmp_path: Path) -> None:
    renew(fed.path)  # it was copied to another place
    found = rows(fed)
    assert not [row for row in found.items() if row[1][1] is False]
    assert found["sites"] == ("0 of 3 admitted; not yet: acme, berlin, cork", None)
    members.admit(fed.path, asked(fed, "acme", tmp_path))
    members.admit(fed.path, asked(fed, "cork", tmp_path))
    assert rows(fed)["sites"] == ("2 of 3 admitted; not yet: berlin", True)


def test_the_doctor_names_each_fault(fed: FederationFolder, tmp_path: Path) -> None:
    assert str(fed.proxy) in rows(fed)["serve"][0] and rows(fed)["serve"][1] is False
    renew(fed.path)
    members.admit(fed.path, asked(fed, "acme", tmp_path))
    (fed.public / "ca.crt").unlink()
    (fed.public / "ca.key").unlink()
    certificates.write_public(fed.public, "other.example.org")
    found = rows(fed)
    assert "a node would refuse" in found["certificate of fl.example.org"][0]
    fed.settings.write_text(fed.settings.read_text().replace("quorum = 2", "quorum = 4"))
    said, sound = rows(fed)["serve"]
    assert "server.quorum = 4 " in said and "3 sites" in said and sound is False


def test_an_open_control_port_is_found(fed: FederationFolder) -> None:
    """Something listens on all addresses at the SuperLink's port."""
    renew(fed.path)
    port = FederationSettings.load(fed.settings).network.superlink_port
    with socket.create_server(("0.0.0.0", port)):
        found, sound = rows(fed)["SuperLink"]
        assert sound is False and f"port {port} answers on 0.0.0.0" in found and "run Python" in found
    with socket.create_server(("127.0.0.1", port)):
        assert rows(fed)["SuperLink"] == (f"127.0.0.1:{port}, answers, on loopback only", True)


def test_a_proxy_that_lets_the_control_part_through_is_found(fed: FederationFolder) -> None:
    """A stand-in for a proxy of somebody's own that passes everything: it answers 200, then 403."""
    renew(fed.path)
    network = FederationSettings.load(fed.settings).network
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    with socket.create_server(("127.0.0.1", network.port)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    if connection.recv(4096).startswith(b"POST"):  # and TLS gets nothing
                        connection.sendall(answer[0])

        threading.Thread(target=serve, daemon=True).start()
        found, sound = rows(fed)["proxy"]
        assert sound is False and f"127.0.0.1:{network.port} answers 200 to {checkup.CONTROL}" in found
        answer[0] = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
        assert rows(fed)["proxy"][1] is True
        listening.shutdown(socket.SHUT_RDWR)


def test_renewal_keeps_the_authority_and_says_another_port(fed: FederationFolder) -> None:
    renew(fed.path)
    before, ca = (fed.public / "server.crt").read_bytes(), (fed.public / "ca.crt").read_bytes()
    done = renew(fed.path)
    assert done.public and not (done.loopback or done.changed or done.handed)
    assert (fed.public / "server.crt").read_bytes() != before and (fed.public / "ca.crt").read_bytes() == ca
    assert verdict(fed.public, "fl.example.org").sound
    fed.settings.write_text(fed.settings.read_text().replace("port = 8443", "port = 9443"))
    with pytest.raises(ConfigError, match=r"network\.port = 9443, and .*nginx.*`fedlora flower renew"):
        check_derived(fed)
    members.invite(fed.path, "dublin", 16)
    fed.settings.write_text(fed.settings.read_text().replace("port = 9443", "port = 9444"))  # and invited before it
    done = renew(fed.path)
    check_derived(fed)
    assert (JoinFile.read(fed.join("dublin")).port, JoinFile.read(fed.join("dublin")).rank) == (9444, 16)
    assert done.handed == ("port",) and fed.proxy in done.changed and "listen 9444" in fed.proxy.read_text()
    assert tomllib.loads(fed.join("acme").read_text())["server"]["port"] == 9444
    (fed.public / "ca.key").unlink()
    assert not renew(fed.path).public  # somebody else's certificate, and sound: it is left alone


def test_which_sockets_listen_and_which_addresses_are_this_machines() -> None:
    """Against sockets of the test's own: one of loopback, and one of all addresses."""
    with socket.socket() as one, socket.socket() as everywhere:
        one.bind(("127.0.0.1", 0))
        everywhere.bind(("0.0.0.0", 0))
        assert checkup.listening(one.getsockname()[1]) == []
        one.listen()
        everywhere.listen()
        assert checkup.listening(one.getsockname()[1]) == ["127.0.0.1"]
        assert checkup.listening(everywhere.getsockname()[1]) == ["0.0.0.0"]
    assert not any(ipaddress.ip_address(address).is_loopback for address in checkup.own_addresses())


def test_the_first_request_says_what_nobody_at_the_server_knows(
    fed: FederationFolder, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """A start was given and the server has no base model: acme's is what berlin's is held against."""
    fed.agreement.unlink()
    base = {"base": "a" * 64}
    said = main("flower", "admit", fed.path, asked(fed, "acme", tmp_path, **base))
    assert said.code == 0 and agreed(fed.agreement).base == "a" * 64, said.err
    error = main("flower", "admit", fed.path, asked(fed, "berlin", tmp_path, base="b" * 64)).error()
    assert "aaaaaaaaaaaa..." in error and "bbbbbbbbbbbb..." in error and not fed.key("berlin").exists()
    assert main("flower", "admit", fed.path, asked(fed, "cork", tmp_path, **base)).code == 0


def test_of_several_requests_one_that_is_refused_keeps_no_other_out(
    fed: FederationFolder, tmp_path: Path, main: Callable[..., Said]
) -> None:
    acme, berlin = asked(fed, "acme", tmp_path), asked(fed, "berlin", tmp_path)
    missing = tmp_path / "cork.toml"
    assert "for one site; got 2" in main("flower", "admit", fed.path, acme, berlin, "--rotate").error()
    assert not fed.key("acme").exists()
    said = main("flower", "admit", fed.path, acme, missing, berlin)
    assert said.code == 2 and "1 of 3 requests are refused" in said.err and "cork.toml" in said.err
    assert fed.key("acme").is_file() and fed.key("berlin").is_file()
    assert "acme: admitted" in said.out and "berlin: admitted" in said.out


@pytest.mark.parametrize(("sites", "participation", "quorum"), [(1, 1.0, 1), (2, 1.0, 2), (3, 1.0, 2), (8, 0.5, 3)])
def test_a_round_needs_more_than_half_unless_the_file_says_otherwise(
    sites: int, participation: float, quorum: int
) -> None:
    plain = FederationSettings(id="f", data={"labels": ["a", "b"]}, run={"participation": participation})  # type: ignore[arg-type]
    of = {f"site-{k}": 4 for k in range(sites)}
    assert with_sites(plain, of).server.quorum == quorum
    asked_for = plain.model_copy(update={"server": plain.server.model_copy(update={"quorum": 1})})
    assert with_sites(asked_for, of).server.quorum == 1


@pytest.mark.parametrize(
    ("table", "said", "sound"),
    [
        ('rule = "krum"\nliars = 1', "needs 5 clients, but a round has 3", False),
        ('rule = "geometric-median"\nliars = 0', "", True),
    ],
)
def test_the_doctor_knows_what_a_rule_needs(fed: FederationFolder, table: str, said: str, sound: bool) -> None:
    """Before anything starts, by the checks that the rounds begin with."""
    renew(fed.path)
    rule, settings = DefenceSection.model_validate(tomllib.loads(table)), FederationSettings.load(fed.settings)
    fed.settings.write_text(settings.model_copy(update={"defence": rule}).toml())
    found = rows(fed)["serve"]
    assert said in found[0] and found[1] is sound


@pytest.fixture
def of_one_rank(fed: FederationFolder) -> FederationFolder:
    """A method that serves one rank only, and three sites of it."""
    settings = FederationSettings.load(fed.settings)
    fed.settings.write_text(settings.model_copy(update={"method": MethodSection(name="fedsa-lora")}).toml())
    fed.policy.write_text(re.sub(r"(acme|berlin|cork) = \d", r"\1 = 8", fed.policy.read_text()))
    opening(fed.path)
    return fed


def test_a_rank_that_the_method_cannot_serve_is_refused_by_every_command(
    of_one_rank: FederationFolder, made: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Oracle: `opening`, with which the rounds start. Before, `admit` said that it takes effect from the next round on;
    then no round could be measured, after any restart."""
    fed, words = of_one_rank, "fedsa-lora cannot serve"
    admitted = asked(fed, "acme", tmp_path)
    members.admit(fed.path, admitted)
    before = snapshot(fed)
    for call in (["admit", fed.path, admitted, "--rank", 4], ["admit", fed.path, "--new", "dublin=4"]):
        error = main("flower", *call).error()
        assert words in error and "acme" in error and " 8" in error and "client" in error, error
        assert snapshot(fed) == before
    fed.policy.write_text(fed.policy.read_text().replace("cork = 8", "cork = 4"))
    with pytest.raises(ConfigError, match=f"{words}.*cork 4.*start's rank 8, not 4"):
        opening(fed.path)
    renew(fed.path)  # it was copied to another place
    assert words in rows(fed)["serve"][0] and rows(fed)["serve"][1] is False
    said = main("flower", "admit", fed.path, admitted, "--rank", 4)  # no worse than before: maybe a step of a repair
    assert said.code == 0 and f"yet: {words}" in said.out
    init = (
        "flower", "init", tmp_path / "f", "--server-name", "fl.example.org", "--sites", "a=8,b=4", "--config",
        made / "run.toml", "--labels", "no,yes,maybe", "--start", made / "fed" / "start", "--set",
        "method.name=fedsa-lora",
    )  # fmt: skip
    assert words in main(*init).error() and not (tmp_path / "f").exists()


def test_no_removal_leaves_rounds_that_cannot_be_played(fed: FederationFolder) -> None:
    """Multi-krum with one liar needs 2 x 1 + 3 clients. Before, only the quorum was looked at."""
    fed.policy.write_text(fed.policy.read_text() + "dublin = 4\nessen = 4\nfaro = 4\n")
    rule = DefenceSection(rule="multi-krum", liars=1)
    fed.settings.write_text(FederationSettings.load(fed.settings).model_copy(update={"defence": rule}).toml())
    members.remove(fed.path, "faro")
    before = snapshot(fed)
    with pytest.raises(ConfigError, match=r"without 'essen': .* needs 5 clients, .* has 4.* Nothing was changed"):
        members.remove(fed.path, "essen")
    assert snapshot(fed) == before
    opening(fed.path)
