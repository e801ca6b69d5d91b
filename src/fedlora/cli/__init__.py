"""The command line: thin commands, one file for those that belong together. Bad input is one line and exit code 2."""

from __future__ import annotations

import sys

import click
import typer

from fedlora.cli import adapters, audit, compare, experiment, flower, merge, methods, runs, train
from fedlora.cli.screen import complain, notes
from fedlora.errors import FedLoRAError

app = typer.Typer(
    help="Federated LoRA: GLoRA and its baselines. PEFT adapters in and out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_INTERRUPTED = 130

for command in (
    runs.run, runs.demo, compare.compare, methods.ranks, audit.audit,
    merge.merge, train.train, adapters.inspect, adapters.diff, adapters.validate, adapters.apply,
    flower.doctor,
):  # fmt: skip
    app.command()(command)
app.add_typer(methods.app, name="methods")
app.add_typer(experiment.app, name="experiment")
app.add_typer(flower.app, name="flower")


def main() -> None:
    """The entry point: errors of ours are one line and exit code 2; an interrupt says how to go on."""
    try:
        code = app(standalone_mode=False) or 0
        if code == _INTERRUPTED:  # typer's own answer to Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except FedLoRAError as error:
        sys.exit(complain(str(error)))
    except OSError as error:  # a full disk, a folder that may not be written
        sys.exit(complain(f"{error.filename or 'a file'}: {error.strerror or error}."))
    except click.ClickException as error:  # a wrong option or argument
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        notes.print("interrupted; what was finished is stored: go on with --resume")
        sys.exit(_INTERRUPTED)
