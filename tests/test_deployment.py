"""A real deployment on loopback: SuperLink and three SuperNodes over TLS with node authentication. Kind: *end to end*.

Marked `deployment` and run by its own step of CI (`make deployment`), for it takes a minute or two of real processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora import read_adapter
from fedlora.core import checkpoint
from fedlora.flower.strategy import FlowerState
from fedlora.flower.trial import Trial, free_port
from fedlora.runs.config import load_config
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.command_line import Said
from support.flower_grid import bits
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import classification, save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS, pytest.mark.deployment, pytest.mark.timeout(420)]

CONFIG = """\
model = {{ path = "{base}" }}
lora = {{ targets = ["query", "value"] }}
server = {{ quorum = 2 }}
clients = {{ ranks = [1, 2, 4] }}
train = {{ lr = 0.01, steps = 2, batch_size = 4 }}
run = {{ rounds = 4, threads = 1 }}
evaluate = {{ every = 4 }}
[data]
clients = {{ a = "{root}/a.jsonl", b = "{root}/b.jsonl", c = "{root}/c.jsonl" }}
validation = 0.2
test = 0.2
max_length = 16
"""


def until(true: Callable[[], bool], seconds: float, trial: Trial) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            logs = "\n".join(f"{p.name}: {p.read_text()[-600:]}" for p in (trial.home / "logs").iterdir())
            raise AssertionError(f"not within {seconds} s\n{logs}")
        time.sleep(0.2)


def test_three_nodes_over_tls_one_killed_the_superlink_restarted(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Round 1 is the in-process engine's, bit for bit; a dead node holds round 2 no longer than the deadline; after the
    SuperLink is killed the run goes on where its checkpoint stands, and ends with an adapter."""
    base = save_model(tmp_path / "base", bert(), classifies=True)
    for k, name in enumerate("abc"):
        data = classification(30, k)
        assert data.labels is not None
        rows = [json.dumps({"text": t, "label": y}) for t, y in zip(data.text, data.labels, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "run.toml").write_text(CONFIG.format(base=base, root=tmp_path))
    folder = tmp_path / "f"
    done = main("flower", "init", folder, "--config", tmp_path / "run.toml", "--port", free_port())
    assert done.code == 0, done.err
    policy = folder / "policy.toml"
    policy.write_text(policy.read_text().replace("deadline = 600.0", "deadline = 40.0"))
    assert main("doctor", folder).code == 0
    for secret in [folder / "certs" / "server.key", *(folder / "keys" / n for n in "abc")]:
        assert secret.stat().st_mode & 0o077 == 0

    rounds = folder / "server" / "rounds.jsonl"

    def played() -> int:
        return len(rounds.read_text().splitlines()) if rounds.exists() else 0

    with Trial(folder) as trial:
        assert sorted(trial.online()) == ["a", "b", "c"]
        running = trial.launch()
        until(lambda: played() >= 1, 120, trial)
        copy = tmp_path / "after1"
        shutil.copytree(folder / "server" / "checkpoints", copy)
        trial.kill("c")
        killed = time.monotonic()
        until(lambda: played() >= 2, 120, trial)
        assert time.monotonic() - killed < 90
        trial.kill("superlink")
        running.kill()
        running.communicate()
        assert running.stdout is not None and running.stdout.closed
        at = played()
        trial.start_superlink()
        trial.wait_online(2)
        log: list[str] = []
        code = trial.run(resume=True, evaluate=True, out=log.append)
        assert code == 0, "\n".join(log[-30:])
    assert not [line for line in processes() if str(folder) in line]

    facts = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert at < 4 and [f["round"] for f in facts][-1] == 4 and {f["round"] for f in facts} == {1, 2, 3, 4}
    assert set(facts[0]["weights"]) == {"a", "b", "c"} and set(facts[-1]["weights"]) == {"a", "b"}
    summary = json.loads((folder / "server" / "summary.json").read_text())
    assert summary["rounds"] == 4 and 0 <= summary["test"]["accuracy"] <= 1
    adapter, _ = read_adapter(folder / "server" / "adapter")
    assert adapter.modules and adapter.heads

    config = load_config(folder / "run.toml", [])
    server = config.server.build(config.method.build(), config.run.seed)
    loaded = checkpoint.load_newest(copy, FlowerState, server.method.State, upto=1)
    assert loaded is not None
    prepared: Any = prepare(config)
    record = next(
        simulate(
            prepared.server, prepared.clients, prepared.trainer, start(prepared.server, prepared.seed_adapter), rounds=1
        )
    )
    assert bits(loaded[1].state.server) == bits(record.state.server)


def processes() -> list[str]:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_key_that_is_not_registered_gets_no_work(tmp_path: Path, main: Callable[..., Said]) -> None:
    """A stranger with a key of its own and the CA's certificate is refused by the SuperLink."""
    from fedlora.flower.project import supernode_command, write_keys

    base = save_model(tmp_path / "base", bert(), classifies=True)
    (tmp_path / "d.csv").write_text("text,label\n" + "w1 w2,0\nw3 w4,1\nw5 w6,2\n" * 8)
    config = tmp_path / "run.toml"
    config.write_text(
        f'model = {{ path = "{base}" }}\nlora = {{ targets = ["query"] }}\nclients = {{ ranks = [2] }}\n'
        f'[data]\ntrain = "{tmp_path}/d.csv"\nvalidation = 0.0\ntest = 0.0\n'
    )
    folder = tmp_path / "f"
    assert main("flower", "init", folder, "--config", config, "--port", free_port()).code == 0
    trial = Trial(folder)
    try:
        trial.start_superlink()
        write_keys(tmp_path / "stranger", ["mallory"])
        command = supernode_command(trial.home, "mallory", trial.address, free_port(), insecure=False)
        command[command.index("--auth-supernode-private-key") + 1] = str(tmp_path / "stranger" / "mallory")
        program = str(Path(sys.executable).parent / command[0])
        with (tmp_path / "log").open("wb") as log:
            stranger = subprocess.Popen(
                [program, *command[1:]], env=trial._env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            assert stranger.wait(60) != 0
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started itself stays behind
                os.killpg(stranger.pid, signal.SIGKILL)
        assert "305" in (tmp_path / "log").read_text()  # Flower's code for a refused key
        assert not trial.online()
    finally:
        trial.stop()
