"""Experiments: a grid of runs from one TOML file, their results as small JSON files, and what they say.

Each package uses those above it, and none below it (a contract of import-linter):

scores/    the numbers that runs are compared by        running/   runs what is missing
stored/    one JSON for each finished run, by digest    deciding/  from results to verdicts, past the gate
grid/      what an experiment is, and which runs        tables/    results as tables, and pages filled with them
           that makes                                   report/    one self-contained page, with pictures
"""
