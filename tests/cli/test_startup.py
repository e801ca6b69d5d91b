"""What the command line needs before a command works: typer and rich, no torch. Kind: structural.

The modules are those of a process of its own, as `sys.modules` has them when it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import pytest

with warnings.catch_warnings():
    # typer < 0.21 asks click 8.3 for names that click 9 will drop, when it is imported.
    warnings.filterwarnings("ignore", r"'click\..* is deprecated", DeprecationWarning)
    import typer.main

    import fedlora.cli
    from fedlora.cli import COMMANDS, app
    from fedlora.cli.lazy import loaded

from support.command_line import Said

HEAVY = {"torch", "transformers", "peft", "numpy", "pydantic", "matplotlib", "sklearn", "flwr", "datasets"}

PROGRAM = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr))
sys.argv = ["fedlora", *sys.argv[1:]]
from fedlora.cli import main
main()
"""


def process(*args: str, **environment: str) -> tuple[str, set[str]]:
    """`fedlora ARGS`: what it printed, and the top packages that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


def test_help_imports_nothing_heavy_and_lists_every_command() -> None:
    out, imported = process("--help")
    assert not imported & HEAVY
    assert all(f" {name} " in out for name in COMMANDS)


def test_the_help_of_no_command_imports_anything_heavy() -> None:
    """Of every command, those of groups too: all asked in one process, which then has imported nothing of `HEAVY`. A
    command's file imports torch in its functions: a question about options is no work."""
    ask = """
import atexit, json, sys
from fedlora.cli.lazy import loaded
from fedlora.cli import COMMANDS
import click
asked = []
def walk(command, words):
    asked.append(words)
    with click.Context(command, info_name=words) as context:
        command.get_help(context)
        for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
            walk(command.resolve_command(context, [inner])[1], f"{words} {inner}")
for name, (where, _) in COMMANDS.items():
    walk(loaded(name, f"fedlora.cli.{where}"), name)
print(json.dumps([asked, sorted({name.split(".")[0] for name in sys.modules})]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ask], capture_output=True, text=True, check=True)
    asked, imported = json.loads(done.stdout.splitlines()[-1])
    assert {"run", "compare", "experiment run", "experiment report", "flower up", "methods"} <= set(asked)
    assert not set(imported) & HEAVY


def test_the_version_imports_nothing_heavy() -> None:
    out, imported = process("--version")
    assert out.startswith("fedlora") and not imported & HEAVY


def test_completion_of_a_command_imports_nothing_heavy() -> None:
    """Bash's own protocol: the words typed so far, and which of them is asked for."""
    out, imported = process(_FEDLORA_COMPLETE="complete_bash", COMP_WORDS="fedlora m", COMP_CWORD="1")
    assert out.split() == ["merge", "methods"]
    assert not imported & HEAVY


def test_options_of_a_command_are_completed_too() -> None:
    out, _ = process(_FEDLORA_COMPLETE="complete_bash", COMP_WORDS="fedlora ranks --pl", COMP_CWORD="2")
    assert out.split() == ["--plot"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says_of_itself(name: str) -> None:
    """The line of `fedlora --help` is the first line of the command's docstring (of a group: its help)."""
    where, line = COMMANDS[name]
    command = loaded(name, f"fedlora.cli.{where}")
    assert command.name == name and (command.help or "").splitlines()[0] == line


def test_a_called_command_is_the_whole_one() -> None:
    """What a parent resolves has the options of its function; what it lists has none."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    with click.Context(group) as context:
        _, command, rest = group.resolve_command(context, ["merge", "a"])
    assert command is not None and rest == ["a"]
    assert {"--out", "--rank"} <= {option for param in command.params for option in param.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_has_words(name: str) -> None:
    """Those of the function's annotations: typer 0.20 gives an argument's to click, and click 8.5 loses them."""

    def walk(command: click.Command) -> None:
        for inner in getattr(command, "commands", {}).values():
            walk(inner)
        bare = [param.name for param in command.params if not vars(param).get("help") and param.name != "help"]
        assert not bare, f"{command.name}: {bare}"

    walk(loaded(name, f"fedlora.cli.{COMMANDS[name][0]}"))


@pytest.mark.parametrize("typed", ["merg", "flower sttus"])
def test_a_mistyped_command_is_answered_once(typed: str, main: Callable[..., Said]) -> None:
    """typer 0.20 and click 8.4 both know what may be meant, and both would say it."""
    assert main(*typed.split()).err.count("Did you mean") == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run x.toml --rounds 3", "key of the config: --set run.rounds=VALUE"),
        ("demo --method svd", "key of the config: --set method.name=VALUE"),
        ("run x.toml --rank 4", "clients.ranks, privacy.rank: --set KEY=VALUE"),
        ("run x.toml --resum", "Did you mean '--resume'?"),  # an option of the command, and no key
        ("merge a --rounds 3", "No such option '--rounds'."),  # a command without --set has no keys
    ],
)
def test_a_key_of_the_config_that_was_typed_as_an_option_is_found(
    typed: str, said: str, main: Callable[..., Said], wide: None
) -> None:
    told = main(*typed.split())
    answer = told.err
    assert told.code == 2 and "Traceback" not in answer
    assert said in answer and ("--set" in said) == ("--set" in answer)


def test_the_core_alone_tells_its_versions_and_what_a_command_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where only fedlora's core is installed: typer is not there."""
    import fedlora.__main__ as entry

    for name in [name for name in sys.modules if name.startswith("fedlora.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["fedlora", "--version"])
    entry.main()
    assert capsys.readouterr().out.startswith("fedlora ")
    monkeypatch.setattr(sys, "argv", ["fedlora", "merge", "a", "b"])
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    assert "pip install 'fedlora[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [
        (["run", "my.toml"], "go on with --resume"),
        (["demo"], "go on with --resume"),
        (["experiment", "run", "x"], "same command goes on"),
        (["experiment", "report", "x"], ""),
        (["merge", "a", "b"], ""),
        (["--version"], ""),
    ],
)
def test_an_interrupt_promises_what_the_command_can_do(
    words: list[str], goes_on: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedlora", *words])
    monkeypatch.setattr(fedlora.cli, "app", lambda **how: 130)
    with pytest.raises(SystemExit, match="130"):
        fedlora.cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("interrupted; ") and said.endswith(goes_on) if goes_on else said == "interrupted"


def test_the_commands_with_resume_are_the_ones_that_say_so() -> None:
    found = {
        name
        for name, (where, _) in fedlora.cli.COMMANDS.items()
        if any("--resume" in option.opts for option in loaded(name, f"fedlora.cli.{where}").params)
    }
    assert found == {name for name, how in fedlora.cli.AFTER_INTERRUPT.items() if "--resume" in how}


def test_the_entry_point_starts_where_warnings_are_errors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fedlora", "methods"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "glora" in done.stdout, done.stderr
