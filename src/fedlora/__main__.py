"""`fedlora` and `python -m fedlora`: the command line, or a message about the packages that it lacks."""

from __future__ import annotations

import signal
import sys
import warnings

from fedlora.doing import beating

_NEEDED = ("click", "typer", "rich", "pydantic")  # every command imports them, and the core does not install them


def main() -> None:
    """The entry point of the package."""
    try:
        _main()
    except KeyboardInterrupt:  # before the command line could say more
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _main() -> None:
    # typer 0.20 asks click 8.5 for an old name; with PYTHONWARNINGS=error nothing would start.
    warnings.filterwarnings("ignore", r"'click[.]utils[.]get_", DeprecationWarning)
    try:
        from fedlora.cli import main as command_line
        from fedlora.cli.screen import say
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        from fedlora.versions import report

        if sys.argv[1:] == ["--version"]:  # the core can answer this without the command line
            print(report())
            return
        print(
            f"error: the command line needs {error.name}, which is not installed: only fedlora's core is. "
            f"pip install 'fedlora[train]'.\n{report()}",
            file=sys.stderr,
        )
        sys.exit(2)
    words = [word for word in sys.argv[1:3] if word.isidentifier()]
    with beating(say, " ".join(["fedlora", *words]), most=600.0 * (words[:1] == ["flower"])):
        command_line()


if __name__ == "__main__":
    main()
