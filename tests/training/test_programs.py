"""A client's own program as its trainer. Kind: end to end, with programs of a few lines; each fault made on purpose."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, AdapterSpec, Client, LoRA, Server, build, read_adapter, write_adapter
from fedlora.client import ClientMemory, play_round
from fedlora.core.read_only import ReadOnly
from fedlora.data.rows import Rows
from fedlora.errors import ClientFailed, ConfigError
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.programs import Program, ProgramTrainer, check_program
from fedlora.training.round_folder import ProgramFailed, RoundFacts, RoundFolder
from fedlora.training.settings import LoRASettings
from support.own_programs import DOUBLING, command

SPEC = AdapterSpec(
    ReadOnly({"peft_type": "LORA", "target_modules": ["q", "v"], "base_model_name_or_path": "org/base"}), 2.0
)


def adapter(rank: int = 4, seed: int = 0) -> Adapter:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 5), "v": (7, 5)}
    return Adapter({
        name: LoRA(torch.randn(d, rank, generator=draw), torch.randn(rank, k, generator=draw))
        for name, (d, k) in shapes.items()
    })  # fmt: skip


def trainer_of(tmp_path: Path, text: str, *words: str, lora: LoRASettings | None = None, **more: Any) -> ProgramTrainer:
    program = Program(command(tmp_path, text, *words), more.pop("timeout", None))
    return ProgramTrainer(program, SPEC, lora or LoRASettings(), tmp_path / "work", **more)


ACME = Client("acme", 4)


def played(trainer: ProgramTrainer, method: str = "fedit", begun: Adapter | None = None, **more: Any) -> Any:
    server = Server(build(method, **more))
    state = server.init(begun or adapter())
    return play_round(server.download(state, ACME), ClientMemory(), trainer)


def test_a_program_plays_rounds(tmp_path: Path) -> None:
    """B doubles in each round: after two rounds of one client the update is four times the start's."""
    server, begun = Server(build("fedit")), adapter()
    trainer = trainer_of(tmp_path, DOUBLING)
    records = list(simulate(server, [Client("acme", 4)], trainer, start(server, begun), rounds=2))
    update = server.global_update(records[-1].state.server)
    for name, lora in begun.modules.items():
        torch.testing.assert_close(update[name].delta(), 4 * lora.delta())
    assert [record.losses["acme"] for record in records] == [1.0, 0.5]
    place = tmp_path / "work" / "acme"
    assert not (place / "round").exists()
    assert (place / "program.log").read_text() == "done acme\n"


def test_what_a_client_keeps_is_trained_by_its_program(tmp_path: Path) -> None:
    """FedSA-LoRA keeps B at home, doubled, and sends A."""
    done = played(trainer_of(tmp_path, DOUBLING), "fedsa-lora")
    assert done.upload.adapter.modules["q"].B is None and done.memory.kept is not None
    assert torch.equal(done.memory.kept.modules["q"].B, 2 * adapter().modules["q"].B)


def test_the_change_of_the_base_travels_beside_the_start(tmp_path: Path) -> None:
    """FedEx-LoRA moves the base after the first round: base/ holds the change, as an adapter for peft to merge; a
    program that does not say that it merged it is refused."""
    server, clients = Server(build("fedex-lora")), [Client("a", 4), Client("b", 4)]
    copied = f"if said['base']: shutil.copytree(here / 'base', '{tmp_path}/' + said['client'])"
    trainer = trainer_of(tmp_path, f"{DOUBLING}\n{copied}")

    class Different:  # the two clients' updates must differ, otherwise the mean of factors is exact
        def train(self, download: Any, mine: Adapter, position: int) -> Any:
            done = trainer.train(download, mine, position)
            turned = {n: LoRA(3 * lora.B, lora.A.flip(0)) for n, lora in done.adapter.modules.items()}
            made = Adapter(turned if download.client.id == "a" else done.adapter.modules, {}, done.adapter.base)
            return type(done)(made, done.num_examples, done.loss, done.position)

    records = list(simulate(server, clients, Different(), start(server, adapter()), rounds=2))
    moved, _ = read_adapter(tmp_path / "a", scaling=2.0)
    change = server.download(records[0].state.server, clients[0]).base_delta
    assert set(change) == {"q", "v"}
    for name, lora in change.items():
        torch.testing.assert_close(moved.modules[name].delta(), lora.delta())

    silent = trainer_of(tmp_path, DOUBLING.replace('said["base"]', "None"))
    with pytest.raises(ClientFailed, match=r"base is None, and round.json has"):
        list(simulate(server, clients, silent, records[0].state, rounds=2))


FAULTS = {
    "code 3": ("import sys; print('no room'); sys.exit(3)", r"ended with code 3 after \d s. Its last line: 'no room'"),
    "nothing": ("pass", r"left no result and no result.json .* federate\(trainer\) .* hand_back"),
    "nan": (DOUBLING.replace('1 / said["round"]', "float('nan')"), r"result.json cannot be read: loss"),
    "half a file": (DOUBLING.replace("write_bytes(out)", "write_bytes(out[:200])"), r"its result cannot be read: "),
    "rank": (
        DOUBLING + "\nshutil.rmtree(here / 'result'); shutil.copytree(OTHER, here / 'result')",
        r"B of q of its result has shape \(\d+, 2\), and that of the start \(\d+, 4\): train the adapter in start/",
    ),
    "module": (
        DOUBLING + "\nshutil.rmtree(here / 'result'); shutil.copytree(FEW, here / 'result')",
        r"differ in 'v' \(1 such\)\. The result adapts q \(1 module\), the start q, v \(2 modules\): .* target_modules",
    ),
}  # fmt: skip


def test_a_program_that_runs_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    """The kernel's list of processes says whether its child lives: a child that is over has state Z, or no entry."""
    text = f"""
import subprocess, time
open({str(tmp_path / "child")!r}, "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
time.sleep(60)
"""
    with pytest.raises(ProgramFailed, match=r"timeout of 3 s"):
        played(trainer_of(tmp_path, text, timeout=3.0))
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child is alive")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_program_is_named_and_nothing_is_lost(tmp_path: Path, fault: str) -> None:
    write_adapter(tmp_path / "rank", adapter(2), SPEC)
    write_adapter(tmp_path / "few", Adapter({"q": adapter().modules["q"]}), SPEC)
    text, says = FAULTS[fault]
    text = text.replace("OTHER", f"'{tmp_path}/rank'").replace("FEW", f"'{tmp_path}/few'")
    with pytest.raises(ProgramFailed, match=says) as failed:
        played(trainer_of(tmp_path, text))
    assert f"Its log: {tmp_path}/work/acme/program.log" in str(failed.value)
    old = tmp_path / "work" / "acme" / "round"  # what it left does not count as a result of the next
    (old / "result").mkdir(parents=True, exist_ok=True)
    (old / "result.json").write_text(json.dumps({"examples": 1, "loss": 0.0}))
    with pytest.raises(ProgramFailed, match=r"no result and no result.json"):
        played(trainer_of(tmp_path, "pass"))
    played(trainer_of(tmp_path, DOUBLING))  # the next round plays as if nothing had been


def test_a_frozen_part_that_was_trained_is_refused(tmp_path: Path) -> None:
    """FFA-LoRA freezes A; this program changes it, and A would not travel: the server would add up other updates."""
    text = DOUBLING.replace('"lora_B" in name and "B" in said["trains"]', '"lora_A" in name')
    with pytest.raises(ProgramFailed, match=r"trained A of q, which this method freezes"):
        played(trainer_of(tmp_path, text), "ffa-lora")


def test_a_frozen_part_in_a_narrower_type_is_the_starts_own(tmp_path: Path) -> None:
    """A script that saves in bfloat16 rounds A by up to 2^-9 of it; what counts is the start's A, bit for bit."""
    begun = adapter()
    facts = RoundFacts(client="acme", round=1, rounds=1, scaling=2.0, trains=["B"])
    folder = RoundFolder(tmp_path)
    folder.result_facts.write_text('{"examples": 3, "loss": 0.5}')
    write_adapter(folder.result, begun.map(Tensor.bfloat16), SPEC)
    made, _ = folder.read_result(begun, facts)
    assert all(torch.equal(made.modules[name].A, lora.A) for name, lora in begun.modules.items())
    moved = Adapter({name: LoRA(lora.B, lora.A * 1.02) for name, lora in begun.modules.items()})
    write_adapter(folder.result, moved.map(Tensor.bfloat16), SPEC)
    with pytest.raises(ProgramFailed, match="which this method freezes"):
        folder.read_result(begun, facts)


def test_the_command_names_the_clients_data(tmp_path: Path) -> None:
    """{data} is a file of rows as they were, with all columns, in the form of the file that they came from."""
    rows = [{"note": f"w{k}", "class": k % 2, "rejected": "x"} for k in range(4)]
    text = "import shutil, sys; shutil.copy(sys.argv[1].removeprefix('--of='), sys.argv[2])" + DOUBLING
    trainer = trainer_of(tmp_path, text, "--of={data}", str(tmp_path / "seen"), data={"acme": Rows(rows, ".csv")})
    played(trainer)
    table = "note,class,rejected\n" + "".join(f"w{k},{k % 2},x\n" for k in range(4))
    assert (tmp_path / "seen").read_text() == table


def test_what_a_program_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    server = Server(build("fedit"))
    download = server.download(server.init(adapter()), Client("acme", 4))
    mixed = Adapter({"q": adapter(2).modules["q"], "v": adapter(4).modules["v"]})
    with pytest.raises(ConfigError, match=r"several scales \(\[4.0, 8.0\]\)"):
        trainer_of(tmp_path, DOUBLING, lora=LoRASettings(lora_alpha=16.0)).train(download, mixed, 0)
    missing = ProgramTrainer(Program(["no-such-program"]), SPEC, LoRASettings(), tmp_path / "work")
    with pytest.raises(ProgramFailed, match=r"'no-such-program': No such file"):
        played(missing)
    check_program(Program(["python", "-m", "mine"]))
    with pytest.raises(ConfigError, match="no program"):
        check_program(Program(["no-such-program"]))


def test_a_fixed_alpha_reaches_the_program_as_its_scale(tmp_path: Path) -> None:
    """alpha 16 at rank 4 is a scale of 4, and the update 1 * B A travels; the program sees 4 * (B / 4) A."""
    text = f"import shutil, os; shutil.copytree(os.environ['FEDLORA_ROUND'] + '/start', '{tmp_path}/seen')" + DOUBLING
    done = played(trainer_of(tmp_path, text, lora=LoRASettings(lora_alpha=16.0)))
    said = json.loads((tmp_path / "seen" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (4, 16)
    for name, lora in adapter().modules.items():
        assert torch.equal(done.upload.adapter.modules[name].B, 2 * lora.B)
