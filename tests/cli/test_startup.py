"""What the command line needs before a command works: typer and rich, no torch. Kind: structural.

The modules are those of a process of its own, as `sys.modules` has them after each question.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click
import pytest

with warnings.catch_warnings():
    # typer < 0.21 asks click 8.3 for names that click 9 will drop, when it is imported.
    warnings.filterwarnings("ignore", r"'click\..* is deprecated", DeprecationWarning)
    import typer.main

    import fedlora.cli
    from fedlora.cli import COMMANDS, app


HEAVY = {"torch", "transformers", "peft", "numpy", "pydantic", "matplotlib", "sklearn", "flwr", "datasets"}
ROOT = typer.main.get_command(app)

# Calls the entry point with each of the given words and environments in turn; a line of JSON for each: its words, what
# it printed, and the top packages that were imported by then.
PROGRAM = """
import contextlib, io, json, os, sys
asked = json.load(sys.stdin)
from fedlora.__main__ import main
for words, environment in asked:
    sys.argv, out = ["fedlora", *words], io.StringIO()
    os.environ.update(environment)
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    for name in environment:
        del os.environ[name]
    print(json.dumps([words, out.getvalue(), sorted({name.split(".")[0] for name in sys.modules})]))
"""


def walk(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """(its words, itself) of each command and group below."""
    yield path, command
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(found, *path, name)


def asked(*questions: tuple[Sequence[str], dict[str, str]]) -> list[tuple[list[str], str, set[str]]]:
    """In one process where warnings are errors: a question's words, the answer, what was imported by then."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], input=json.dumps(questions), capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    lines: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    return [(words, out, set(imported)) for words, out, imported in lines]


def test_what_is_asked_of_any_command_imports_nothing_heavy() -> None:
    """A command's file imports torch in its functions: help, completion by Bash's own protocol, and the version are no
    work. The help of the program comes last of all help, for it names every command."""

    def completion(words: str, which: int) -> dict[str, str]:
        return {"_FEDLORA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(which)}

    pages = [[*path, "--help"] for path, _ in reversed([*walk(ROOT)])]
    assert len(pages) > 30 and ["--help"] in pages and ["flower", "serve", "--help"] in pages
    found = asked(
        ([], completion("fedlora m", 1)), ([], completion("fedlora experiment plot --ou", 3)),
        *((page, {}) for page in pages),
        (["--version"], {}), (["methods", "--json"], {}),
    )  # fmt: skip
    assert "glora" in found.pop()[1]  # a command that works, warnings being errors
    assert [out.split() for _, out, _ in found[:2]] == [["merge", "methods"], ["--out"]]
    assert all("Usage" in out for words, out, _ in found if "--help" in words)
    assert all(f" {name} " in found[-2][1] for name in COMMANDS) and found[-1][1].startswith("fedlora")
    first = {name: next(words for words, _, there in found if name in there) for name in HEAVY & found[-1][2]}
    assert not first, f"package -> the question that imported it: {first}"


def test_every_argument_and_option_has_words() -> None:
    """Those of the function's annotations: typer 0.20 gives an argument's to click, and click 8.5 loses them."""
    bare = {
        " ".join(path): [param.name for param in command.params if not vars(param).get("help") and param.name != "help"]
        for path, command in walk(ROOT)
    }
    assert not {path: names for path, names in bare.items() if names}


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


@pytest.mark.parametrize("words", ["run my.toml", "experiment run x", "merge a b"])
def test_an_interrupt_promises_what_the_command_can_do(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"run": "with --resume", "experiment": "same command again", "merge": "interrupted"}[words.split()[0]]
    monkeypatch.setattr(sys, "argv", ["fedlora", *words.split()])
    monkeypatch.setattr(fedlora.cli, "app", lambda **how: 130)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="130"):
        fedlora.cli.main()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN, "a second one could interrupt Python's end"
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("interrupted") and said.endswith(ends)


def test_an_interrupted_process_runs_its_exit_functions_and_takes_nothing_apart() -> None:
    """What lives until Python's end, as torch does, has its own end skipped: `__del__` would say so."""
    code = """
import atexit, fedlora.cli, sys
class Library:
    def __del__(self): print("taken apart")
sys.modules["library"] = Library()
atexit.register(print, "put away")
sys.argv = ["fedlora", "experiment", "run", "x"]
fedlora.cli.app = lambda **how: 130
fedlora.cli.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "put away\n")


def test_the_commands_with_resume_are_the_ones_that_say_so() -> None:
    found = {path[0] for path, command in walk(ROOT) if any("--resume" in option.opts for option in command.params)}
    assert found == {name for name, how in fedlora.cli.AFTER_INTERRUPT.items() if "--resume" in how}
