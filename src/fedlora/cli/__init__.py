"""The command line: thin commands, related ones in one file. Bad input prints one line and exits with code 2.

options.py   options that several commands share           screen.py, formats.py   output and errors
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import Annotated, NoReturn

import click
import typer

from fedlora.cli.lazy import lazy_group
from fedlora.errors import FedLoRAError

# Command -> its function or its group. Its file is imported when the command is called or shown; no file imports torch
# before the command does its work.
COMMANDS = {
    "run": "runs:run", "demo": "runs:demo", "compare": "compare:compare",
    "audit": "audit:audit", "merge": "merge:merge", "resize": "merge:resize",
    "inspect": "adapters:inspect", "diff": "adapters:diff", "validate": "export:validate", "export": "export:export",
    "privacy": "privacy:privacy", "doctor": "flower.doctor:doctor",
    "methods": "methods:app", "experiment": "experiment:app", "flower": "flower:app",
}  # fmt: skip
_INTERRUPTED = 130
# Command -> what to do after Ctrl-C. Other commands store nothing before they end, or print their own advice.
AFTER_INTERRUPT = {
    **dict.fromkeys(("run", "demo", "compare"), "finished rounds are stored: continue with --resume"),
    "experiment run": "finished runs and rounds are stored: call the same command again",
}

app = typer.Typer(
    cls=lazy_group(__name__, COMMANDS),
    help="Federated LoRA: GLoRA and its baselines. PEFT adapters in and out.",
    epilog="Begin with `fedlora demo`, or with docs/start/tour.md.",
    no_args_is_help=True,
    suggest_commands=False,
    pretty_exceptions_enable=False,
)


def _tell_versions(asked: bool) -> None:
    if asked:
        from fedlora.versions import report  # importlib.metadata, with the parser of mail

        print(report())
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_versions, is_eager=True, help="Print the versions, for a bug report."),
    ] = False,
) -> None: ...


def main() -> None:
    """The entry point: a fedlora error prints one line and exits with code 2; an interrupt says how to continue."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a narrow encoding prints letters that it lacks as codes
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False) or 0
        if code == _INTERRUPTED:  # typer's own answer to Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except FedLoRAError as error:
        sys.exit(_complain(str(error)))
    except OSError as error:  # a full disk, a folder without write permission
        sys.exit(
            _complain(f"{error.filename or 'a file'}: {error.strerror or error}. Mend that, or name another place.")
        )
    except MemoryError:
        sys.exit(
            _complain(
                "this machine has too little memory for that. End other programs, or give it less work at once: fewer "
                "workers, a smaller batch, a smaller model."
            )
        )
    except click.ClickException as error:  # a wrong option or argument
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would show tracebacks of libraries at their end
        from fedlora.cli.screen import notes

        first, second = [*(word for word in sys.argv[1:] if not word.startswith("-")), "", ""][:2]
        how = AFTER_INTERRUPT.get(first) or AFTER_INTERRUPT.get(f"{first} {second}")
        notes.print(f"interrupted; {how}" if how else "interrupted")
        _leave(_INTERRUPTED)


def _leave(code: int) -> NoReturn:
    """End this process after its exit functions: Python would then take torch and transformers apart, for seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _complain(message: str) -> int:
    from fedlora.cli.screen import complain  # imports rich only when needed

    return complain(message)
