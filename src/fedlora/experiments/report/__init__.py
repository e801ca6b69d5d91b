"""One self-contained HTML page of all experiments, and its pictures.

one_page.py        the HTML page, from the templates in page/
sections.py        one experiment on it
decision_page.py   its part on what is decided
pictures.py        figures as SVG inside it
plots.py           scores and curves
interval_plots.py  paired differences
map_plots.py       the map of differences
budget_plot.py     scores by epsilon
"""
