"""`fedlora experiment`: grids of runs, and what came of them. A command's file is imported when it is called."""

from __future__ import annotations

import typer

from fedlora.cli.lazy import lazy_group

COMMANDS = {
    "run": "experiment_commands:run", "retry": "experiment_commands:retry", "status": "experiment_commands:status",
    "table": "experiment_commands:show_table", "plan": "experiment_decide:plan_seeds",
    "decide": "experiment_decide:decide", "plot": "experiment_plot:draw", "fill": "experiment_commands:fill",
    "report": "experiment_commands:report",
}  # fmt: skip
app = typer.Typer(
    cls=lazy_group("fedlora.cli", COMMANDS),
    help="Grids of runs from experiments/*.toml, and what came of them.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None: ...


__all__ = ["app"]
