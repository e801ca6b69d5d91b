"""`train.command` in a run: clients train by a program of their own. Kinds: *end to end*, tiny model; *contract*."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedlora import read_adapter
from fedlora.runs.config import load_config
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.command_line import Said
from support.own_programs import DOUBLING, command
from support.training_data import classification, rows, save_encoder

LISTING = DOUBLING + "\nimport sys; shutil.copy(sys.argv[1], 'seen')"


def project(folder: Path) -> Path:
    """A run of two clients on files of their own, a quarter of each held out; their programs double B."""
    save_encoder(folder / "model")
    for k, name in enumerate(("acme", "berlin")):
        (folder / f"{name}.jsonl").write_text(rows(classification(24, k)))
    words = json.dumps(command(folder, LISTING, "{data}"))
    (folder / "run.toml").write_text(f"""
[model]
name = "model"
device = "cpu"
[data]
clients = {{ acme = "acme.jsonl", berlin = "berlin.jsonl" }}
validation = 0
test = 0.25
max_length = 16
[lora]
target_modules = ["query"]
[clients]
ranks = [2, 4]
[run]
rounds = 2
threads = 1
[train]
command = {words}
""")
    return folder / "run.toml"


def test_a_run_trains_by_programs_on_the_rows_that_are_not_held_out(tmp_path: Path) -> None:
    config = load_config(project(tmp_path))
    prepared, folder = prepare(config), RunFolder(tmp_path / "out")
    records = list(execute(prepared, folder))
    assert [dict(record.losses) for record in records] == [{"acme": 1.0, "berlin": 1.0}, {"acme": 0.5, "berlin": 0.5}]
    place = folder.path / "programs" / "acme"
    given, seen = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (tmp_path / "acme.jsonl", place / "seen")
    )
    assert len(seen) == len(prepared.parts["acme"]) == 18 and all(row in given for row in seen)
    assert {row["text"] for row in seen} == set(prepared.parts["acme"].text)
    assert read_adapter(folder.path / "adapter")[0].modules


def test_a_failed_program_ends_the_run_with_one_line_and_the_run_goes_on(
    tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Round 2 fails at one client; once the program is mended, the run goes on with that round. At the end the table
    of clients has what the programs said: 30 examples of 18 rows, and none in a round that a client sat out."""
    file, out = project(tmp_path), tmp_path / "out"
    whole = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text(whole + "\nif said['round'] == 2: raise SystemExit('the disk is away')")
    said = main("run", file, "--out", out).err.splitlines()[-1]
    assert "'acme' failed in round 2: ProgramFailed: " in said and "with code 1" in said
    assert "'the disk is away'" in said and "programs/acme/program.log" in said
    sits_out = '{"examples": 0 if (said["client"], said["round"]) == ("berlin", 2) else 30,'
    (tmp_path / "program.py").write_text(whole.replace('{"examples": 30,', sits_out))
    again = main("run", file, "--out", out, "--resume")
    assert again.code == 0, again.err
    cells = [[cell.strip() for cell in line.split("│")] for line in again.out.splitlines()]
    of = {row[1]: row[3] for row in cells if len(row) > 5 and row[1] in ("acme", "berlin")}
    assert of == {"acme": "18; it said 30", "berlin": "18; it said 30; abstained in 1 round"}


def test_files_of_a_command_are_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "python").mkdir()
    (tmp_path / "base").mkdir()
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\nname = "demo"\n[data]\ntrain = "demo"\n[train]\ncommand = ["python", "mine.py", "./base", "{data}"]'
    )
    assert load_config(config).train.command == ["python", str(tmp_path / "mine.py"), str(tmp_path / "base"), "{data}"]
