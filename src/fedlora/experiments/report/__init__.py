"""One self-contained HTML page of all experiments, and its pictures."""
