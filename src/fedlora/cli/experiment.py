"""`fedlora experiment`: grids of runs, and what came of them. A command's file is imported when it is called."""

from __future__ import annotations

import typer

from fedlora.cli.lazy import lazy_group

_OF = "fedlora.cli.experiment_commands"
COMMANDS = {
    "run": (
        f"{_OF}:run",
        "Run what is missing: finished runs are skipped, interrupted ones resumed, failures kept apart.",
    ),
    "retry": (f"{_OF}:retry", "Forget failures, so that the next `run` tries those runs again."),
    "status": (f"{_OF}:status", "How many runs are finished, failed and still to do."),
    "table": (f"{_OF}:show_table", "Means and spreads over seeds, and paired differences with 95 % intervals."),
    "plan": (
        "fedlora.cli.experiment_decide:plan_seeds",
        "Fix the number of seeds, from the pilot's spread, before the runs that count.",
    ),
    "decide": (
        "fedlora.cli.experiment_decide:decide",
        "Better, worse, equivalent or undecided: for each question, once all planned seeds are there.",
    ),
    "plot": (
        "fedlora.cli.experiment_plot:draw",
        "Curves over rounds, dots of merged runs, or a map.",
    ),
    "fill": (
        f"{_OF}:fill",
        "Write tables into Markdown pages, between <!-- filled: EXPERIMENT PROFILE KIND --> and <!-- end -->.",
    ),
    "report": (
        f"{_OF}:report",
        "One self-contained HTML page: what is decided, and all that has results.",
    ),
}
app = typer.Typer(
    cls=lazy_group(COMMANDS), help="Grids of runs from experiments/*.toml, and what came of them.", no_args_is_help=True
)


@app.callback()
def _group() -> None: ...


__all__ = ["app"]
