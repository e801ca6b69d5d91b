"""A federation on loopback, its processes killed one after the other: supervised, it ends as if nothing had happened.

Kind: *end to end*. SuperLink and three nodes over TLS with node authentication, as `fedlora flower up` starts them.
Marked `deployment_all` (`make deployment-all`), for it takes some minutes of real processes. On separate machines:
tests/deployment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("flwr")

from fedlora import read_adapter
from fedlora.flower import processes
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import holder
from fedlora.flower.server.journal import read_rounds
from fedlora.flower.server.opening import opening
from fedlora.flower.site.trainer import keeping
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.config import load_config
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.command_line import Said
from support.flower_grid import bits
from support.machines import free_port, until
from support.tiny_models import bert
from support.training_data import classification, save_model

pytestmark = [pytest.mark.deployment_all, pytest.mark.timeout(2400)]

ROUNDS = 6
CONFIG = """\
model = {{ name = "{base}" }}
lora = {{ target_modules = ["query", "value"] }}
server = {{ quorum = 3 }}
clients = {{ ranks = [1, 2, 4] }}
train = {{ learning_rate = 0.01, max_steps = 2, batch_size = 4 }}
run = {{ rounds = {rounds}, threads = 1 }}
evaluate = {{ every = 6 }}
[data]
clients = {{ a = "{root}/a.jsonl", b = "{root}/b.jsonl", c = "{root}/c.jsonl" }}
validation = 0.2
test = 0.2
max_length = 16
"""


class Kept:
    """`fedlora flower up`, started again when it fails, as a unit would do with `serve`; its output in `log`."""

    def __init__(self, log: Path, words: Sequence[object]) -> None:
        self._words = [sys.executable, "-m", "fedlora.cli", *map(str, words)]
        self._log, self.codes = log, list[int]()
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as file:
            return subprocess.Popen(self._words, stdout=file, stderr=file, start_new_session=True)

    def look(self) -> None:
        """Once in a while."""
        if self.process.poll() is not None:
            self.codes.append(self.process.returncode)
            self.process = self._started()

    def kill(self) -> None:
        """And nothing that it started: these have groups of their own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def started_for(flower_home: Path) -> list[psutil.Process]:
    """All processes of that folder, with those that an earlier launcher left, by their environments."""
    found = psutil.process_iter(["environ"])
    return [one for one in found if (one.info["environ"] or {}).get(processes.OF) == str(flower_home)]


def test_killed_again_and_again_it_ends_as_undisturbed(tmp_path: Path, main: Callable[..., Said]) -> None:
    """The SuperLink killed -9 twice, the ServerApp once, `up` itself once, which leaves nothing running: the state is
    bit for bit the in-process engine's after as many rounds, each round is recorded once, and nothing is left."""
    base = save_model(tmp_path / "base", bert(), classifies=True)
    for k, name in enumerate("abc"):
        data = classification(30, k)
        assert data.labels is not None
        rows = [json.dumps({"text": t, "label": y}) for t, y in zip(data.text, data.labels, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(base=base, root=tmp_path, rounds=ROUNDS))
    folder = FederationFolder(tmp_path / "f")
    words = ("flower", "up", config, "--out", folder.path, "--superlink-port", free_port())

    def running_of(*programs: str) -> list[int]:
        """Of the server, by the words of their command lines."""
        found = [(one.pid, one.cmdline()) for one in started_for(folder.flower_home)]
        return [pid for pid, words in found if any(Path(word).name in programs for word in words[:3])]

    def running() -> list[psutil.Process]:
        homes = (folder.flower_home, *(folder.site(name).state / "flwr" for name in "abc"))
        return [one for home in homes for one in started_for(home)]

    def waits(true: Callable[[], Any]) -> Any:
        def looked() -> Any:
            up.look()
            return true()

        return until(looked, 600, f"see {log}")

    def kill(program: str) -> None:
        os.kill(waits(lambda: running_of(program))[0], signal.SIGKILL)

    def played(number: int) -> None:
        waits(lambda: len(read_rounds(folder.rounds)) >= number)

    log = tmp_path / "up.log"
    up = Kept(log, words)
    try:
        played(1)
        second = main(*words)
        assert second.code == 2 and f"process {up.process.pid} already serves" in second.err
        assert holder(folder.lock) == up.process.pid
        kill(processes.SUPERLINK)
        played(2)
        kill("flwr-serverapp")  # which Flower notices after a minute
        played(3)
        kill(processes.SUPERLINK)
        played(4)
        assert running_of(processes.SUPERLINK) and len(running()) >= 5
    finally:
        up.kill()
    until(lambda: not running(), 30, "nothing is left")
    said = log.read_text()
    assert up.codes == [1, 1, 1] and said.count("the SuperLink ended with code -9: ") == 2
    assert "the run failed" in said
    assert folder.database.stat().st_mode & 0o077 == 0

    again = tmp_path / "again.log"
    last = Kept(again, words)
    try:
        assert last.process.wait(900) == 0, processes.tail(again, 6000)
    finally:
        last.kill()
    said = again.read_text()
    assert f"complete after {ROUNDS} rounds" in said and "raise run.rounds" in said
    assert not running()

    finished = main(*words)
    assert finished.code == 0 and f"complete after {ROUNDS} rounds" in finished.out
    told = json.loads(main("flower", "status", folder.path, "--json").out)
    assert (told["round"], told["finished"], told["superlink"], told["served_by"]) == (ROUNDS, "complete", False, None)
    assert all(told["sites"][name]["fates"]["trained"] == ROUNDS for name in "abc")

    lines = read_rounds(folder.rounds)
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    assert all(set(line["losses"]) == {"a", "b", "c"} for line in lines)
    adapter, _ = read_adapter(folder.adapter)
    assert adapter.modules and adapter.heads

    loaded_config = load_config(config, [])
    prepared: Any = prepare(loaded_config, keep=keeping(FederationSettings.load(folder.settings)))
    state = start(prepared.server, prepared.seed_adapter)
    expected = list(simulate(prepared.server, prepared.clients, prepared.trainer, state, rounds=ROUNDS))[-1]
    _, newest = opening(folder.path)
    assert newest.state.round == ROUNDS and bits(newest.state.server) == bits(expected.state.server)
