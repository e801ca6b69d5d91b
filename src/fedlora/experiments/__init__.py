"""Experiments: a grid of runs from one TOML file, their results as small JSON files, and what they say.

spec.py      what an experiment is              results.py   one JSON for each finished run, by digest
plan.py      which runs that makes              tables.py    cells, means, paired differences
runner.py    run what is missing                report.py    one self-contained page
pool.py      in processes that may die          comparison.py    methods on one configuration, as an experiment
"""
