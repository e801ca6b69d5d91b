"""The command line: thin commands, one file for those that belong together. Bad input is one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import click
import typer

from fedlora.cli.lazy import lazy_group
from fedlora.errors import FedLoRAError
from fedlora.versions import report

# Name -> where the command is, and the first line of its docstring: imported when it is called, not before.
COMMANDS = {
    "run": ("runs:run", "Run one federation from a config file."),
    "demo": (
        "runs:demo",
        "GLoRA on a real model and real text: six sites of ranks 2 to 16, about three minutes on two cores.",
    ),
    "compare": (
        "compare:compare",
        "Run several methods on the same clients, data and seeds: means and paired intervals.",
    ),
    "ranks": ("methods:ranks", "Show how many clients of which rank a profile (clients.profile) makes."),
    "audit": (
        "audit:audit",
        "Re-express adapters in random coordinates and see which methods' results move; and which hit the true mean.",
    ),
    "merge": (
        "merge:merge",
        "Merge adapters into one: the exact weighted mean of their updates, then the best adapter of the asked rank.",
    ),
    "resize": (
        "merge:resize",
        "Write an adapter at another rank: the best approximation that it has, and what that loses.",
    ),
    "train": (
        "train:train",
        "A site's half of a round: train a received adapter on own data, and write the upload to hand back.",
    ),
    "inspect": (
        "adapters:inspect",
        "Ranks, norms, spectra, dead slots, and how much the adapters' subspaces overlap.",
    ),
    "diff": (
        "adapters:diff",
        "Is it the same update in another gauge? Distances of updates, of factors, and angles, module by module.",
    ),
    "validate": (
        "adapters:validate",
        "Check adapters without using them. Exit code 0: all are sound; 2: at least one is refused.",
    ),
    "apply": (
        "adapters:apply",
        "Merge an adapter into the full model, for serving without PEFT. The model is loaded whole.",
    ),
    "privacy": (
        "privacy:privacy",
        "What a private run will cost and what is left of its signal, or what a ledger has spent.",
    ),
    "doctor": (
        "flower.doctor:doctor",
        "Check this machine for a federation: versions, ports, certificates, identity, message sizes, disk.",
    ),
    "methods": ("methods:app", "List the methods, built in and installed, or check one."),
    "experiment": ("experiment:app", "Grids of runs from experiments/*.toml, and what came of them."),
    "flower": ("flower:app", "A federation on Flower: SuperLink, SuperNodes, TLS."),
}
_INTERRUPTED = 130
# Command -> what to do after Ctrl-C. Others store nothing before they end, or say it themselves.
AFTER_INTERRUPT = {
    **dict.fromkeys(("run", "demo", "compare"), "rounds that were finished, if any, are stored: go on with --resume"),
    "experiment run": "runs and rounds that were finished, if any, are stored: the same command goes on",
}

app = typer.Typer(
    cls=lazy_group({name: (f"fedlora.cli.{where}", line) for name, (where, line) in COMMANDS.items()}),
    help="Federated LoRA: GLoRA and its baselines. PEFT adapters in and out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _tell_versions(asked: bool) -> None:
    if asked:
        print(report())
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_versions, is_eager=True, help="What to name in a report of a fault."),
    ] = False,
) -> None: ...


def main() -> None:
    """The entry point: errors of ours are one line and exit code 2; an interrupt says how to go on."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # letters that a narrow encoding lacks are printed by their codes
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False) or 0
        if code == _INTERRUPTED:  # typer's own answer to Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except FedLoRAError as error:
        sys.exit(_complain(str(error)))
    except OSError as error:  # a full disk, a folder that may not be written
        sys.exit(_complain(f"{error.filename or 'a file'}: {error.strerror or error}."))
    except MemoryError:
        sys.exit(_complain("this machine has not the memory for that."))
    except click.ClickException as error:  # a wrong option or argument
        if isinstance(error, click.NoSuchOption):
            from fedlora.cli.keys import meant

            if line := meant(error):
                error = click.UsageError(f"{error.message} {line}", error.ctx)
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        from fedlora.cli.screen import notes

        first, second = [*(word for word in sys.argv[1:] if not word.startswith("-")), "", ""][:2]
        how = AFTER_INTERRUPT.get(first) or AFTER_INTERRUPT.get(f"{first} {second}")
        notes.print(f"interrupted; {how}" if how else "interrupted")
        sys.exit(_INTERRUPTED)


def _complain(message: str) -> int:
    from fedlora.cli.screen import complain  # rich, only where it is needed

    return complain(message)
