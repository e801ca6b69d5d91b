"""`fedlora` and `python -m fedlora`: the command line, or a word on what it needs where that is not installed."""

from __future__ import annotations

import sys
import warnings

_NEEDED = ("click", "typer", "rich", "pydantic")  # what any command imports, and the core does not bring


def main() -> None:
    """The entry point of the package."""
    # typer 0.20 asks click 8.5 for an old name; with PYTHONWARNINGS=error nothing would start
    warnings.filterwarnings("ignore", r"'click[.]utils[.]get_", DeprecationWarning)
    try:
        from fedlora.cli import main as command_line
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        from fedlora.versions import report

        if sys.argv[1:] == ["--version"]:  # the one question that the core answers
            print(report())
            return
        print(
            f"error: the command line needs {error.name}, which is not installed: only fedlora's core is. "
            f"pip install 'fedlora[train]'.\n{report()}",
            file=sys.stderr,
        )
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
