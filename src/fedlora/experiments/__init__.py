"""Experiments: a grid of runs from one TOML file, a line of results for each, and what these show.

What an experiment runs is decided before anything runs, in two stages: the search (if there is one), then the runs that
count. Processes, Slurm or Ray make the runs; the launcher alone writes results. A table is a frame with notes under it.

spec, grid            the file; its cells x seeds, each run with its configuration and digest
tune                  the search's choice, from lines of results; what is missing
scores, results       a run's numbers by name; a line for each run
work                  one run in its folder
here, slurm, ray_tasks   where runs go on;   drive   both stages, gathered
comparison            `fedlora compare`: methods on one configuration, as an experiment of one axis
frames                `fedlora.results`
stats, tables, paper, pictures   what the results show;   cost   what runs will cost
"""
