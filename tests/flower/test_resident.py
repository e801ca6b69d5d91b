"""The resident trainer and its socket. Kinds of evidence: contract (the same work in this process), attack, fault
(a trainer that is killed, settings that change, an owner that ends)."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlora import Client, Server, build
from fedlora.core.parcels import pack
from fedlora.errors import CheckpointError, ConfigError, DataError
from fedlora.flower.envelope import Envelope, Receipt
from fedlora.flower.places import SiteFolder
from fedlora.flower.records import RAW, RecordError, parcel_record, to_array, to_tensor
from fedlora.flower.site.node import Node, state_of
from fedlora.flower.site.resident import (
    Trainer,
    TrainerFailed,
    ask,
    listening_at,
    pass_on,
    serve,
    socket_of,
)
from fedlora.flower.site.site_work import SiteWork, content_of, told_to_server
from fedlora.flower.site.wire import receive_message, send_message
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from support.federation_folders import write_join
from support.flower_grid import RUN, Toy, seed_adapter
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]


def question(client: str = "one", **more: Any) -> RecordDict:
    server = Server(build("glora"))
    state = start(server, seed_adapter()).server
    return parcel_record(pack(server.download(state, Client(client, 2)), None), RUN, **more)


def serving(site: SiteFolder, work: Any) -> threading.Thread:
    """A SuperNode whose trainer is that work, for as long as this test's process lives."""
    thread = threading.Thread(target=pass_on, args=(listening_at(site), work, site.path), daemon=True)
    thread.start()
    return thread


def same(one: RecordDict, other: RecordDict) -> bool:
    """Whether two records say the same."""

    def said(record: RecordDict) -> dict[str, Any]:
        tensors = {k: to_tensor(a, a.shape, k).tolist() for k, a in record["arrays"].items()}
        return tensors | {k: v for part in ("metrics", "config") for k, v in record[part].items()}

    return said(one) == said(other)


def until_true(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


@pytest.mark.parametrize("deep", [False, True])
def test_the_resident_trainer_answers_over_its_socket(tmp_path: Path, deep: bool) -> None:
    """The same work in this process and through the socket, also in a folder whose path no socket can have; an
    exception comes back as its words; strangers' modes."""
    site = SiteFolder(tmp_path / ("d" * 60 + "/" + "e" * 60 if deep else "s"))
    node = Node("one", Toy(), tmp_path / "state")

    def work(do: str, record: RecordDict) -> RecordDict:
        return node.work(record)

    serving(site, work)
    record = question()
    reply = ask(site.site, "train", record)
    alone = Node("one", Toy(), tmp_path / "other").work(record)
    assert same(reply, alone)
    with pytest.raises(TrainerFailed, match=r"'one', .* for 'two'"):
        ask(site.site, "train", question("two"))


def test_what_is_asked_for_reaches_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a client that connects first and says nothing: before, all others waited for it for ever."""
    monkeypatch.setattr("fedlora.flower.site.resident._PATIENCE", 0.2)
    asked: list[str] = []

    def work(do: str, record: RecordDict) -> RecordDict:
        asked.append(do)
        return record

    site = SiteFolder(tmp_path)
    serving(site, work)
    monkeypatch.chdir(site.state)  # a socket's path is short
    for frame in (b"not json", b'{"said": {}, "records": {}}'):  # before, these ended the thread, and the SuperNode
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as odd:
            odd.connect("trainer.sock")
            Connection(odd.detach()).send_bytes(frame)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.connect("trainer.sock")
    ask(site.site, "train", question())
    ask(site.site, "evaluate", question())
    silent.close()
    assert asked == ["train", "evaluate"]


def test_an_error_of_the_data_stays_at_home(tmp_path: Path) -> None:
    """A server hears its kind alone; the site hears all of it."""

    def work(do: str, record: RecordDict) -> RecordDict:
        raise DataError("row 3: label 'Jane Doe, HIV' is not among the classes")

    site = SiteFolder(tmp_path)
    serving(site, work)
    with pytest.raises(TrainerFailed) as error:
        ask(site.site, "train", question())
    assert "Jane" not in str(error.value) and "DataError" in str(error.value) and "trainer.log" in str(error.value)
    assert "Jane Doe" in error.value.full
    try:
        raise KeyError("Jane Doe")
    except KeyError as unforeseen:
        assert "Jane" not in told_to_server(unforeseen, tmp_path)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """It contains nothing of the data, but lets the server's operator tell the site; for every kind of exception."""
    full = OSError(errno.ENOSPC, "No space left on device", "/data/jane-doe.csv")
    try:
        try:
            raise full
        except OSError as error:
            raise CheckpointError(f"the checkpoint could not be written: {error}") from error
    except CheckpointError as error:
        stored = error
    for failure in (full, stored, OSError(errno.EDQUOT, "Disk quota exceeded")):
        words = told_to_server(failure, tmp_path)
        assert re.search("no space .*this site's disk", words) and "jane" not in words
    assert "no space" not in told_to_server(OSError(errno.EIO, "I/O error", "/data/jane-doe.csv"), tmp_path)


def no_room(*given: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_end_the_trainer_before_it_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is on the same disk, and takes no line."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=no_room, flush=no_room))
    here, there = Pipe()
    thread = threading.Thread(target=serve, args=(no_room, there, tmp_path), daemon=True)
    thread.start()
    for _ in range(2):
        send_message(here, {"do": "train"}, question())
        assert "no space" in receive_message(here)[0]["told"]
    here.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_trainer_that_a_full_disk_ends_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can neither be started nor ended with a word."""
    from fedlora.flower.site import resident

    site = a_site(tmp_path, tmp_path)
    monkeypatch.setattr(resident, "Pipe", no_room)
    serving(site, Trainer(site).work)
    with pytest.raises(TrainerFailed, match="no space"):
        ask(site.site, "train", question(envelope=Envelope("settings")))
    monkeypatch.undo()
    monkeypatch.setattr(resident.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TrainerFailed, match=r"with code 1 .*No space"):
        ask(site.site, "train", question(envelope=Envelope("settings")))


# ---- one site.toml, one content of the settings ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("m") / "base", bert(), classifies=True))


def a_site(folder: Path, base: Path) -> SiteFolder:
    site = SiteFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "d.csv").write_text("text,label\n" + "".join(f"w{k} w{k + 1},{k % 2}\n" for k in range(30)))
    site.site.write_text(Site(name="one", data="d.csv", model=str(base)).toml())
    write_join(folder, "one", "fed-1")
    return site


def agreed(**tables: Any) -> FederationSettings:
    raw = {"data": {"labels": ["0", "1", "2"], "max_length": 16}, "train": {"steps": 1}, "run": {"threads": 1}}
    return FederationSettings(id="fed-1", **{**raw, **tables})


def asked_of(settings: FederationSettings, site: SiteFolder, facts: Facts | None = None) -> RecordDict:
    prepared = prepare(settings.for_site(Site.read(site.site), 2))
    state = start(prepared.server, prepared.seed_adapter).server
    parcel = pack(prepared.server.download(state, Client("one", 2)), None)
    return parcel_record(parcel, settings.id, Envelope(settings.travelling(), (facts or Facts()).text()))


def test_a_site_works_by_the_settings_that_come_with_the_message(tmp_path: Path, base: Path) -> None:
    """It is loaded with the first message; other settings, or another site.toml, are another trainer's."""
    site = a_site(tmp_path / "s", base)
    work, record = SiteWork(site.site), asked_of(agreed(), site)
    content = content_of(site.site, record)
    reply = work("train", record)
    said = json.loads(str(reply["config"]["agreement"]))
    assert said["labels"] == ["0", "1", "2"] and said["max_length"] == 16 and said["targets"]
    assert (site.state / "fed-1" / "one").is_dir()
    assert work("train", record)["arrays"].keys() == reply["arrays"].keys()
    assert content_of(site.site, asked_of(agreed(), site)) == content
    assert content_of(site.site, asked_of(agreed(train={"steps": 2}), site)) != content
    site.site.write_text(site.site.read_text() + "threads = 2\n")
    assert content_of(site.site, record) != content
    with pytest.raises(RecordError, match="no settings"):
        content_of(site.site, question())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (Facts(base="0" * 64), "base model .* 000000000000"),
        (Facts(tokenizer="0" * 64), "the server's tokenizer is 000000000000"),
        (Facts(architecture={"hidden_size": 64}), "hidden_size is 64 .*32 at one"),
        (Facts(versions={"torch": "1.13.0"}), r"torch is 1\.13\.0 "),
        (Facts(versions={"fedlora": "99.0.0"}), r"fedlora is 99\.0\.0 "),
        (Facts(labels=("2", "1", "0")), "classes are"),
        (Facts(scaling=8.0), "scaling is 8"),
        (Facts(max_length=8), "max_length is 8"),
    ],
)
def test_another_base_model_is_refused_before_anything_is_loaded(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, facts: Facts, said: str
) -> None:
    site = a_site(tmp_path / "s", base)
    record = asked_of(agreed(), site, facts)
    monkeypatch.setattr("fedlora.runs.preparation.prepare", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=said):
        SiteWork(site.site)("train", record)
    assert not list(site.state.rglob("round-*"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"run": ".."}, "joined 'fed-1'"), ({"run": "fed-2"}, "joined 'fed-1'"), ({"round": -2}, "round -2"),
     ({"round": 10**12}, "round 1000000000000"), ({"receipt": Receipt(3)}, "receipt"),
     ({"receipt": Receipt(10**9)}, "receipt")],
)  # fmt: skip
def test_a_message_of_another_federation_or_of_no_round_is_refused(
    tmp_path: Path, base: Path, changes: dict[str, Any], why: str
) -> None:
    """Before, a hostile server's run ".." put states beside the site's folder of states, and any round was trained."""
    site = a_site(tmp_path / "s", base)
    prepared = prepare(agreed().for_site(Site.read(site.site), 2))
    state = start(prepared.server, prepared.seed_adapter).server
    parcel = pack(prepared.server.download(state, Client("one", 2)), None)
    parcel = replace(parcel, round=changes.get("round", parcel.round))
    record = parcel_record(
        parcel, changes.get("run", "fed-1"), Envelope(agreed().travelling(), Facts().text()),
        changes.get("receipt", Receipt()),
    )  # fmt: skip
    with pytest.raises((ConfigError, RecordError), match=why):
        SiteWork(site.site)("train", record)
    assert not [*site.path.rglob("round-*")]


@pytest.mark.parametrize("run", ["..", ".", "", "a/b", "../.."])
def test_the_states_of_any_run_lie_inside_the_folder_of_states(tmp_path: Path, run: str) -> None:
    found = state_of(tmp_path, run, "one")
    assert ".." not in found.parts and found.resolve().is_relative_to(tmp_path.resolve())


def test_other_targets_are_refused_before_training(tmp_path: Path, base: Path) -> None:
    """Only a loaded model says which modules it has."""
    site = a_site(tmp_path / "s", base)
    with pytest.raises(ValueError, match=r"1 modules .* 2: .*x\.q 8x8"):
        SiteWork(site.site)("train", asked_of(agreed(), site, Facts(targets=("x.q 8x8",))))
    assert not list(site.state.rglob("round-*"))


# ---- processes -------------------------------------------------------------------------------------------------------


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def trainers(site: SiteFolder) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            words = b""
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if (
                b"fedlora.flower.site.resident" in words
                and str(site.site).encode() in words
                and not ended(int(entry.name))
            ):
                found.append(int(entry.name))
    return found


def another_works(site: SiteFolder, than: int) -> bool:
    """Whether a trainer other than that process has worked for longer than its imports and its model take to load."""
    return any(psutil.Process(pid).cpu_times().user > 20 for pid in trainers(site) if pid != than)


def killed_at_work(trainer: Trainer, site: SiteFolder, record: RecordDict, at_work: Callable[[], bool]) -> str:
    """What is said of a message whose trainer, by then the only one, is killed when it is at work."""
    failed: list[TrainerFailed] = []

    def asking() -> None:
        try:
            trainer.work("train", record)
        except TrainerFailed as error:
            failed.append(error)

    thread = threading.Thread(target=asking)
    thread.start()
    until_true(at_work, 200)
    os.kill(*trainers(site), signal.SIGKILL)
    thread.join(60)
    return str(failed[0])


@pytest.mark.timeout(600)
def test_a_real_trainer_stays_and_dies(tmp_path: Path, base: Path) -> None:
    """One process for all messages of one content of the settings; killed in the middle of its work, the reply says so.
    The first messages ask for a score without saying on which rows: they are refused, which takes no time."""
    site = a_site(tmp_path / "s", base)
    record, seen, resident = asked_of(agreed(train={"steps": 10**6}), site), [], Trainer(site)
    for _ in range(2):
        with pytest.raises(TrainerFailed, match="validation, test"):
            resident.work("evaluate", record)
        seen += trainers(site)
    assert len(seen) == 2 and seen[0] == seen[1]
    trainer = psutil.Process(seen[0])
    idle = trainer.cpu_times().user
    said = killed_at_work(resident, site, record, lambda: trainer.cpu_times().user > idle + 0.5)
    assert "SIGKILL" in said and "memory" in said
    assert resident.end() == 0 and not trainers(site)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_real_trainers_change_and_end_with_their_owner(tmp_path: Path, base: Path) -> None:
    """Another process, and no second, for another content of the settings; after one that was killed the next message
    finds a new one, and it ends with its owner, at its work."""
    site, script = a_site(tmp_path / "s", base), tmp_path / "owner.py"
    one, long = asked_of(agreed(), site), asked_of(agreed(train={"steps": 10**6}), site)
    resident = Trainer(site)
    first = resident.work("train", one)
    (pid,) = trainers(site)
    assert same(resident.work("train", one), first)
    assert trainers(site) == [pid]
    assert "SIGKILL" in killed_at_work(resident, site, long, lambda: another_works(site, pid))
    assert pid not in trainers(site)
    resident.work("train", one)
    assert len(trainers(site)) == 1 and resident.end() == 0
    script.write_text(
        "import sys; from pathlib import Path; from fedlora.flower.places import SiteFolder\n"
        "from fedlora.flower.site.resident import Trainer, listening_at, pass_on\n"
        "site = SiteFolder(Path(sys.argv[1])); pass_on(listening_at(site), Trainer(site).work, site.path)\n"
    )
    with subprocess.Popen([sys.executable, script, site.path]) as owner:
        until_true(socket_of(site).exists)

        def asking() -> None:
            with pytest.raises(TrainerFailed, match="its node has ended"):
                ask(site.site, "train", long)

        thread = threading.Thread(target=asking)
        thread.start()
        until_true(lambda: another_works(site, pid), 200)
        (last,) = trainers(site)
        os.kill(last, signal.SIGSTOP)  # nothing of its own runs any more, so the kernel must end it
        owner.kill()
    thread.join(20)
    until_true(lambda: ended(last))


@pytest.mark.parametrize("answer", [b"not json", b"[]", b'{"said": {}, "records": {"arrays": {"arrays": [[1]]}}}'])
def test_a_trainer_that_answers_with_rubbish_is_replaced(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """Before, the next message was answered with what was left in the pipe."""
    site, made = a_site(tmp_path / "s", base), list[Any]()
    site.state.mkdir(exist_ok=True)

    def started(self: Trainer) -> Any:
        here, there = Pipe()
        there.send_bytes(answer)
        self._process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        made.append((self._process, there))
        return here

    monkeypatch.setattr(Trainer, "_started", started)
    monkeypatch.setattr("fedlora.flower.site.resident._PATIENCE", 0.1)
    trainer = Trainer(site)
    for _ in range(2):
        with pytest.raises(TrainerFailed, match="its trainer ended by SIGTERM"):
            trainer.work("train", asked_of(agreed(), site))
    assert len(made) == 2 and all(process.poll() is not None for process, _ in made)


def test_a_trainer_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = a_site(tmp_path, tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TrainerFailed, match="with code 1 "):
        Trainer(site).work("train", question(envelope=Envelope("settings")))
    with pytest.raises(TrainerFailed, match="its node has ended"):  # nobody listens
        ask(site.site, "train", RecordDict())


def test_a_site_file_that_is_not_there_is_told_without_its_place(tmp_path: Path) -> None:
    site = SiteFolder(tmp_path)
    serving(site, Trainer(site).work)
    with pytest.raises(TrainerFailed, match=r"ConfigError: .*<site>/site\.toml cannot be read") as error:
        ask(site.site, "train", question(envelope=Envelope(agreed().travelling())))
    assert str(tmp_path) in error.value.full


def test_no_path_of_a_site_is_told(tmp_path: Path) -> None:
    """Those of its data and its model lie elsewhere."""
    (tmp_path / "site.toml").write_text(Site(name="a", data="/secret/d.csv", model="/secret/m").toml())
    words = told_to_server(ConfigError(f"/secret/m of {tmp_path}/site.toml; /secret/d.csv"), tmp_path)
    assert words == "ConfigError: <its model> of <site>/site.toml; <its data>"


def test_the_socket_format_is_lossless_and_breaks_off_cleanly() -> None:
    one, other = Pipe()
    record = RecordDict({"a": ArrayRecord({"x": to_array(torch.ones(2, 3, dtype=torch.bfloat16))}),
                         "m": MetricRecord({"n": 1.5}), "c": ConfigRecord({"s": "t"})})  # fmt: skip
    threading.Thread(target=send_message, args=(one, {"do": "it"}, record)).start()
    words, back = receive_message(other)
    assert words == {"do": "it"} and back is not None
    assert back["a"]["x"].data == record["a"]["x"].data and back["a"]["x"].stype == RAW
    assert dict(back["m"]) == {"n": 1.5} and dict(back["c"]) == {"s": "t"}
    os.write(one.fileno(), b"\0\0\0\5abc")  # two of five bytes are missing
    one.close()
    with other, pytest.raises((OSError, EOFError)):
        receive_message(other)
