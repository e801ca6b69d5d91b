"""`fedlora flower init | up | simulate`, `fedlora doctor`: a federation on Flower, from a folder."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedlora.cli.screen import complain, console, notes, print_json
from fedlora.errors import ConfigError
from fedlora.runs.config import load_config
from fedlora.runs.preparation import prepare

app = typer.Typer(help="A federation on Flower: SuperLink, SuperNodes, TLS.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="a folder of `fedlora flower init`", show_default=False)]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="a run's TOML file (default: the demo with three sites)")] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the SuperLink, on loopback")] = 18080,
    insecure: Annotated[bool, typer.Option("--insecure", help="no TLS and no node authentication")] = False,
) -> None:
    """Write all that a federation needs: app, start, policy, certificates and keys for a trial, systemd units."""
    needed()
    from fedlora.flower.project import not_looked_at, write_project

    demo = Path(sys.modules["fedlora"].__file__ or "").parent / "demo.toml"
    trial = ["clients.count=3", "clients.ranks=[2,4,8]", "run.rounds=3", "server.quorum=2", "run.threads=1"]
    loaded = load_config(config or demo, [*(trial if config is None else []), *(set or [])])
    if config is not None and (ignored := not_looked_at(loaded)):
        notes.print(
            f"{', '.join(ignored)}: for fedlora run; the Flower app measures the server's model at the end, and stores "
            f"the rounds and the adapter.",
            style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip
    if insecure:
        notes.print(
            "warning: without TLS and node authentication anybody on this machine can take part.", style="yellow"
        )
    notes.print("loading the model, for the common start ...")
    write_project(folder, prepare(loaded, None), port=port, insecure=insecure)
    console.print(f"{folder}: ready. Try it on this machine: fedlora flower up {folder}", markup=False, soft_wrap=True)


@app.command()
def up(
    folder: Folder,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last checkpoint")] = False,
    evaluate: Annotated[bool, typer.Option(help="measure the test metric at the end, on the server")] = True,
) -> None:
    """A trial on loopback: start SuperLink and nodes, run the federation, take everything down again."""
    needed()
    from fedlora.flower.trial import Trial

    trial = Trial(folder, say=lambda line: notes.print(line, markup=False, highlight=False, soft_wrap=True))
    with trial:
        _show_nodes(trial)
        code = trial.run(resume=resume, evaluate=evaluate)
        _show_nodes(trial)
    if code:
        raise typer.Exit(
            complain(f"the run did not complete; what it finished is stored: fedlora flower up {folder} --resume")
        )
    console.print((folder / "server" / "summary.json").read_text(encoding="utf-8"), markup=False)


@app.command()
def simulate(
    folder: Folder,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last checkpoint")] = False,
    evaluate: Annotated[bool, typer.Option(help="measure the test metric at the end")] = True,
) -> None:
    """The same federation in Flower's simulation engine (Ray), in place of SuperLink and SuperNodes."""
    needed()
    from fedlora.flower.simulated import simulate_federation

    print_json(simulate_federation(folder, resume=resume, evaluate=evaluate))


def doctor(
    folder: Annotated[Path | None, typer.Argument(help="a folder of `fedlora flower init`, to check too")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Check this machine for a federation: versions, ports, certificates, identity, message sizes, disk."""
    rows = _versions()
    if folder is not None:
        needed()
        from fedlora.flower.checkup import checked_folder

        rows += checked_folder(folder)
    if json:
        print_json([{"what": what, "found": found, "sound": sound} for what, found, sound in rows])
    else:
        table = Table("", "found", "")
        for what, found, sound in rows:
            table.add_row(what, found, "ok" if sound else "[red]no")
        console.print(table)
    if not all(sound for _, _, sound in rows):
        wrong = "; ".join(f"{what}: {found}" for what, found, sound in rows if not sound)
        raise typer.Exit(complain(wrong))


# -------------------------------------------------------------------------------------------------------- inside


def needed() -> None:
    """Raises `ConfigError` where Flower is not installed."""
    try:
        version("flwr")
    except PackageNotFoundError as error:
        raise ConfigError("Flower is not installed: pip install 'fedlora[flower]'.") from error


def _show_nodes(trial: Any) -> None:
    table = Table("node", "status", title="Nodes")
    for node in trial.nodes():
        table.add_row(str(node.get("name") or node.get("node-id")), str(node.get("status")))
    notes.print(table)


def _versions() -> list[tuple[str, str, bool]]:
    rows = [("Python", sys.version.split()[0], sys.version_info >= (3, 11))]
    for name, least in (
        ("torch", "2.6"),
        ("transformers", "5"),
        ("peft", "0.19"),
        ("flwr", "1.41"),
        ("cryptography", "43"),
    ):
        try:
            found = version(name)
            rows.append((name, found, _numbers(found) >= _numbers(least)))
        except PackageNotFoundError:
            rows.append((name, "not installed", False))
    for program in ("flwr", "flower-superlink", "flower-supernode"):
        beside = Path(sys.executable).parent / program
        where = str(beside) if beside.is_file() else shutil.which(program)
        rows.append((program, "found" if where else "not on PATH", bool(where)))
    return rows


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit()]
