"""Experiments: a grid of runs from one TOML file, a line of results for each, and what these show.

What an experiment runs is decided before anything runs, in two stages: the search (if there is one), then the runs that
count. Processes, Slurm or Ray make the runs; the launcher alone writes results. A table is a frame with notes under it.

Each file uses those above it, and none below (a contract of import-linter):

scores.py       a run's numbers by name
spec.py         an experiment's file; a comparison as an experiment (`fedlora compare`)
grid.py         its cells x seeds: runs, each with its configuration and digest
results.py      a line for each run; as pandas frames (`fedlora.results`)
tune.py         the search's choice from these lines, and what is missing
stats.py        paired intervals, Holm, equivalence
work.py         one run in its folder
here.py         runs in this process, or in several
clusters.py     runs as array jobs on Slurm, or as tasks on Ray
drive.py        both stages, gathered
cost.py         what runs will cost
tables.py       scores, differences, costs, clients, categories: frames with notes
paper.py        the paper's tables, with our numbers
pictures.py     curves, differences, scores by an axis of numbers, categories
"""
