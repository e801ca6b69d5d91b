"""Experiments: a grid of runs from one TOML file, their results as small JSON files, and what they say.

spec.py      what an experiment is              results.py       one JSON for each finished run, by digest
plan.py      which runs that makes              other_files.py   results that are of other data, by name
runner.py    run what is missing                tables.py        cells, means, paired differences
pool.py      in processes that may die          report.py, page/ one self-contained page
claims.py    what is asked (docs/claims.toml)    decisions.py     from results to verdicts, past the gate
verdicts.py  tests, and one rate for a family   looks.py         plans: how many seeds, and who looked when
mergers.py   train once, merge many             map_plots.py     the map as a picture
numbers.py   what runs are compared by          comparison.py    methods on one configuration, as an experiment
"""
